package api

import (
	"context"

	"github.com/penstock/penstock/pkg/operator"
)

func (a *API) groupRoutes() {
	add(a, route{
		method: "GET", path: "/v1/groups", id: "list-groups",
		summary: "Lock keys of a queue with waiting entries, and their holders",
		scope:   read, of: ofQueue,
	}, a.listGroups)
	add(a, route{
		method: "POST", path: "/v1/queues/{queue}/compact", id: "compact-groups",
		summary: "Merge the waiting entries of one lock key, or of up to 1,000",
		scope:   operate, of: ofQueue,
	}, a.compact)
}

type groupFilter struct {
	Paging
	Queue string `query:"queue" required:"true" maxLength:"48"`
}

func (a *API) listGroups(ctx context.Context, in *groupFilter) (*answer[list[operator.Group]], error) {
	return paged(in.Paging, func(after string, limit int) ([]operator.Group, error) {
		return a.operator.Groups(ctx, in.Queue, after, limit)
	}, func(g operator.Group) string { return g.LockKey })
}

type compaction struct {
	InQueue
	Body struct {
		ReasonBody
		LockKey string `json:"lock_key,omitempty" doc:"Absent: all keys with at least two entries, 1,000 a call."`
		After   string `json:"after,omitempty" doc:"The next of the call before."`
	}
}

type compacted struct {
	Replaced int    `json:"replaced" doc:"Entries that were merged into others."`
	Next     string `json:"next,omitempty" doc:"The last key that was looked at; absent: there are no more."`
}

func (a *API) compact(ctx context.Context, in *compaction) (*answer[compacted], error) {
	replaced, next, err := a.operator.Compact(ctx, in.Queue, in.Body.LockKey, in.Body.After, in.Body.by(ctx))
	return answered(compacted{replaced, next}, err)
}
