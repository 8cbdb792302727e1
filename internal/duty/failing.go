package duty

import (
	"context"
	"log/slog"
	"sync"
	"time"
)

// remindAfter is the time between two lines about a step that goes on failing: its error may be another one by then.
const remindAfter = 10 * time.Minute

// Failing logs how a step fails that is repeated, each second for example: a line when it begins to fail, one every ten
// minutes, and one when it works again. Its zero value is ready to use, by any number of goroutines.
type Failing struct {
	mu       sync.Mutex
	failures int       // tries that failed since one worked
	since    time.Time // the first of them
	logged   time.Time // the last one that has a line
}

// Note takes note of the outcome of a try of the step. Lines about its errors have the level; args are as in slog.Log.
// Tries of level ERROR that get no line are counted all the same (see Errors). After ctx has ended nothing is noted: an
// error may come from that.
func (f *Failing) Note(ctx context.Context, log *slog.Logger, level slog.Level, step string, err error, args ...any) {
	if ctx.Err() != nil {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	now := time.Now()
	switch {
	case err == nil && f.failures == 0:
	case err == nil:
		log.InfoContext(ctx, "a step works again", "step", step, "after", now.Sub(f.since).Round(time.Millisecond),
			"failures", f.failures)
		f.failures = 0
	case f.failures > 0 && now.Sub(f.logged) < remindAfter:
		f.failures++
		countError(log, level)
	default:
		if f.failures == 0 {
			f.since = now
		}
		f.failures++
		f.logged = now
		log.Log(ctx, level, "a step failed; trying again", append([]any{"step", step, "error", err}, args...)...)
	}
}
