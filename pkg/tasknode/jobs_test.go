package tasknode

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"runtime"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/fairness"
	"github.com/penstock/penstock/pkg/invalidation"
)

func assigned(ids ...invalidation.EntryID) *job {
	lock := &invalidation.Lock{Key: fmt.Sprint("k", ids), Token: 1, ClaimedAt: time.Now()}
	for _, id := range ids {
		lock.Entries = append(lock.Entries, invalidation.Entry{ID: id})
	}
	q := &invalidation.Queue{ID: 1}
	from := servedLane{queue: q, served: &servedQueue{queue: q}, lane: &lane{key: laneKey{queue: 1}}, ranked: fairness.Candidate{Queue: q}}
	return &job{servedLane: from, lock: lock}
}

// last is an ending as the last one of its lock.
func last(e invalidation.Ending) invalidation.Ending {
	e.Last = true
	return e
}

// begins begins a run of entries of a job, and says whether it has.
func begins(r *jobs, j *job, cancel context.CancelCauseFunc, ids ...invalidation.EntryID) bool {
	var runs []*invalidation.Run
	for _, id := range ids {
		runs = append(runs, &invalidation.Run{Queue: j.queue, Entry: invalidation.Entry{ID: id}, Lock: j.lock})
	}
	begun, _ := r.begin(j, runs, cancel, cancel)
	return len(begun) > 0
}

// A request to cancel an entry is delivered until its ending is recorded, when the next of its group may have begun.
func TestCancelOfAnEntryThatHasRunDoesNotReachTheNextOfItsGroup(t *testing.T) {
	r, job := newJobs(), assigned(1, 2)
	r.add(job)
	begins(r, job, func(error) {}, 1)
	request := invalidation.CancelRequest{QueueID: 1, Entry: 1}
	r.cancelEntry(request)
	ctx, cancel := context.WithCancelCause(t.Context())
	if !begins(r, job, cancel, 2) {
		t.Error("entry 2 does not begin for a request to cancel entry 1")
	}
	if r.cancelEntry(request); ctx.Err() != nil {
		t.Errorf("entry 2 is ended by a request to cancel entry 1: %v", context.Cause(ctx))
	}
}

// What was to be cancelled before it began has not begun: the death of its node is no crash of it.
func TestAnEntryThatIsCancelledBeforeItsRunHasNotBegun(t *testing.T) {
	n := New(Config{}, nil, nil)
	n.runs = t.Context()
	job := assigned(1)
	job.handler = invalidation.HandlerFunc(func(context.Context, *invalidation.Run) (json.RawMessage, error) {
		t.Error("the entry runs")
		return nil, nil
	})
	n.jobs.add(job)
	n.jobs.cancelEntry(invalidation.CancelRequest{QueueID: 1, Entry: 1, Reason: "no"})
	n.process(job)
	if b := n.jobs.beat(); len(b.Tokens) != 1 || len(b.Running) != 0 {
		t.Errorf("heartbeats list %v, and %v as running, want one lock that does not run", b.Tokens, b.Running)
	}
	if _, p := n.settler.next(); len(p.endings) != 1 || p.endings[0].Verb() != "cancel" || !p.endings[0].Last {
		t.Errorf("endings %+v, want one cancel that is the last", p.endings)
	}
}

type batchFunc func(ctx context.Context, runs []*invalidation.Run) []invalidation.BatchAnswer

func (f batchFunc) Handle(context.Context, *invalidation.Run) (json.RawMessage, error) {
	return nil, nil
}

func (f batchFunc) HandleBatch(ctx context.Context, runs []*invalidation.Run) []invalidation.BatchAnswer {
	return f(ctx, runs)
}

func TestABatchLeavesOutWhatIsToBeCancelled(t *testing.T) {
	n := New(Config{}, nil, nil)
	n.runs = t.Context()
	job := assigned(1, 2, 3)
	n.jobs.add(job)
	n.jobs.cancelEntry(invalidation.CancelRequest{QueueID: 1, Entry: 2, Reason: "no"})
	var ran []invalidation.EntryID
	job.handler = batchFunc(func(_ context.Context, runs []*invalidation.Run) []invalidation.BatchAnswer {
		for _, r := range runs {
			ran = append(ran, r.Entry.ID)
		}
		return make([]invalidation.BatchAnswer, len(runs))
	})
	n.process(job)
	if len(ran) != 2 || ran[0] != 1 || ran[1] != 3 {
		t.Errorf("entries %v ran, want 1 and 3", ran)
	}
	if _, p := n.settler.next(); len(p.endings) != 3 {
		t.Errorf("%d endings, want 3", len(p.endings))
	}
}

// held is a handler of batches that runs until its context ends.
func held(began chan<- []*invalidation.Run) batchFunc {
	return func(ctx context.Context, runs []*invalidation.Run) []invalidation.BatchAnswer {
		began <- runs
		<-ctx.Done()
		answers := make([]invalidation.BatchAnswer, len(runs))
		for i := range answers {
			answers[i].Err = ctx.Err()
		}
		return answers
	}
}

// A batch goes on for the entries that are not to be cancelled, and ends when none is left.
func TestACancelOfAllEntriesOfABatchEndsItsRun(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := New(Config{}, nil, nil)
		n.runs = t.Context()
		job, began := assigned(1, 2), make(chan []*invalidation.Run, 1)
		job.handler = held(began)
		n.jobs.add(job)
		over := make(chan struct{})
		go func() { n.process(job); close(over) }()
		<-began
		n.jobs.cancelEntry(invalidation.CancelRequest{QueueID: 1, Entry: 1, Reason: "no"})
		synctest.Wait()
		select {
		case <-over:
			t.Fatal("a cancel of one entry ended the run of both")
		default:
		}
		n.jobs.cancelEntry(invalidation.CancelRequest{QueueID: 1, Entry: 2, Reason: "no"})
		select {
		case <-over:
		case <-time.After(time.Minute):
			t.Fatal("the run goes on although all its entries are to be cancelled")
		}
		_, p := n.settler.next()
		for _, e := range p.endings {
			if e.Verb() != "cancel" {
				t.Errorf("entry %d ended as %s", e.Entry, e.Verb())
			}
		}
	})
}

// A handler may let a call go on after a cancel. A node that drains, or loses its lease or the lock, ends it all the same.
func TestWhatGoesOnAfterACancelEndsWithTheLease(t *testing.T) {
	for cause, end := range map[error]func(n *Node, drain context.CancelCauseFunc){
		invalidation.ErrDraining:  func(_ *Node, drain context.CancelCauseFunc) { drain(invalidation.ErrDraining) },
		invalidation.ErrLeaseLost: func(n *Node, _ context.CancelCauseFunc) { n.loseLease(false) },
		errLockFreed:              func(n *Node, _ context.CancelCauseFunc) { n.jobs.loseOthers(n.jobs.held(), nil) },
	} {
		n := New(Config{}, nil, nil)
		runs, drain := context.WithCancelCause(t.Context())
		n.runs = runs
		job, ran := assigned(1), false
		job.handler = invalidation.HandlerFunc(func(ctx context.Context, r *invalidation.Run) (json.RawMessage, error) {
			ran = true
			n.jobs.cancelEntry(invalidation.CancelRequest{QueueID: 1, Entry: 1, Reason: "no"})
			if !errors.Is(context.Cause(ctx), invalidation.ErrCancelled) || r.Lasting.Err() != nil {
				t.Errorf("a cancel ended the run with %v, and what goes on with %v", context.Cause(ctx), context.Cause(r.Lasting))
			}
			end(n, drain)
			if got := context.Cause(r.Lasting); !errors.Is(got, cause) {
				t.Errorf("what goes on ended with %v, want %v", got, cause)
			}
			return nil, nil
		})
		n.jobs.add(job)
		n.process(job)
		if !ran {
			t.Errorf("no run was to end with %v", cause)
		}
		drain(nil)
	}
}

// Where a failure blocks the key a handler of batches is given one entry at a time: a cancel ends the run of that.
func TestACancelEndsABatchOfOne(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := New(Config{}, nil, nil)
		n.runs = t.Context()
		job, began := assigned(1, 2), make(chan []*invalidation.Run)
		job.handler, job.queue.Config.QuantumTime = held(began), time.Hour
		job.queue.Config.OnFailure = invalidation.OnFailureBlockKey
		n.jobs.add(job)
		over := make(chan struct{})
		go func() { n.process(job); close(over) }()
		for _, id := range []invalidation.EntryID{1, 2} {
			select {
			case runs := <-began:
				if len(runs) != 1 || runs[0].Entry.ID != id {
					t.Fatalf("entry %d and %d others run, want entry %d", runs[0].Entry.ID, len(runs)-1, id)
				}
			case <-time.After(time.Minute):
				t.Fatalf("entry %d does not run: the run of the one before it was not ended", id)
			}
			synctest.Wait()
			n.jobs.cancelEntry(invalidation.CancelRequest{QueueID: 1, Entry: id, Reason: "no"})
		}
		<-over
	})
}

// FinishTx records how long a run took: what its lock waited for a thread is none of it.
func TestARunBeginsWhenItsHandlerIsCalled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := New(Config{}, nil, nil)
		n.runs = t.Context()
		job := assigned(1)
		var began time.Time
		job.handler = invalidation.HandlerFunc(func(_ context.Context, r *invalidation.Run) (json.RawMessage, error) {
			began = r.Began
			return nil, nil
		})
		n.jobs.add(job)
		time.Sleep(time.Minute)
		n.process(job)
		if !began.Equal(time.Now()) {
			t.Errorf("the run began at %v, %v before its handler was called", began, time.Since(began))
		}
	})
}

// What may take longer goes on where another entry of the run is late, as it does where another one is cancelled.
func TestARunOfSeveralEndsAtTheLatestOfTheirDeadlines(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for name, c := range map[string]struct {
			in   [2]time.Duration // 0: no deadline
			ends time.Duration    // of the run, an hour if nothing ends it
			verb string
		}{
			"one has none": {[2]time.Duration{time.Minute, 0}, time.Hour, "done"},
			"both":         {[2]time.Duration{time.Minute, 2 * time.Minute}, 2 * time.Minute, "expire"},
		} {
			n := New(Config{}, nil, nil)
			n.runs = t.Context()
			job := assigned(1, 2)
			for i := range c.in {
				if c.in[i] > 0 {
					job.lock.Entries[i].FinishBy = time.Now().Add(c.in[i])
				}
			}
			job.handler = batchFunc(func(ctx context.Context, _ []*invalidation.Run) []invalidation.BatchAnswer {
				select {
				case <-ctx.Done():
					return []invalidation.BatchAnswer{{Err: ctx.Err()}, {Err: ctx.Err()}}
				case <-time.After(time.Hour):
					return make([]invalidation.BatchAnswer, 2)
				}
			})
			n.jobs.add(job)
			began := time.Now()
			n.process(job)
			if took := time.Since(began); took != c.ends {
				t.Errorf("%s: the run ended after %v, want %v", name, took, c.ends)
			}
			_, p := n.settler.next()
			for _, e := range p.endings {
				if e.Verb() != c.verb {
					t.Errorf("%s: entry %d ended as %s, want %s", name, e.Entry, e.Verb(), c.verb)
				}
			}
		}
	})
}

// A deadline is a time: however long a run takes to begin, its context ends then.
func TestTheContextOfARunEndsAtItsDeadline(t *testing.T) {
	n := New(Config{}, nil, nil)
	n.runs = t.Context()
	job := assigned(1)
	by := time.Now().Add(time.Hour)
	job.lock.Entries[0].FinishBy = by
	job.handler = invalidation.HandlerFunc(func(ctx context.Context, _ *invalidation.Run) (json.RawMessage, error) {
		if ends, _ := ctx.Deadline(); !ends.Equal(by) {
			t.Errorf("the context ends %v after the deadline", ends.Sub(by))
		}
		return nil, nil
	})
	n.jobs.add(job)
	n.process(job)
}

// A handler ends the goroutine where a test of it calls FailNow. Its entries are retried, and others run after them.
func TestAThreadOutlivesAHandlerThatEndsItsGoroutine(t *testing.T) {
	n := New(Config{Log: slog.New(slog.DiscardHandler)}, nil, nil)
	n.runs = t.Context()
	one, several, after := assigned(1, 2), assigned(3, 4), assigned(5)
	one.handler = invalidation.HandlerFunc(func(context.Context, *invalidation.Run) (json.RawMessage, error) {
		runtime.Goexit()
		return nil, nil
	})
	several.handler = batchFunc(func(context.Context, []*invalidation.Run) []invalidation.BatchAnswer {
		runtime.Goexit()
		return nil
	})
	after.handler = invalidation.HandlerFunc(func(context.Context, *invalidation.Run) (json.RawMessage, error) { return nil, nil })
	for i, j := range []*job{one, several, after} {
		j.lock.Token = invalidation.Token(2*i + 1)
		n.jobs.add(j)
		n.waiting.add(false, j)
	}
	n.processors.Go(n.thread)
	n.waiting.close()
	n.processors.Wait()
	_, p := n.settler.next()
	var got []string
	for _, e := range p.endings {
		got = append(got, fmt.Sprint(e.Entry, e.Verb(), e.Last))
	}
	if want := []string{"1retrytrue", "3retryfalse", "4retrytrue", "5donetrue"}; !slices.Equal(got, want) {
		t.Errorf("endings %v, want %v", got, want)
	}
	if failed := n.Stats().RunErrors.Load(); failed != 2 {
		t.Errorf("%d runs failed by the statistics, want 2", failed)
	}
}

// Each goroutine that a handler ends is followed by one, and none of them waits for those after it.
func TestGoroutinesThatHandlersEndDoNotAddUp(t *testing.T) {
	const jobs = 50
	n := New(Config{Log: slog.New(slog.DiscardHandler)}, nil, nil)
	n.runs = t.Context()
	before, most := runtime.NumGoroutine(), 0
	for i := range jobs {
		j := assigned(invalidation.EntryID(i + 1))
		j.lock.Token = invalidation.Token(2*i + 1)
		j.handler = invalidation.HandlerFunc(func(context.Context, *invalidation.Run) (json.RawMessage, error) {
			most = max(most, runtime.NumGoroutine())
			runtime.Goexit()
			return nil, nil
		})
		n.jobs.add(j)
		n.waiting.add(false, j)
	}
	n.processors.Go(n.thread)
	n.waiting.close()
	n.processors.Wait()
	if _, p := n.settler.next(); len(p.endings) != jobs || most > before+jobs/2 {
		t.Errorf("%d endings, %d goroutines, %d before", len(p.endings), most, before)
	}
}

func TestAPanicOfABatchIsLogged(t *testing.T) {
	var log strings.Builder
	n := New(Config{Log: slog.New(slog.NewTextHandler(&log, nil))}, nil, nil)
	n.runs = t.Context()
	job := assigned(1, 2)
	job.handler = batchFunc(func(context.Context, []*invalidation.Run) []invalidation.BatchAnswer { panic("odd") })
	n.jobs.add(job)
	n.process(job)
	if !strings.Contains(log.String(), "handler panicked") || !strings.Contains(log.String(), "panic=odd") {
		t.Errorf("the log has %q", log.String())
	}
	if _, p := n.settler.next(); len(p.endings) != 2 || p.endings[1].Verb() != "retry" {
		t.Errorf("endings %+v, want two retries", p.endings)
	}
}

// What a run has taken beyond its estimate is charged while it goes on, once; entries that declare a cost count by that.
func TestRunsThatOutliveTheirEstimateAreChargedOn(t *testing.T) {
	r, job := newJobs(), assigned(1)
	job.charged = 1
	r.add(job)
	begins(r, job, func(error) {}, 1)
	sum := 0.0
	charge := func(_ fairness.Candidate, more float64) { sum += more }
	itsTime := func(_ *servedQueue, d time.Duration) float64 { return d.Seconds() }
	now := job.timed.Add(5 * time.Second)
	r.extend(now.Add(-4500*time.Millisecond), itsTime, charge)
	r.extend(now, itsTime, charge)
	r.extend(now, itsTime, charge)
	if sum != 4 {
		t.Errorf("a run of 5 s with an estimate of 1 s is charged %v s more, want 4", sum)
	}
	r.ran(job, 6)
	if charged, used := r.account(job); charged != 5 || used != 6 {
		t.Errorf("charged %v, used %v, want 5 and 6", charged, used)
	}
	r.extend(now.Add(time.Hour), itsTime, charge)
	if sum != 4 {
		t.Error("a run that is over is charged on")
	}
	if got := estimate([]invalidation.Entry{{Cost: 7}, {}}, 4); got != 9 {
		t.Errorf("an entry that declares 7 and one that uses half of 4 s cost %v, want 9", got)
	}
}

// unreachable is a database that answers nothing.
type unreachable struct{ postgres.DB }

func (unreachable) QueryRow(context.Context, string, ...any) pgx.Row { return refused{} }

func (unreachable) Query(context.Context, string, ...any) (pgx.Rows, error) {
	return nil, errors.New("connection refused")
}

type refused struct{}

func (refused) Scan(...any) error { return errors.New("connection refused") }

// After SIGCONT the heartbeat may come first: it must not renew a lease that lapsed before runs were told.
func TestABeatEndsRunsWhoseLeaseHadLapsed(t *testing.T) {
	n, j := New(Config{}, nil, unreachable{}), assigned(1)
	n.lease.renew(time.Now().Add(-n.leaseBound()))
	ctx, cancel := context.WithCancelCause(t.Context())
	n.jobs.add(j)
	begins(n.jobs, j, cancel, 1)
	if err := n.beat(t.Context()); err == nil {
		t.Fatal("the database answered")
	}
	if !errors.Is(context.Cause(ctx), invalidation.ErrLeaseLost) || !n.leaseLost(j) {
		t.Errorf("the run goes on: %v", context.Cause(ctx))
	}
}

func TestALapsedLeaseEndsRunsUnlessTheirQueueRunsThrough(t *testing.T) {
	n := New(Config{}, nil, unreachable{})
	n.lease.renew(time.Now().Add(-n.leaseBound()))
	causes := map[invalidation.Lapse]func() error{}
	for i, lapse := range []invalidation.Lapse{invalidation.LapseEnd, invalidation.LapseRunThrough} {
		j := assigned(invalidation.EntryID(i + 1))
		j.queue, j.lock.Token = &invalidation.Queue{Config: invalidation.Config{Lapse: lapse}}, invalidation.Token(i+1)
		ctx, cancel := context.WithCancelCause(t.Context())
		n.jobs.add(j)
		begins(n.jobs, j, cancel, 1)
		causes[lapse] = func() error { return context.Cause(ctx) }
	}
	if left := n.lapse(); left > 0 || n.claiming() {
		t.Fatalf("the lease has %v left, the node claims: %v", left, n.claiming())
	}
	if err := causes[invalidation.LapseEnd](); !errors.Is(err, invalidation.ErrLeaseLost) {
		t.Errorf("the run of a queue with %q was ended by %v", invalidation.LapseEnd, err)
	}
	if err := causes[invalidation.LapseRunThrough](); err != nil || n.jobs.through() != 1 {
		t.Errorf("the run that should go on was ended by %v, %d go on", err, n.jobs.through())
	}
	n.loseLease(false) // the node's row was removed: the token is dead
	if err := causes[invalidation.LapseRunThrough](); !errors.Is(err, invalidation.ErrLeaseLost) {
		t.Errorf("after the node was given up the run was ended by %v", err)
	}
}

func TestHeartbeatsListWhatHasBegun(t *testing.T) {
	r, waits, runs := newJobs(), assigned(1), assigned(2, 3, 4)
	runs.lock.Token = 2
	r.add(waits)
	r.add(runs)
	for _, e := range []invalidation.EntryID{2, 3} {
		begins(r, runs, func(error) {}, e)
	}
	b := r.beat()
	if len(b.Tokens) != 2 || !slices.Equal(b.Running, []invalidation.Token{2}) ||
		!slices.Equal(b.RunningEntries, []invalidation.EntryID{3}) {
		t.Errorf("held %v, begun %v with entries %v, want both, and 2 with entry 3", b.Tokens, b.Running, b.RunningEntries)
	}
}

// That a key is claimed again shows that the lock of its job was freed, also where an operator did so while the node listed it.
func TestAJobWhoseKeyIsClaimedAgainEnds(t *testing.T) {
	n := New(Config{}, nil, nil)
	r, runs, again, later := n.jobs, assigned(1), assigned(1), assigned(1)
	again.lock.Token, later.lock.Token = 2, 3
	ctx, cancel := context.WithCancelCause(t.Context())
	r.add(runs)
	begins(r, runs, cancel, 1)
	add := func(j *job) bool { beside, _ := r.add(j); return beside }
	if beside, lost := r.add(again); !beside || lost != runs || !errors.Is(context.Cause(ctx), invalidation.ErrLeaseLost) || !n.leaseLost(runs) {
		t.Errorf("the run goes on beside that of the next job: %v", context.Cause(ctx))
	}
	again.ended.Store(true) // handed back
	r.remove([]*job{again})
	if beside, lost := r.add(later); !beside || lost != nil {
		t.Error("the run has not ended, and the second job after it may begin, or ends the run again")
	}
	r.remove([]*job{later})
	runs.ended.Store(true) // but its ending is not recorded yet
	waits := assigned(1)
	waits.lock.Token = 4
	if add(waits) || n.leaseLost(waits) {
		t.Error("the run has ended, and no job may begin")
	}
	last := assigned(1)
	last.lock.Token = 5
	if add(last) || !n.leaseLost(waits) {
		t.Error("a job that has not begun keeps the next one of the key waiting, or begins beside it")
	}
	older := assigned(1) // its claim was answered after the lock had been freed
	older.lock.Token = 4
	if !add(older) || n.leaseLost(last) || !n.leaseLost(older) {
		t.Error("an older claim that is answered late begins, or ends the job of a newer one")
	}
	r.remove([]*job{runs, waits, last, older})
	if len(r.byKey) > 0 || len(r.byLock) > 0 {
		t.Errorf("%d keys and %d locks are left", len(r.byKey), len(r.byLock))
	}
}

// A server that lost its last commits draws tokens again. The job of a lock that is gone must not hide another one from
// heartbeats, or from the loss of the lease.
func TestAJobKeepsItsPlaceBesideOneWithItsToken(t *testing.T) {
	r, stale, other := newJobs(), assigned(1), assigned(2) // both have the token 1
	r.add(stale)
	r.add(other)
	ended := false
	begins(r, stale, func(error) { ended = true }, 1)
	if r.endAll(invalidation.ErrLeaseLost, false); !ended {
		t.Error("the run of the first job does not end with the lease")
	}
	r.remove([]*job{stale})
	if b := r.beat(); len(b.Tokens) != 1 {
		t.Errorf("heartbeats list %d locks, want that of the second job", len(b.Tokens))
	}
}
