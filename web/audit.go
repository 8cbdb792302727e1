package web

import (
	"context"

	"github.com/penstock/penstock/pkg/operator"
)

const auditPerPage = 50

// auditView is the list of changes with their actors and reasons.
type auditView struct {
	Actor, Verb, Object string
	Rows                []auditRow
	Before, Next        int64
}

type auditRow struct {
	operator.Audit
	Address string // of its object; empty: it has no page
}

func (d *Dashboard) auditPages() {
	d.page(page{
		path: "audit", nav: "Audit", section: "System", title: "Audit",
		template: "audit", live: true, read: d.listAudit,
	})
}

func (d *Dashboard) listAudit(ctx context.Context, q query) (any, error) {
	v := auditView{
		Actor: q.Get("actor"), Verb: q.Get("verb"), Object: q.Get("object"),
		Before: q.Int("before"),
	}
	filter := operator.AuditFilter{
		Actor: v.Actor, Verb: v.Verb, Object: v.Object, Before: v.Before,
		Limit: auditPerPage + 1,
	}
	found, err := cached(ctx, d, keyOf("audit", filter), beat,
		func(ctx context.Context) ([]operator.Audit, error) { return d.db.Audits(ctx, filter) })
	if err != nil {
		return nil, err
	}
	if len(found) > auditPerPage {
		found = found[:auditPerPage]
		v.Next = found[auditPerPage-1].ID
	}
	for _, a := range found {
		v.Rows = append(v.Rows, auditRow{a, d.pageOf(a.Object)})
	}
	return v, nil
}
