package api

import (
	"context"
	"fmt"
	"strconv"
	"time"

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

// await returns when the entry has ended, when d has passed, or when the server ends; what became of the entry is for
// the caller to read.
func (a *API) await(ctx context.Context, id invalidation.EntryID, d time.Duration) error {
	_, w, err := a.watch.Find(ctx, id, callerOf(ctx).holder())
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
