package duty

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

// waited waits for an answer of no rows that comes after so long, and returns the time until it came or its bound.
func waited(t *testing.T, w *Wait, answer time.Duration) time.Duration {
	t.Helper()
	start := time.Now()
	ctx, end := w.Context(t.Context(), 0)
	select {
	case <-ctx.Done():
	case <-time.After(answer):
	}
	end(ctx.Err())
	return time.Since(start)
}

func TestWaitDoublesWithLateAnswersAndFollowsThoseThatCome(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := Wait{First: time.Second}
		for _, want := range []time.Duration{1, 2, 4, 8, 10, 10} {
			if got := waited(t, &w, time.Hour); got != want*time.Second {
				t.Errorf("waited %v for an answer that does not come, want %v", got, want*time.Second)
			}
		}
		waited(t, &w, 3*time.Second)
		if got := waited(t, &w, time.Hour); got != 6*time.Second {
			t.Errorf("waited %v after an answer of 3 s, want twice as long", got)
		}
		waited(t, &w, 0)
		if got := waited(t, &w, time.Hour); got != time.Second {
			t.Errorf("waited %v after an answer at once, want the first wait", got)
		}
	})
}

// What was learned of a slow database stays when a lease is read; a wait that learned nothing is that of the new lease.
func TestWaitIsASixthOfTheLease(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var w Wait
		for lease, want := range map[time.Duration]time.Duration{
			6 * time.Second: time.Second, time.Second: 500 * time.Millisecond, time.Hour: AnswerMax,
		} {
			if w.ForLease(lease); max(w.First, w.now) != want {
				t.Errorf("a lease of %v gives a wait of %v, want %v", lease, max(w.First, w.now), want)
			}
		}
		w.ForLease(6 * time.Second)
		waited(t, &w, time.Hour)
		w.ForLease(9 * time.Second)
		if got := waited(t, &w, time.Hour); got != 2*time.Second {
			t.Errorf("waited %v after a late answer and another reading of the lease, want 2s", got)
		}
	})
}

// An error of the server, or the end of the term, says nothing about the time that answers take.
func TestWaitLearnsNothingFromErrors(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := Wait{First: time.Second}
		_, end := w.Context(t.Context(), 0)
		end(errors.New("refused"))
		ctx, cancel := context.WithCancel(t.Context())
		_, end = w.Context(ctx, 0)
		cancel()
		end(context.Canceled)
		if got := waited(t, &w, time.Hour); got != time.Second {
			t.Errorf("waited %v, want 1s", got)
		}
	})
}
