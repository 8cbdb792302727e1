package api

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/pkg/invalidation"
)

// waitMax bounds how long one request waits for the end of an entry.
const waitMax = time.Minute

// waitOf reads how long the client will wait: a duration as in 30s, or whole seconds.
func waitOf(text string) (time.Duration, error) {
	if text == "" {
		return 0, nil
	}
	d, err := time.ParseDuration(text)
	if seconds, serr := strconv.ParseUint(text, 10, 16); serr == nil {
		d, err = time.Duration(seconds)*time.Second, nil
	}
	if err != nil || d < 0 {
		return 0, fmt.Errorf("%w: wait is a duration such as 30s", errInvalid)
	}
	return min(d, waitMax), nil
}

// findSQL says which queue an entry is in, and whether it has ended.
const findSQL = `SELECT f.queue_id, f.ended IS NOT NULL FROM penstock.find_entry($1) f WHERE f.queue_id IS NOT NULL`

// subscribe registers for changes of an entry. Without a waiter and without an error, the entry has ended.
func (a *API) subscribe(ctx context.Context, id invalidation.EntryID) (*waiter, error) {
	var queue int32
	var ended bool
	err := a.db.QueryRow(ctx, findSQL, id).Scan(&queue, &ended)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return nil, fmt.Errorf("wait for entry %d: %w", id, invalidation.ErrEntryNotFound)
	case err != nil:
		return nil, fmt.Errorf("wait for entry %d: %w", id, err)
	case ended:
		return nil, nil
	}
	return a.watch.wait(queue, id)
}

// await returns when the entry has ended, when d has passed, or when the server ends; what became of the entry is for
// the caller to read.
func (a *API) await(ctx context.Context, id invalidation.EntryID, d time.Duration) error {
	w, err := a.subscribe(ctx, id)
	if w == nil || err != nil {
		return err
	}
	defer w.leave()
	timer := time.NewTimer(d)
	defer timer.Stop()
	for !w.seen().ended {
		select {
		case <-w.changed:
		case <-timer.C:
			return nil
		case <-a.draining:
			return nil
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
	return nil
}

// Drain makes requests that wait return with what is known. Call it when the server is to end, which waits for requests.
func (a *API) Drain() { a.drain() }
