package invalidation

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/penstock/penstock/internal/postgres"
)

func TestJudgeFindsWhatAnErrorAsksForHoweverItIsWrapped(t *testing.T) {
	boom := errors.New("boom")
	r := &Run{Queue: &Queue{Config: Config{Retry: RetryPolicy{
		MaxAttempts: 3, Classes: map[string]RetryPolicy{"input": {MaxAttempts: 1}},
	}}}, Entry: Entry{ID: 1}, Lock: &Lock{Key: "#1"}}
	for name, c := range map[string]struct {
		err  error
		want Ending
	}{
		"plain":                 {boom, Ending{verb: verbRetry, delay: time.Second, failure: Failure{Error: "boom"}}},
		"permanent":             {Permanent(boom), Ending{verb: verbFail, failure: Failure{Error: "boom"}}},
		"wrapped":               {fmt.Errorf("a: %w", Permanent(boom)), Ending{verb: verbFail, failure: Failure{Error: "a: boom"}}},
		"beside a cause":        {fmt.Errorf("%w: %w", ErrRunTimeout, Permanent(boom)), Ending{verb: verbFail, failure: Failure{Class: "timeout"}}},
		"joined":                {errors.Join(boom, RetryIn(time.Minute, boom)), Ending{verb: verbRetry, delay: time.Minute}},
		"delay of the outer":    {RetryIn(time.Hour, RetryIn(time.Second, boom)), Ending{verb: verbRetry, delay: time.Hour}},
		"full, and a retry":     {NoCapacity(time.Minute, RetryIn(time.Hour, boom)), Ending{verb: verbRelease, delay: time.Minute}},
		"class without retries": {WithClass("input", boom), Ending{verb: verbFail, failure: Failure{Class: "input"}}},
		"class and delay":       {WithClass("oom", RetryIn(time.Hour, boom)), Ending{verb: verbRetry, delay: time.Hour, failure: Failure{Class: "oom"}}},
		"timeout":               {ErrRunTimeout, Ending{verb: verbRetry, delay: time.Second, failure: Failure{Class: "timeout"}}},
		"snooze":                {Snooze(time.Minute), Ending{verb: verbPostpone, delay: time.Minute}},
		"snooze for no time":    {Snooze(0), Ending{verb: verbPostpone, delay: time.Millisecond}},
		"snooze to the past":    {Snooze(-time.Minute), Ending{verb: verbPostpone, delay: time.Millisecond}},
		"no capacity":           {NoCapacity(0, boom), Ending{verb: verbRelease}},
		"throttle":              {ThrottleQueue(time.Minute, boom), Ending{verb: verbRelease, throttle: throttleOrder{wait: time.Minute}}},
		"throttle a flow":       {fmt.Errorf("x: %w", ThrottleFlow(time.Minute, boom)), Ending{verb: verbRelease, throttle: throttleOrder{time.Minute, true}}},
		"throttle for no time":  {ThrottleQueue(0, boom), Ending{verb: verbRelease, throttle: throttleOrder{wait: time.Second}}},
		"flow, for no time":     {ThrottleFlow(-1, boom), Ending{verb: verbRelease, throttle: throttleOrder{time.Second, true}}},
		"cancelled":             {fmt.Errorf("x: %w", ErrCancelled), Ending{verb: verbCancel}},
		"late":                  {ErrFinishBy, Ending{verb: verbExpire}},
		"drained":               {fmt.Errorf("%w: %w", ErrDraining, Permanent(boom)), Ending{verb: verbRelease}},
		"unrepeatable, drained": {fmt.Errorf("%w: %w", ErrDraining, Unrepeatable(boom)), Ending{verb: verbFail}},
		"permanent, no error":   {Permanent(nil), Ending{verb: verbFail}},
		"full, no error":        {NoCapacity(time.Minute, nil), Ending{verb: verbRelease, delay: time.Minute}},
		"class of no error":     {WithClass("input", nil), Ending{verb: verbDone}},
		"panic":                 {&PanicError{Value: 1}, Ending{verb: verbRetry, delay: time.Second, failure: Failure{Class: "panic"}}},
	} {
		got := Judge(r, nil, c.err, 0, 0)
		if got.verb != c.want.verb || got.delay != c.want.delay || got.throttle != c.want.throttle || got.failure.Class != c.want.failure.Class {
			t.Errorf("%s: judged %+v, want %+v", name, got, c.want)
		}
	}
	r.Entry.Attempt = 2
	if got := Judge(r, nil, boom, 0, 0); got.verb != verbFail {
		t.Errorf("after the last attempt: %+v, want a failure", got)
	}
	if got := Judge(r, []byte("not json"), nil, 0, 0); got.verb != verbFail || got.failure.Class != "result" {
		t.Errorf("a result that is not JSON: %+v", got)
	}
}

func TestAThrottleKeepsEveryNodeOff(t *testing.T) {
	b := newBed(t, Config{})
	b.pushAll(b.pool, Push{}, Push{}, Push{Flow: "x"}, Push{Flow: "x"})
	x := Lane{Priority: 1, Flow: "x"}
	end := func(lane Lane, err error) EntryID {
		l := b.claimAs(ClaimRequest{Node: here, Lane: lane, Limit: 1}).Locks[0]
		run := &Run{Queue: b.q, Entry: l.Entries[0], Lock: l, Node: here}
		b.settle(last(Judge(run, nil, err, 0, 0)))
		return run.Entry.ID
	}
	limited := func(lane Lane) bool {
		c := b.claimAs(ClaimRequest{Node: there, Lane: lane, Limit: 1})
		b.settle(releaseAll(c.Locks...)...)
		if c.Limited != (len(c.Locks) == 0) || c.Limited && (c.Wait < 50*time.Second || c.Wait > time.Minute) {
			t.Errorf("claim of %v: %d locks, limited %t, wait %s", lane, len(c.Locks), c.Limited, c.Wait)
		}
		return c.Limited
	}
	first := end(x, ThrottleFlow(time.Minute, errors.New("429 of x")))
	if !limited(x) || limited(usual) {
		t.Error("a flow that is throttled should not be claimed from, and no other")
	}
	end(usual, errors.Join(ThrottleQueue(time.Minute, errors.New("429 of all")), Snooze(time.Hour)))
	if !limited(usual) || !limited(x) {
		t.Error("a queue that is throttled should not be claimed from in every flow")
	}
	e, err := explain(b.ctx, b.pool, first)
	if err != nil || len(e.Reasons) < 2 {
		t.Errorf("explained %+v (%v), want both throttles", e, err)
	}
	for _, flow := range []*string{nil, &x.Flow} {
		var stood bool
		err := b.pool.QueryRow(b.ctx, `SELECT penstock.lift_throttle('work', $1)`, flow).Scan(&stood)
		if !stood || err != nil {
			t.Fatalf("lifted: %t, %v", stood, err)
		}
	}
	if c := b.claimAs(ClaimRequest{Node: here, Lane: x, Limit: 1}); len(c.Locks) != 1 || c.Locks[0].Entries[0].ID != first || c.Locks[0].Entries[0].Attempt != 0 {
		t.Errorf("claimed %v, want %d in its old place and no attempt spent", entryIDs(c.Locks...), first)
	}
}

func TestAStaleThrottleIsRefused(t *testing.T) {
	b := newBed(t, Config{})
	b.push("")
	old := b.claimOne()
	b.settle(releaseAll(old)...)
	fresh := b.claimOne()
	run := &Run{Queue: b.q, Entry: old.Entries[0], Lock: old, Node: here}
	b.settleOn(b.pool, last(Judge(run, nil, ThrottleQueue(time.Minute, errors.New("429")), 0, 0)))
	if n := b.count(`SELECT count(*) FROM penstock.throttle`); n != 0 {
		t.Error("a run that lost its lock pushed the queue back")
	}
	b.settle(doneAll(fresh)...)
}

func TestThrottlesOfManyRunsKeepTheLongest(t *testing.T) {
	b := newBed(t, Config{})
	throttle := func(d time.Duration) error {
		_, err := b.pool.Exec(b.ctx, `SELECT penstock.throttle('work', $1)`, d)
		return err
	}
	for _, d := range []time.Duration{time.Minute, time.Second, time.Hour, time.Minute} {
		if err := throttle(d); err != nil {
			t.Fatal(err)
		}
	}
	if n := b.count(`SELECT count(*) FROM penstock.throttle WHERE until > now() + interval '59 minutes'`); n != 1 {
		t.Error("the longest order does not stand")
	}
	if err := throttle(48 * time.Hour); postgres.Code(err) != "PS002" {
		t.Errorf("two days: %v, want PS002", err)
	}
}

func TestProgressAndCheckpointsAreFenced(t *testing.T) {
	b := newBed(t, Config{})
	b.push("")
	run := func() *Run {
		l := b.claimOne()
		return &Run{Queue: b.q, Entry: l.Entries[0], Lock: l, Node: here}
	}
	first := run()
	var at struct{ Page int }
	if found, err := first.Load(b.ctx, &at); found || err != nil {
		t.Fatalf("found a checkpoint before there was one (%v)", err)
	}
	for _, err := range []error{first.Progress(b.ctx, 0.25, "a quarter"), first.Save(b.ctx, map[string]int{"page": 7}), first.Progress(b.ctx, 7, "")} {
		if err != nil {
			t.Fatal(err)
		}
	}
	b.settle(last(Release(first.Lock, first.Entry.ID, 0)))
	for name, err := range map[string]error{"Progress": first.Progress(b.ctx, 0.9, ""), "Save": first.Save(b.ctx, 1)} {
		if !errors.Is(err, ErrLockLost) {
			t.Errorf("%s after the lock was lost: %v, want ErrLockLost", name, err)
		}
	}
	second := run()
	if found, err := second.Load(b.ctx, &at); !found || err != nil || at.Page != 7 {
		t.Fatalf("the next run loaded %+v (%t, %v), want page 7", at, found, err)
	}
	if err := first.Save(b.ctx, 1); !errors.Is(err, ErrLockLost) {
		t.Errorf("Save beside the next run: %v, want ErrLockLost", err)
	}
	p, err := b.q.Progress(b.ctx, first.Entry.ID)
	if err != nil || p.Done != 1 || p.Message != "a quarter" {
		t.Errorf("progress is %+v (%v)", p, err)
	}
	if err := second.Save(b.ctx, strings.Repeat("x", checkpointBytesMax)); !errors.Is(err, ErrPayloadTooLarge) {
		t.Errorf("a checkpoint over the limit: %v", err)
	}
	if _, err := b.q.Progress(b.ctx, 999); !errors.Is(err, ErrEntryNotFound) {
		t.Errorf("progress of nothing: %v", err)
	}
}

// A checkpoint holds the lock record: an entry cannot change hands under it.
func TestASaveThatIsNotCommittedKeepsTheLock(t *testing.T) {
	b := newBed(t, Config{})
	b.push("")
	l := b.claimOne()
	saver := b.begin()
	run := &Run{Queue: b.q.WithTx(saver), Entry: l.Entries[0], Lock: l, Node: here}
	if err := run.Save(b.ctx, 1); err != nil {
		t.Fatal(err)
	}
	settled := later(b, func() ([]Token, error) { return b.q.Settle(b.ctx, here, doneAll(l)) })
	b.awaitBlocked(saver)
	b.commit(saver)
	if len(settled()) != 1 {
		t.Error("the entry could not be finished after the save")
	}
}

// The settlement knows that the entries are gone: no statement of it is taken back, which would be an error in the log of
// Postgres for each entry.
func TestARunThatFinishedInItsTransactionIsSettledOnce(t *testing.T) {
	b := newBed(t, Config{})
	b.exec(b.pool, `
		CREATE OR REPLACE FUNCTION penstock.all_ended(locks bigint, entries bigint) RETURNS boolean LANGUAGE plpgsql AS $$
		BEGIN
			ASSERT locks = entries, 'a statement was taken back';
			RETURN true;
		END $$`)
	b.push("", "K", "K")
	for _, l := range b.claim(9) {
		l.ClaimedAt = l.ClaimedAt.Add(-time.Hour) // the claim waited for another session, or the lock for a thread
		for i, e := range l.Entries {
			run := &Run{Queue: b.q, Entry: e, Lock: l, Node: here, Began: time.Now().Add(-time.Second)}
			tx := b.begin()
			if err := run.FinishTx(b.ctx, tx, []byte(`{"in": "tx"}`)); err != nil {
				t.Fatal(err)
			}
			b.commit(tx)
			ending := Judge(run, nil, nil, 0, 0)
			ending.Last = i == len(l.Entries)-1
			b.settle(ending)
		}
	}
	if n := b.count(`SELECT count(*) FROM penstock.result WHERE result = '{"in": "tx"}'`); n != 3 {
		t.Errorf("%d results of the transactions, want 3", n)
	}
	if n := b.count(`SELECT count(*) FROM penstock.result WHERE run_ms BETWEEN 1000 AND 3500000`); n != 3 {
		t.Errorf("%d results have the time since the run began, want 3", n)
	}
	if n := b.count(`SELECT (SELECT count(*) FROM penstock.lock) + (SELECT count(*) FROM penstock.entry)`); n != 0 {
		t.Errorf("%d locks and entries are left", n)
	}
}
