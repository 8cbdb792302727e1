package worker

import "time"

// Bounds on a backoff after a call for which the worker had no room.
const (
	BackoffMin = 20 * time.Millisecond
	BackoffMax = 2 * time.Second
	// RetryAfterMax is the longest wait that a worker may ask for; its header may be wrong.
	RetryAfterMax = 30 * time.Second
)

// Backoff keeps calls from one instance that had no room, or that fails, each time for twice as long as the time
// before. The zero value keeps none back. It is pure: callers serialise.
type Backoff struct {
	Until time.Time // no call begins before
	wait  time.Duration
}

// Active says whether calls are kept back now.
func (b *Backoff) Active(now time.Time) bool { return now.Before(b.Until) }

// Grow doubles the wait, within bounds, and keeps calls back for it.
func (b *Backoff) Grow(now time.Time, least, most time.Duration) {
	b.wait = min(max(2*b.wait, least), most)
	b.Repeat(now)
}

// Repeat keeps calls back for the wait of the last time.
func (b *Backoff) Repeat(now time.Time) { b.Until = now.Add(b.wait) }

// NoRoom keeps calls back after one for which the worker had no room: for the wait of Grow times jitter (1 for none),
// and for as long as the worker asked (0 if it did not), RetryAfterMax at most.
func (b *Backoff) NoRoom(now time.Time, asked time.Duration, jitter float64) {
	b.Grow(now, BackoffMin, BackoffMax)
	wait := time.Duration(float64(b.wait) * jitter)
	b.Until = now.Add(max(wait, min(asked, RetryAfterMax)))
}

// Reset makes the next wait the shortest again. Calls that are kept back now still are.
func (b *Backoff) Reset() { b.wait = 0 }
