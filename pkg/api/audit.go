package api

import (
	"context"
	"time"

	"github.com/penstock/penstock/pkg/operator"
)

func (a *API) auditRoutes() {
	add(a, route{
		method: "GET", path: "/v1/audit", id: "list-audit",
		summary: "Changes with their actors and reasons, newest first",
		scope:   read, of: ofPlatform,
	}, a.listAudit)
	add(a, route{
		method: "GET", path: "/v1/snapshot", id: "show-snapshot", summary: "The live state of the system at one moment",
		scope: read, of: ofPlatform,
	}, func(ctx context.Context, _ *struct{}) (*answer[operator.Snapshot], error) {
		s, err := a.operator.Snapshot(ctx, nil)
		if err != nil {
			return nil, err
		}
		return answered(*s, nil)
	})
}

type auditFilter struct {
	Paging
	Actor  string    `query:"actor" doc:"The name of a token, or user@host."`
	Verb   string    `query:"verb"`
	Object string    `query:"object"`
	Since  time.Time `query:"since"`
}

func (a *API) listAudit(ctx context.Context, in *auditFilter) (*answer[list[operator.Audit]], error) {
	return paged(in.Paging, func(before int64, limit int) ([]operator.Audit, error) {
		return a.operator.Audits(ctx, operator.AuditFilter{
			Actor: in.Actor, Verb: in.Verb, Object: in.Object,
			Since: in.Since, Before: before, Limit: limit,
		})
	}, func(x operator.Audit) int64 { return x.ID })
}
