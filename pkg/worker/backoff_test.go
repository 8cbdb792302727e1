package worker

import (
	"testing"
	"time"
)

// Each wait is twice the one before, within bounds, and no shorter than the worker asks, up to a bound; a reset begins
// with the shortest.
func TestBackoffDoubles(t *testing.T) {
	now := time.Now()
	var b Backoff
	if b.Active(now) {
		t.Error("calls are kept back at the beginning")
	}
	noRoom := func(asked, want time.Duration) {
		t.Helper()
		b.NoRoom(now, asked, 1)
		if wait := b.Until.Sub(now); wait != want || !b.Active(b.Until.Add(-1)) || b.Active(b.Until) {
			t.Errorf("calls are kept back for %s, want %s", wait, want)
		}
	}
	noRoom(0, BackoffMin)
	noRoom(0, 2*BackoffMin)
	noRoom(time.Hour, RetryAfterMax)
	for range 10 {
		b.NoRoom(now, 0, 1)
	}
	noRoom(0, BackoffMax)
	b.Reset()
	noRoom(time.Millisecond, BackoffMin)
	b.Grow(now, time.Second, time.Minute)
	if b.Repeat(now.Add(time.Hour)); !b.Until.Equal(now.Add(time.Hour + time.Second)) {
		t.Errorf("calls are kept back until %s, want for the last wait anew", b.Until)
	}
}
