package api

import (
	"context"
	"fmt"

	"github.com/penstock/penstock/pkg/operator"
)

func (a *API) blockedKeyRoutes() {
	add(a, route{
		method: "GET", path: "/v1/blocked-keys", id: "list-blocked-keys",
		summary: "Lock keys that are blocked by a failure, with its time",
		scope:   read, of: ofQueue,
	}, a.listBlockedKeys)
	add(a, route{
		method: "POST", path: "/v1/queues/{queue}/blocked-keys/unblock", id: "unblock-keys",
		summary: "Let the entries of one blocked lock key run again, or of up to 1,000",
		scope:   operate, of: ofQueue,
	}, a.unblockKeys)
}

type blockedKeyFilter struct {
	Paging
	OfOneQueue
}

func (a *API) listBlockedKeys(
	ctx context.Context, in *blockedKeyFilter,
) (*answer[list[operator.BlockedKey]], error) {
	return paged(in.Paging, func(after operator.BlockedKeyName, limit int) ([]operator.BlockedKey, error) {
		return a.operator.BlockedKeys(ctx, in.Queue, after, limit)
	}, func(k operator.BlockedKey) operator.BlockedKeyName {
		return operator.BlockedKeyName{Queue: k.Queue, LockKey: k.LockKey}
	})
}

type unblocking struct {
	InQueue
	Body struct {
		ReasonBody
		LockKey string `json:"lock_key,omitempty" maxLength:"1024"`
		All     bool   `json:"all,omitempty" doc:"All keys of the queue, 1,000 a call. Either this or lock_key."`
		Retry   bool   `json:"retry,omitempty" doc:"Put the failed entries back first, at the positions that they had."`
	}
}

type unblocked struct {
	Unblocked int  `json:"unblocked"`
	More      bool `json:"more" doc:"There are more blocked keys in the queue: call again."`
}

func (a *API) unblockKeys(ctx context.Context, in *unblocking) (*answer[unblocked], error) {
	if in.Body.All == (in.Body.LockKey != "") {
		return nil, fmt.Errorf("%w: give either lock_key or all", errInvalid)
	}
	n, more, err := a.operator.UnblockKeys(ctx, operator.Unblock{
		Queue: in.Queue, LockKey: in.Body.LockKey, Retry: in.Body.Retry, By: in.Body.by(ctx),
	})
	return answered(unblocked{n, more}, err)
}
