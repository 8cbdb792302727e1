package invalidation

import (
	"encoding/json"
	"slices"
	"time"
)

// Ending is how one run of an entry ended. Make one with Done, Retry, Fail, Release, Postpone, Yield,
// Expire or Cancel.
type Ending struct {
	Lock  *Lock
	Entry EntryID
	// Last says that the lock covers nothing more that the node will run: the lock record goes with this ending.
	// Entries of the key that are left (or came meanwhile) get a ready row.
	Last bool

	verb     verb
	result   json.RawMessage
	failure  Failure
	delay    time.Duration
	started  bool // of a release, a cancel or an expiry: the run had begun, and start_by binds the entry no more
	reason   string
	throttle throttleOrder
	ran      time.Duration
	meta     json.RawMessage // see Run.Note
	instead  bool            // it stands in place of an ending that was refused, see Refused
}

type verb int

const (
	verbDone verb = iota
	verbRetry
	verbFail
	verbRelease
	verbPostpone
	verbYield
	verbExpire
	verbCancel
)

// is returns a function that tells endings of some verbs.
func is(verbs ...verb) func(*Ending) bool {
	return func(e *Ending) bool { return slices.Contains(verbs, e.verb) }
}

// Done ends an entry well. The result, nil for none, can be read for the queue's ResultRetention.
func Done(l *Lock, e EntryID, result json.RawMessage, ran time.Duration) Ending {
	return Ending{Lock: l, Entry: e, verb: verbDone, result: result, ran: ran, meta: l.notes[e]}
}

// Retry ends a run in error; the entry is tried again after delay, by the database's clock.
func Retry(l *Lock, e EntryID, f Failure, delay, ran time.Duration) Ending {
	f.meta = l.notes[e]
	return Ending{Lock: l, Entry: e, verb: verbRetry, failure: f, delay: delay, ran: ran}
}

// Fail ends an entry in a failure row, with its history: it will not be tried again by itself.
func Fail(l *Lock, e EntryID, f Failure, ran time.Duration) Ending {
	f.meta = l.notes[e]
	return Ending{Lock: l, Entry: e, verb: verbFail, failure: f, ran: ran}
}

// Refused returns the failure that takes the place of an ending whose values the database refuses with err. It has
// nothing that the handler returned or noted, and reads no notes: a handler of a later entry of the lock may be writing
// them (see Run.Note). ok is false for an ending that is such a failure itself: nothing takes its place.
func (e *Ending) Refused(err error) (failure Ending, ok bool) {
	return Ending{
		Lock: e.Lock, Entry: e.Entry, Last: e.Last, verb: verbFail, instead: true,
		failure: Failure{Class: "result", Error: "result cannot be recorded: " + err.Error()},
	}, !e.instead
}

// Release hands a run back without spending an attempt: no capacity, drain or shutdown. The key keeps its
// position, and is not claimed before delay has passed, a day at most, by the database's clock. Make it the last
// ending of the lock: the entries behind keep their order only if they are handed back with it.
func Release(l *Lock, e EntryID, delay time.Duration) Ending {
	return Ending{Lock: l, Entry: e, verb: verbRelease, delay: min(delay, releaseMax)}
}

// releaseMax bounds the delay of a release, so that penstock.ready_now can tell a time of before the database's clock
// was set back.
const releaseMax = 24 * time.Hour

// Postpone ends a run that spends no attempt; the entry becomes due after delay, by the database's clock.
// Later entries of its key may run before it, as before a retry.
func Postpone(l *Lock, e EntryID, delay time.Duration) Ending {
	return Ending{Lock: l, Entry: e, verb: verbPostpone, delay: delay}
}

// Yield ends a lock whose quantum of time is over, before entry e and those behind it have run: the key goes to
// the end of the line and spends nothing.
func Yield(l *Lock, e EntryID) Ending {
	return Ending{Lock: l, Entry: e, Last: true, verb: verbYield}
}

// Expire ends an entry whose start_by or finish_by has passed.
func Expire(l *Lock, e EntryID, reason string) Ending {
	return Ending{Lock: l, Entry: e, verb: verbExpire, reason: reason}
}

// Cancel ends an entry whose cancel was requested while it ran.
func Cancel(l *Lock, e EntryID, reason string) Ending {
	return Ending{Lock: l, Entry: e, verb: verbCancel, reason: reason}
}

// Verb names the ending: done, retry, fail, release, postpone, yield, expire or cancel.
func (e *Ending) Verb() string {
	return [...]string{"done", "retry", "fail", "release", "postpone", "yield", "expire", "cancel"}[e.verb]
}

// HandedBack returns the sentence with which a handler handed an entry back, and for how long; an empty one for every
// other ending, those that throttle included.
func (e *Ending) HandedBack() (reason string, delay time.Duration) {
	if e.verb != verbRelease || e.throttle.wait > 0 {
		return "", 0
	}
	return tidy(e.reason), e.delay
}

// Bytes is about how much the ending takes on its way to the database.
func (e *Ending) Bytes() int {
	return len(e.result) + len(e.meta) + len(e.failure.Error) + len(e.failure.meta)
}

// Failed says that the ending moves the entry to the failures.
func (e *Ending) Failed() bool { return e.verb == verbFail }

// EndsLock reports whether nothing more of the lock may run after the ending: an entry that is handed back takes
// those behind it along, or they would overtake it, and a failure blocks the key where the queue says so.
func (q *Queue) EndsLock(e *Ending) bool {
	return e.verb == verbRelease || e.verb == verbFail && q.Config.OnFailure == OnFailureBlockKey
}

// requeue is the position of the key if it has more entries: front, back or oldest.
func (e *Ending) requeue() string {
	switch {
	case e.verb == verbYield:
		return "back"
	case e.Lock.handedBack:
		return "front"
	case e.Lock.counted >= e.Lock.quantum: // it has used up its quantum; of a solo entry it makes no difference
		return "back"
	default:
		return "oldest"
	}
}
