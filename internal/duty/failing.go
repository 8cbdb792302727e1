package duty

import (
	"context"
	"errors"
	"log/slog"
	"maps"
	"sync"
	"time"
)

const (
	// remindAfter is the time between two lines about a step that goes on failing: its error may be another one by
	// then.
	remindAfter = 10 * time.Minute
	// againAfter is the time between two lines about a step that worked between them: some fail at every second try.
	againAfter = 10 * time.Second
)

// Failing logs how a step fails that is repeated, each second for example: a line when it begins to fail, one every ten
// minutes, and one when it works again. Where it fails again within ten seconds of such a line, the next one comes
// after these, if it fails still. Its zero value is ready to use, by any number of goroutines.
type Failing struct {
	mu       sync.Mutex
	failures int       // tries that failed since one worked
	since    time.Time // the first of them
	logged   time.Time // the last try that has a line
	told     bool      // one of failures has a line
}

// Note takes note of the outcome of a try of the step. Lines about its errors have the level; args are as in slog.Log.
// Tries of level ERROR that get no line are counted all the same (see Errors). After ctx was cancelled nothing is
// noted: an error may come from that. A try that took longer than the deadline of ctx has failed.
func (f *Failing) Note(ctx context.Context, log *slog.Logger, level slog.Level, step string, err error, args ...any) {
	if cancelled(ctx) {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	now := time.Now()
	switch {
	case err == nil:
		if f.told {
			log.InfoContext(ctx, "a step works again", "step", step,
				"after", now.Sub(f.since).Round(time.Millisecond), "failures", f.failures)
		}
		f.failures, f.told = 0, false
		return
	case f.failures == 0:
		f.since = now
	}
	f.failures++
	if quiet := f.quiet(); now.Sub(f.logged) < quiet {
		countError(log, level)
		return
	}
	f.logged, f.told = now, true
	log.Log(ctx, level, "a step failed; trying again", append([]any{"step", step, "error", err}, args...)...)
}

// quiet is for how long after a line a try that fails has none. Called with mu held.
func (f *Failing) quiet() time.Duration {
	if f.told {
		return remindAfter
	}
	return againAfter
}

func cancelled(ctx context.Context) bool { return errors.Is(ctx.Err(), context.Canceled) }

// FailingEach is a Failing for each of many objects of a step, such as queues, by a key. Its zero value is ready to
// use, by any number of goroutines. It forgets objects that work again, and those that have not been tried for twice
// the time of a reminder: they may be gone.
type FailingEach struct {
	mu    sync.Mutex
	steps map[string]*tried
	swept time.Time // the last look for objects to forget
}

type tried struct {
	Failing
	last  time.Time // a try that failed
	works bool      // a later one did not
}

// over reports whether nothing needs to be known of an object any more.
func (t *tried) over(now time.Time) bool {
	since := now.Sub(t.last)
	return since > 2*remindAfter || t.works && since > againAfter
}

// Note is that of the Failing of a key. All lines have args, the one about a step that works again as well.
func (f *FailingEach) Note(ctx context.Context, log *slog.Logger, level slog.Level, step, key string, err error,
	args ...any,
) {
	if cancelled(ctx) {
		return
	}
	if t := f.of(key, err); t != nil {
		t.Note(ctx, log.With(args...), level, step, err)
	}
}

// of returns the Failing of a key, nil for one that works and has not failed.
func (f *FailingEach) of(key string, err error) *tried {
	f.mu.Lock()
	defer f.mu.Unlock()
	now, t := time.Now(), f.steps[key]
	switch {
	case err == nil && t == nil:
		return nil
	case err == nil:
		if t.works = true; t.over(now) {
			delete(f.steps, key)
		}
		return t
	case t == nil:
		f.sweep(now)
		t = &tried{}
		f.steps[key] = t
	}
	t.last, t.works = now, false
	return t
}

// sweep forgets objects, if it is time to look for them. Called with mu held.
func (f *FailingEach) sweep(now time.Time) {
	if f.steps == nil {
		f.steps = map[string]*tried{}
	}
	if now.Sub(f.swept) > againAfter {
		f.swept = now
		maps.DeleteFunc(f.steps, func(_ string, t *tried) bool { return t.over(now) })
	}
}

// LeaseArgs are the attributes of a line about a renewal of a lease that failed: how long ago the last one that was
// answered began, and in how long the lease ends, 0 if it is over. Both are rounded to milliseconds.
func LeaseArgs(renewed time.Time, lease time.Duration) []any {
	ago := time.Since(renewed)
	return []any{
		"renewed_ago", ago.Round(time.Millisecond), "lease_ends_in", max(0, lease-ago).Round(time.Millisecond),
	}
}
