package inference

import "time"

// tuning has the figures by which a Service works. Programs run with the usual ones, and have no settings for them;
// tests of this package change some.
type tuning struct {
	poll time.Duration // between polls for changed models and instances

	// of slots
	renewEvery time.Duration // between renewals
	leaseRetry time.Duration // between attempts when there is nothing to lease
	idleMax    time.Duration // before an idle slot goes back
	// of one round trip about slots, so that a scheduling thread is not held up by a slow database
	exchangeMax time.Duration
	quarantine  quarantineConfig

	// of runs
	busyWait    time.Duration // before an entry comes back that found no room
	aloneWait   time.Duration // for a slot, of an entry that must be alone
	readyWait   time.Duration // before an entry comes back that found no instance ready
	cancelWait  time.Duration // for a worker to confirm a cancel
	suspectWait time.Duration // before an entry that may have lost a device goes where none was served since
	lossWindow  time.Duration // within which nodes find the device of an instance lost that was lost once
	abortWait   time.Duration // for an instance that gave a generation up to be seen going away
	inlineBytes int           // of a result that is stored in its row
	storeWait   time.Duration // for an object store that is away, before a result is stored in its row
	usageEvery  time.Duration // between folds of the use of calls into penstock.usage_hour

	// of probes
	probeEvery time.Duration // between probes of an instance, jittered by a quarter
	// how old an orphaned slot must be before a probe may free it: the call that it was taken for may still have been
	// on its way when the worker counted
	probeGrace time.Duration
}

func usualTuning() tuning {
	return tuning{
		poll: time.Second,

		renewEvery: time.Second, leaseRetry: 250 * time.Millisecond, idleMax: time.Second,
		exchangeMax: 2 * time.Second,
		quarantine: quarantineConfig{
			failures: 3, fast: 2 * time.Second, lasts: 15 * time.Second, lastsMax: 10 * time.Minute,
		},

		busyWait: 500 * time.Millisecond, aloneWait: 30 * time.Second, readyWait: 2 * time.Second,
		cancelWait:  10 * time.Second,
		suspectWait: 30 * time.Second, lossWindow: 5 * time.Second, abortWait: 30 * time.Second,
		inlineBytes: 64 << 10, storeWait: 15 * time.Minute, usageEvery: 10 * time.Second,

		probeEvery: 5 * time.Second, probeGrace: 10 * time.Second,
	}
}
