package invalidation

import "time"

// measured is what a handler said that its run used.
type measured struct {
	used time.Duration
	said bool
}

// Charge sets the use of the resource that flows share, such as the time of a GPU. It is booked for
// the flow in place of the time for which the run had a thread; 0 for a run that only waited. An
// entry that declares a cost is booked with that, unless the charge is 0 or the run spends no attempt.
// The last charge counts, and a negative one is none. Call it from the goroutine that Handle was called in.
func (r *Run) Charge(used time.Duration) {
	if used >= 0 {
		r.measured = measured{used, true}
	}
}

// Charged is the use of the run: the charge of its handler, or ran, the time for which it had a
// thread.
func (r *Run) Charged(ran time.Duration) time.Duration {
	if r.measured.said {
		return r.measured.used
	}
	return ran
}

// worked reports whether a run that is handed back had begun its work: by the charge of its handler, since a run that
// only waited is charged nothing, else as unsaid.
func (r *Run) worked(unsaid bool) bool {
	if r.measured.said {
		return r.measured.used > 0
	}
	return unsaid
}
