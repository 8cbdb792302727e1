package duty

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// pausesAfter runs passes that take so long each and ask for these pauses, and returns the pauses that followed.
func pausesAfter(t *testing.T, l Loop, took time.Duration, asked ...time.Duration) (pauses []time.Duration) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithCancel(t.Context())
		defer cancel()
		l.Log = slog.New(slog.DiscardHandler)
		var ended time.Time
		err := l.Run(ctx, func(context.Context) (time.Duration, error) {
			if !ended.IsZero() {
				pauses = append(pauses, time.Since(ended))
			}
			if len(pauses) == len(asked) {
				cancel()
				return 0, nil
			}
			time.Sleep(took)
			ended = time.Now()
			return asked[len(pauses)], nil
		})
		if err != nil {
			t.Error(err)
		}
	})
	return pauses
}

func TestASpacedLoopTakesHalfOfTheTimeAtMost(t *testing.T) {
	const ms = time.Millisecond
	for what, c := range map[string]struct {
		spaced bool
		random float64
		took   time.Duration
		want   []time.Duration // after passes that asked for 0, 30 ms, 500 ms and 5 s
	}{
		"exact":                 {false, 0.9, 0, []time.Duration{0, 30 * ms, 500 * ms, 5000 * ms}},
		"exact and slow":        {false, 0.9, 700 * ms, []time.Duration{0, 30 * ms, 500 * ms, 5000 * ms}},
		"spaced, early":         {true, 0, 0, []time.Duration{0, 30 * ms, 400 * ms, 4000 * ms}},
		"spaced, late":          {true, 1, 0, []time.Duration{0, 30 * ms, 600 * ms, 6000 * ms}},
		"spaced and slow":       {true, 0.5, 700 * ms, []time.Duration{700 * ms, 700 * ms, 700 * ms, 5000 * ms}},
		"spaced, in the middle": {true, 0.5, 20 * ms, []time.Duration{20 * ms, 30 * ms, 500 * ms, 5000 * ms}},
	} {
		l := Loop{Name: "test", Pause: 500 * ms, Spaced: c.spaced, Random: func() float64 { return c.random }}
		if got := pausesAfter(t, l, c.took, 0, 30*ms, 500*ms, 5000*ms); !slices.Equal(got, c.want) {
			t.Errorf("%s: the pauses are %v, want %v", what, got, c.want)
		}
	}
}

func TestAPassThatPanicsHasFailed(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var errs Errors
		var text bytes.Buffer
		l := Loop{Name: "test", Pause: time.Second, GiveUp: 10 * time.Second, Log: errs.Log("test", slog.New(slog.NewTextHandler(&text, nil)))}
		n := 0
		err := l.Run(t.Context(), func(context.Context) (time.Duration, error) {
			if n++; n != 2 {
				panic("row 7")
			}
			return time.Hour, nil
		})
		if !errors.Is(err, ErrPanic) || !strings.Contains(err.Error(), "row 7") {
			t.Errorf("the loop gave up for %v", err)
		}
		if n < 10 || n > 15 {
			t.Errorf("%d passes: want one that panicked, one that did not, and those of GiveUp", n)
		}
		if counted := errs.Counts()["test"]; counted != int64(n-1) {
			t.Errorf("%d errors were counted of %d panics", counted, n-1)
		}
		if !strings.Contains(text.String(), "duty_test.go") {
			t.Errorf("the log has no stack: %s", text.String())
		}
	})
}
