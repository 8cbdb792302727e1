package worker

import (
	"context"
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

// told is an adapter whose polls are answered from a list; the last answer
// repeats.
type told struct {
	answers   []Outcome
	polls     int
	pollTimes []time.Time
	cancels   int
	confirms  bool
}

func (a *told) Submit(context.Context, Call) Outcome { return Outcome{} }
func (a *told) Probe(context.Context) Health         { return Health{State: StateReady} }

func (a *told) Poll(context.Context, RunRef) Outcome {
	a.pollTimes = append(a.pollTimes, time.Now())
	o := a.answers[min(a.polls, len(a.answers)-1)]
	a.polls++
	return o
}

func (a *told) Cancel(context.Context, RunRef) Cancellation {
	a.cancels++
	return Cancellation{Delivered: true, Confirmed: a.confirms}
}

var (
	running  = Outcome{Kind: Accepted, Remote: "r", Progress: "same"}
	cold     = Outcome{Kind: Accepted, Remote: "r", Starting: true}
	noAnswer = Outcome{Kind: NotReady, MaybeRunning: true}
	gone     = Outcome{Kind: Unknown, Reason: "not there"}
)

func times(n int, o Outcome) []Outcome {
	all := make([]Outcome, n)
	for i := range all {
		all[i] = o
	}
	return all
}

func concat(parts ...[]Outcome) []Outcome {
	var all []Outcome
	for _, p := range parts {
		all = append(all, p...)
	}
	return all
}

func TestFollowEndsAtTheRightMoment(t *testing.T) {
	for _, c := range []struct {
		name     string
		timeouts Timeouts
		pending  Pending
		adapter  *told
		want     want
		err      error
		after    time.Duration
		cancels  int
	}{
		{
			name:    "done at the third poll",
			adapter: &told{answers: []Outcome{running, running, done([]byte(`1`), 200)}},
			want:    want{kind: Done, result: `1`}, after: 6 * time.Second,
		},
		{
			name:    "run limit, cancel confirmed",
			adapter: &told{answers: []Outcome{running}, confirms: true},
			want:    want{kind: Failed, class: ClassTransient, remote: "r"}, err: ErrRunLimit, after: 600 * time.Second, cancels: 1,
		},
		{
			name:    "run limit, cancel not confirmed: the slot stays counted",
			adapter: &told{answers: []Outcome{running}},
			want:    want{kind: Unknown, running: true, remote: "r"}, err: ErrRunLimit, after: 600 * time.Second, cancels: 1,
		},
		{
			name:    "what ran before the hand-over counts",
			pending: Pending{Ran: 500 * time.Second},
			adapter: &told{answers: []Outcome{running}, confirms: true},
			want:    want{kind: Failed, class: ClassTransient, remote: "r"}, err: ErrRunLimit, after: 100 * time.Second, cancels: 1,
		},
		{
			name:    "a run that ended while nobody could ask is not stopped for its limit",
			pending: Pending{Ran: 700 * time.Second},
			adapter: &told{answers: concat(times(3, noAnswer), []Outcome{done([]byte(`1`), 200)})},
			want:    want{kind: Done, result: `1`}, after: 8 * time.Second,
		},
		{
			name:    "a cold start is charged to nobody",
			pending: Pending{Starting: true},
			adapter: &told{answers: concat(times(500, cold), times(290, running), []Outcome{done([]byte(`1`), 200)})},
			want:    want{kind: Done, result: `1`}, after: 791 * 2 * time.Second,
		},
		{
			name: "a cold start has its own limit", timeouts: Timeouts{Start: Seconds(10 * time.Minute)},
			pending: Pending{Starting: true},
			adapter: &told{answers: []Outcome{cold}},
			want:    want{kind: Unknown, running: true, remote: "r"}, err: ErrStartLimit, after: 10 * time.Minute, cancels: 1,
		},
		{
			name: "no progress ends a run before its run limit", timeouts: Timeouts{NoProgress: Seconds(time.Minute)},
			adapter: &told{answers: []Outcome{running}},
			want:    want{kind: Unknown, running: true, remote: "r"}, err: ErrNoProgress, after: 62 * time.Second, cancels: 1,
		},
		{
			name: "a cold start is not a lack of progress", timeouts: Timeouts{NoProgress: Seconds(time.Minute)},
			pending: Pending{Starting: true},
			adapter: &told{answers: concat(times(100, cold), times(20, running), []Outcome{done([]byte(`1`), 200)})},
			want:    want{kind: Done, result: `1`}, after: 242 * time.Second,
		},
		{
			name:    "polls without an answer do not end a run at once",
			adapter: &told{answers: concat(times(20, noAnswer), []Outcome{running, done([]byte(`1`), 200)})},
			want:    want{kind: Done, result: `1`}, after: 44 * time.Second,
		},
		{
			name:    "a silent worker is given up",
			adapter: &told{answers: []Outcome{running, noAnswer}},
			want:    want{kind: Unknown, running: true, remote: "r"}, err: ErrSilence, after: 62 * time.Second, cancels: 1,
		},
		{
			name:    "one lost answer is not believed",
			adapter: &told{answers: []Outcome{gone, gone, running, done([]byte(`1`), 200)}},
			want:    want{kind: Done, result: `1`}, after: 8 * time.Second,
		},
		{
			name:    "a run that stays lost is unknown",
			adapter: &told{answers: []Outcome{running, gone}},
			want:    want{kind: Unknown}, after: 8 * time.Second,
		},
		{
			name:    "Retry-After puts the next poll off",
			adapter: &told{answers: []Outcome{{Kind: NotReady, RetryAfter: 20 * time.Second}, done([]byte(`1`), 200)}},
			want:    want{kind: Done, result: `1`}, after: 22 * time.Second,
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				began := time.Now()
				f := NewFollower(c.adapter, Model{Name: "m", Timeouts: c.timeouts})
				c.pending.RunRef = RunRef{Entry: "e", Remote: "r"}
				o := f.Follow(t.Context(), c.pending)
				c.want.check(t, o)
				if !errors.Is(o.Err, c.err) {
					t.Errorf("error is %v, want %v", o.Err, c.err)
				}
				if took := time.Since(began); took != c.after {
					t.Errorf("ended after %s, want %s", took, c.after)
				}
				if c.adapter.cancels != c.cancels {
					t.Errorf("%d cancels, want %d", c.adapter.cancels, c.cancels)
				}
			})
		})
	}
}

func TestFollowStopsAtTheEntrysDeadline(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := &told{answers: []Outcome{running}, confirms: true}
		o := NewFollower(a, Model{Name: "m"}).Follow(t.Context(), Pending{
			RunRef: RunRef{Entry: "e", Remote: "r"}, FinishBy: time.Now().Add(30 * time.Second),
		})
		if !errors.Is(o.Err, ErrDeadline) || a.cancels != 1 {
			t.Errorf("got %+v, %d cancels", o, a.cancels)
		}
	})
}

func TestHandOverLeavesTheRunAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		drain := errors.New("node drains")
		ctx, cancel := context.WithCancelCause(t.Context())
		time.AfterFunc(5*time.Second, func() { cancel(drain) })
		a := &told{answers: []Outcome{running}}
		f := NewFollower(a, Model{Name: "m"})
		o := f.Follow(ctx, Pending{RunRef: RunRef{Entry: "e", Remote: "r"}})
		if o.Kind != Accepted || o.Remote != "r" || !errors.Is(o.Err, drain) || a.cancels != 0 {
			t.Errorf("got %+v, %d cancels", o, a.cancels)
		}
		// The next node follows the same run.
		a.answers = []Outcome{done([]byte(`1`), 200)}
		want{kind: Done, result: `1`}.check(t, f.Follow(t.Context(), Pending{RunRef: RunRef{Entry: "e", Token: 9, Remote: "r"}}))
	})
}

// slowPoll is an adapter whose polls under the token 0 are answered when it is told to.
type slowPoll struct {
	told
	answer chan Outcome
}

func (a *slowPoll) Poll(ctx context.Context, run RunRef) Outcome {
	if run.Token == 0 {
		return <-a.answer
	}
	return a.told.Poll(ctx, run)
}

// A node that lost the lock of an entry and gets the next one may follow its run before its earlier follower has left.
func TestAnEntryIsFollowedAgainBeforeItsEarlierFollowerHasLeft(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := &slowPoll{told{answers: []Outcome{running, running, done([]byte(`1`), 200)}}, make(chan Outcome)}
		f := NewFollower(a, Model{Name: "m"})
		lost, lose := context.WithCancel(t.Context())
		earlier := make(chan Outcome, 1)
		go func() { earlier <- f.Follow(lost, Pending{RunRef: RunRef{Entry: "e", Remote: "r"}}) }()
		time.Sleep(3 * time.Second) // it polls
		lose()
		next := make(chan Outcome, 1)
		go func() { next <- f.Follow(t.Context(), Pending{RunRef: RunRef{Entry: "e", Token: 9, Remote: "r"}}) }()
		synctest.Wait()
		a.answer <- noAnswer
		if o := <-earlier; o.Kind != Accepted {
			t.Errorf("the earlier follower got %+v", o)
		}
		other := RunRef{Entry: "other", Token: 1, Remote: "r"}
		if o := f.Follow(t.Context(), Pending{RunRef: other}); !errors.Is(o.Err, ErrSharedID) {
			t.Errorf("another entry of the id got %+v", o)
		}
		want{kind: Done, result: `1`}.check(t, <-next)
		want{kind: Done, result: `1`}.check(t, f.Follow(t.Context(), Pending{RunRef: other}))
	})
}

func TestReportEndsTheRunBeforeThePoll(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		reports := make(chan Outcome)
		go func() {
			time.Sleep(time.Second)
			reports <- running
			time.Sleep(500 * time.Millisecond)
			reports <- done([]byte(`1`), 200)
		}()
		a := &told{answers: []Outcome{running}}
		o := NewFollower(a, Model{Name: "m"}).Follow(t.Context(), Pending{RunRef: RunRef{Entry: "e", Remote: "r"}, Reports: reports})
		want{kind: Done, result: `1`}.check(t, o)
		if took := time.Since(began); took != 1500*time.Millisecond || a.polls != 0 {
			t.Errorf("ended after %s and %d polls", took, a.polls)
		}
	})
}

// A Cog worker is idle a moment before its completed callback is answered.
func TestLateReportIsWaitedForAfterTheWorkerWentIdle(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		reports := make(chan Outcome, 1)
		time.AfterFunc(30*time.Second, func() { reports <- done([]byte(`1`), 200) })
		a := &told{answers: []Outcome{running, gone}}
		o := NewFollower(a, Model{Name: "m", Protocol: ProtocolCog}).Follow(t.Context(), Pending{RunRef: RunRef{Entry: "e", Remote: "r"}, Reports: reports})
		want{kind: Done, result: `1`}.check(t, o)
	})
}

func TestLostReportEndsAsUnknown(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		a := &told{answers: []Outcome{running, gone}}
		reports := make(chan Outcome)
		o := NewFollower(a, Model{Name: "m", Protocol: ProtocolCog}).Follow(t.Context(), Pending{RunRef: RunRef{Entry: "e", Remote: "r"}, Reports: reports})
		want{kind: Unknown}.check(t, o)
		if took := time.Since(began); took != 64*time.Second {
			t.Errorf("gave up after %s, want 64s", took)
		}
	})
}
