package webhook

import (
	"time"
)

// Schedule returns how long to wait before attempt n, counted from 1, and
// whether there is one: at once, then after 5 s, 5 min, 30 min, 2 h, 5 h, 10 h,
// 14 h, 20 h and 24 h, some three days in all. jitter is a random number in
// [0, 1); it adds up to a fifth and never shortens a wait.
func Schedule(n int, jitter float64) (wait time.Duration, ok bool) {
	if n < 1 || n > len(waits) {
		return 0, false
	}
	wait = waits[n-1]
	return wait + time.Duration(jitter*float64(wait)/5), true
}

// retryAfterMax bounds what a receiver may ask for.
const retryAfterMax = 24 * time.Hour

var waits = [...]time.Duration{
	0, 5 * time.Second, 5 * time.Minute, 30 * time.Minute, 2 * time.Hour,
	5 * time.Hour, 10 * time.Hour, 14 * time.Hour, 20 * time.Hour, 24 * time.Hour,
}

// due is the age that a message has at attempt n at most, with all jitter; beyond the last one, at that: 91 hours.
func due(n int) (age time.Duration) {
	for _, wait := range waits[:min(n, len(waits))] {
		age += wait + wait/5
	}
	return age
}

// scheduleEnd is the age at which a message has its last attempt at the latest.
func scheduleEnd() time.Duration { return due(len(waits)) }

// age is where a message is in its schedule, which begins when the message was accepted. Where the first attempt came
// after the end, as of a failure that an operator has tried again, the schedule begins with that attempt. tried is the
// time since it, 0 before it.
func age(accepted, tried time.Duration) time.Duration {
	if accepted-tried > scheduleEnd() {
		return tried
	}
	return accepted
}

// How long a message waits for a secret that cannot be read: at first, and at most.
const secretWaitMin, secretWaitMax = 10 * time.Second, 10 * time.Minute

// secretWait grows with the time since the first attempt: many messages may wait for days, and each run costs a claim.
func secretWait(tried time.Duration) time.Duration {
	return min(max(tried/20, secretWaitMin), secretWaitMax)
}
