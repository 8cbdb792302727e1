package api

import (
	"context"

	"github.com/penstock/penstock/pkg/operator"
)

func (a *API) lockRoutes() {
	add(a, route{
		method: "GET", path: "/v1/locks", id: "list-locks",
		summary: "Lock records with their nodes and entries, oldest first",
		scope:   read, of: ofQueue,
	}, a.listLocks)
	add(a, route{
		method: "GET", path: "/v1/locks/suspects", id: "verify-locks",
		summary: "Lock records that break a rule of the schema; an empty list is the normal answer",
		scope:   read, of: ofPlatform,
	}, a.verifyLocks)
	change(a, route{
		method: "POST", path: "/v1/queues/{queue}/locks/{token}/unlock", id: "force-unlock",
		summary: "End a lock record by hand; its key is ready again at its old position",
		scope:   admin, of: ofQueue,
	}, func(ctx context.Context, in *unlocking) error {
		return a.operator.ForceUnlock(ctx, operator.Unlock{
			Queue: in.Queue, Token: in.Token, LockKey: in.Body.LockKey, EvenListed: in.Body.EvenListed,
			By: in.Body.by(ctx),
		})
	})
}

// unlocking names a lock by queue, key and token: all must match.
type unlocking struct {
	InQueue
	Token int64 `path:"token" minimum:"1"`
	Body  struct {
		ReasonBody
		LockKey    string `json:"lock_key" minLength:"1" maxLength:"1024" doc:"As the list of locks has it: #ID for an entry without one."`
		EvenListed bool   `json:"even_listed,omitempty" doc:"Although its node lives and lists the lock: the run goes on, its result is refused, and the entry runs a second time."`
	}
}

type lockFilter struct {
	Paging
	OfOneQueue
	Node int64 `query:"node" doc:"The id of a node."`
}

func (a *API) listLocks(ctx context.Context, in *lockFilter) (*answer[list[operator.Lock]], error) {
	return paged(in.Paging, func(after int64, limit int) ([]operator.Lock, error) {
		return a.operator.Locks(ctx, operator.LockFilter{
			Queue: in.Queue, NodeID: operator.NodeID(in.Node),
			After: after, Limit: limit,
		})
	}, func(l operator.Lock) int64 { return l.Token })
}

type suspectPaging struct {
	Limit  int    `query:"limit" minimum:"1" maximum:"1000" default:"1000" doc:"How many, at most."`
	Cursor string `query:"cursor" maxLength:"2000" doc:"The next_cursor of the page before."`
}

func (a *API) verifyLocks(ctx context.Context, in *suspectPaging) (*answer[list[operator.Suspect]], error) {
	return paged(Paging{in.Limit, in.Cursor}, func(after int64, limit int) ([]operator.Suspect, error) {
		return a.operator.VerifyLocks(ctx, after, limit)
	}, func(s operator.Suspect) int64 { return s.Token })
}
