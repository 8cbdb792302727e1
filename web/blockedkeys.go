package web

import (
	"context"
	"fmt"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
)

// blockedRows is how many blocked lock keys the page of locks lists at most.
const blockedRows = 50

// blockedKey is a lock key whose entries do not run since one of them failed, with the address of its entries.
type blockedKey struct {
	operator.BlockedKey
	Address string
}

func (d *Dashboard) blockedKeyVerbs() {
	d.verb(verb{
		name: "unblock_key", title: "Unblock lock key", role: operatorRole, objects: []string{"queue", "lock_key"},
		fields: []field{{
			Name: "retry", Label: "Run the failed entry again first", Kind: "checkbox",
			Hint: "It returns to its old position, with all of its attempts. Otherwise it stays a failure.",
		}},
		effect: "Entries of the key run again, in the order of acceptance. The next failure blocks the key again.",
		do: func(ctx context.Context, in form, by invalidation.By) (string, error) {
			queue, key := in.Get("queue"), in.Get("lock_key")
			_, _, err := d.change.UnblockKeys(ctx, operator.Unblock{
				Queue: queue, LockKey: key, Retry: in.Get("retry") != "", By: by,
			})
			return fmt.Sprintf("Lock key %s of queue %s is unblocked.", key, queue), err
		},
	})
}

// listBlocked reads the blocked lock keys of the chosen queue, or of all.
func (v *locksView) listBlocked(ctx context.Context, d *Dashboard) error {
	found, err := cached(ctx, d, keyOf("blocked keys", v.Queue), 2*time.Second,
		func(ctx context.Context) ([]operator.BlockedKey, error) {
			return d.db.BlockedKeys(ctx, v.Queue, operator.BlockedKeyName{}, blockedRows+1)
		})
	if err != nil {
		return err
	}
	if v.MoreBlocked = len(found) > blockedRows; v.MoreBlocked {
		found = found[:blockedRows]
	}
	for _, k := range found {
		v.Blocked = append(v.Blocked, blockedKey{k, d.entriesOf(k.Queue, k.LockKey)})
	}
	return nil
}
