package api

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/httpserver"
	"github.com/penstock/penstock/pkg/invalidation"
)

// waitMax bounds how long one request waits for the end of an entry: a minute, which leaves time to answer.
const waitMax = httpserver.RequestMax - 30*time.Second

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
const findSQL = `
SELECT f.queue_id, f.queue_name, f.ended IS NOT NULL FROM penstock.find_entry($1) f WHERE f.queue_id IS NOT NULL`

// subscribe registers for changes of an entry, and names its queue. Without a waiter and without an error,
// the entry has ended.
func (a *API) subscribe(
	ctx context.Context, id invalidation.EntryID,
) (queue string, w *invalidation.EntryWaiter, err error) {
	var number int32
	var ended bool
	err = a.db.QueryRow(ctx, findSQL, id).Scan(&number, &queue, &ended)
	if errors.Is(err, pgx.ErrNoRows) {
		err = invalidation.ErrEntryNotFound
	}
	if err != nil {
		return "", nil, fmt.Errorf("wait for entry %d: %w", id, err)
	}
	if !ended {
		w, err = a.watch.Wait(number, id, callerOf(ctx).holder())
	}
	return queue, w, err
}

// await returns when the entry has ended, when d has passed, or when the server ends; what became of the entry is for
// the caller to read.
func (a *API) await(ctx context.Context, id invalidation.EntryID, d time.Duration) error {
	_, w, err := a.subscribe(ctx, id)
	if w == nil || err != nil {
		return err
	}
	defer w.Leave()
	timer := time.NewTimer(d)
	defer timer.Stop()
	for !w.News().Ended {
		select {
		case <-w.Changed:
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

// Drain makes waiting requests return with the present state. Call it when the server is to end,
// which waits for requests.
func (a *API) Drain() { a.drain() }
