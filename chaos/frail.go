package main

import (
	"fmt"
	"slices"
	"strconv"
	"time"

	"github.com/penstock/penstock/chaos/judge"
)

// frailQueue is that of a model whose entries fail for good after a few errors or crashes. Its entries have priorities,
// so that no promise about the order of a lane is judged by them.
const (
	frailQueue    = "frail"
	frailAttempts = 3
	frailCrashes  = 3
)

// frailKeys are how many lock keys that queue has.
const frailKeys = 4

// frail makes the next operation on that queue: an entry that always fails, at once or after seconds, one that expires
// while it waits, while it is about to be claimed or while it runs, or one that is cancelled while it runs. One in
// three has a callback, and one in three a lock key.
func (l *load) frail(p *judge.Push, in payload, kind int, random uint64) func() {
	p.Queue, p.FailMax, p.CrashMax = frailQueue, frailAttempts, frailCrashes
	body := map[string]any{"priority": random % 10}
	if random/10%3 == 0 {
		l.withCallback(p, body)
	}
	if random/30%3 == 0 {
		p.Key = "key " + strconv.FormatUint(random/90%frailKeys, 10)
		body["lock_key"] = p.Key
	}
	by := func(ms uint64) time.Time { return time.Now().Add(time.Duration(ms) * time.Millisecond) }
	switch kind {
	case 0:
		in.Fail = 1000
	case 1: // a node that was stopped meanwhile records its error while another one runs the entry
		in.MS, in.Fail = 1000+int(random/1000%2500), 1000
	case 2: // the leader has to find it: it is not due, and no node claims it, until long after its time is over
		p.FinishBy = by(500 + random%1500)
		p.Due = p.FinishBy.Add(l.lease + 20*time.Second)
		body["finish_by"], body["due_at"] = p.FinishBy, p.Due
	case 3:
		p.StartBy = by(random % 400)
		body["start_by"] = p.StartBy
	case 4:
		in.MS, p.FinishBy = 7000, by(1000+random%1500)
		body["finish_by"] = p.FinishBy
	default: // nearly as long as a node waits for an answer, but of a key, which is in use until the call has ended
		in.MS, p.Cancel = 7000, &judge.Cancel{}
		if p.Key != "" {
			in.MS = 3000
		}
	}
	body["payload"] = in
	return func() {
		l.pushAndCancel(p, body, func() {
			l.worker.awaitCall(p.Op, runAwaited)
			time.Sleep(time.Duration(300+random%700) * time.Millisecond)
		})
	}
}

// runAwaited is how long a client waits for the run that it is to cancel: entries wait in line before it.
const runAwaited = 20 * time.Second

// awaitCall returns when a call of an operation has begun, or after a time.
func (w *recorder) awaitCall(op int64, most time.Duration) {
	begun := func() bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		return slices.ContainsFunc(w.calls, func(c *judge.Call) bool { return c.Op == op })
	}
	for from := time.Now(); !begun() && time.Since(from) < most; {
		time.Sleep(50 * time.Millisecond)
	}
}

// patience is the part of a queue's settings that says when its entries fail for good.
func patience(attempts, crashes int) string {
	return fmt.Sprintf(`"retry": {"base": %v, "cap": 1, "max_attempts": %d}, "crash_limit": %d`,
		retryBase.Seconds(), attempts, crashes)
}
