package invalidation

import "time"

// measured is what a handler said that its run used.
type measured struct {
	used time.Duration
	said bool
}

// Charge says what the run used of the resource that flows share, such as the time of a GPU: that
// is booked for its flow in place of the time for which it had a thread, 0 for a run that only
// waited. An entry that declares a cost is booked with that. The last charge counts, and a negative
// one is none. Call it from the goroutine that Handle was called in.
func (r *Run) Charge(used time.Duration) {
	if used >= 0 {
		r.measured = measured{used, true}
	}
}

// Charged is what the run used: what its handler said, or ran, the time for which it had a thread.
func (r *Run) Charged(ran time.Duration) time.Duration {
	if r.measured.said {
		return r.measured.used
	}
	return ran
}
