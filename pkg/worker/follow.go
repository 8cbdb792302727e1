package worker

import (
	"context"
	"fmt"
	"sync"
	"time"
)

// Follower follows the accepted runs of one instance to their end.
type Follower struct {
	adapter Adapter
	model   Model

	mu        sync.Mutex
	following map[string]followed // by remote id
}

// followed is the entry of a run, and how often it is followed: where a lock of the entry was lost, the next follower
// may come before the one before it has left.
type followed struct {
	entry string
	times int
}

// NewFollower returns a follower of runs that adapter submitted.
func NewFollower(adapter Adapter, model Model) *Follower {
	return &Follower{adapter: adapter, model: model.WithDefaults(), following: map[string]followed{}}
}

// Pending is an accepted run, as stored when it was accepted.
type Pending struct {
	RunRef
	FinishBy time.Time     // zero: no deadline
	Ran      time.Duration // charged already, by the node that followed it before
	Starting bool          // as Submit said

	// Reports brings outcomes that the worker posts to a callback; nil for
	// protocols that are polled.
	Reports <-chan Outcome
}

// Follow waits until the run ends or a limit is reached. When a limit is
// reached it asks the worker to stop: the outcome is Failed if the worker
// confirmed, and Unknown, still running, if it did not.
//
// When ctx ends, the run goes on at the worker: Follow returns Accepted, and
// the next follower re-attaches by (entry, token, remote id).
func (f *Follower) Follow(ctx context.Context, p Pending) Outcome {
	if other, taken := f.enter(p.RunRef); taken {
		// Two entries under one id cannot be told apart: neither answer could
		// be trusted to be this entry's.
		o := unknown(fmt.Sprintf("worker gave the id %s, under which it is running entry %s", Clip(p.Remote), other))
		o.Err = ErrSharedID
		return o
	}
	defer f.leave(p.RunRef)
	watch := newRunLimits(f.model, p, time.Now())
	timer := time.NewTimer(f.model.PollInterval.Duration())
	defer timer.Stop()
	reports := p.Reports
	for {
		var o Outcome
		select {
		case <-ctx.Done():
			watch.charge(time.Now())
			return Outcome{
				Kind: Accepted, Remote: p.Remote, Err: context.Cause(ctx), MaybeRunning: true, Ran: watch.ran,
			}
		case report, open := <-reports:
			if !open {
				reports = nil
				continue
			}
			o = report
		case <-timer.C:
			o = f.adapter.Poll(ctx, p.RunRef)
			timer.Reset(max(f.model.PollInterval.Duration(), min(o.RetryAfter, pollDelayMax)))
		}
		if ctx.Err() != nil && !o.Final() {
			continue
		}
		if end, limit := watch.observe(time.Now(), o); limit != nil {
			return f.stop(ctx, p.RunRef, limit)
		} else if end {
			return o
		}
	}
}

// pollDelayMax bounds how long a worker may put off the next poll.
const pollDelayMax = time.Minute

// stop ends a run that reached a limit.
func (f *Follower) stop(ctx context.Context, run RunRef, limit error) Outcome {
	o := Outcome{Kind: Unknown, MaybeRunning: true, Remote: run.Remote, Err: limit, Reason: limit.Error()}
	c := f.adapter.Cancel(ctx, run)
	if c.Confirmed {
		o.Kind, o.Class, o.MaybeRunning = Failed, ClassTransient, false
		return o
	}
	o.Reason = Clip(limit.Error() + "; cancel not confirmed: " + c.Reason)
	return o
}

// enter counts a follower of the run, unless another entry is followed under the worker's id of it.
func (f *Follower) enter(run RunRef) (other string, taken bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	before := f.following[run.Remote]
	if before.times > 0 && before.entry != run.Entry {
		return before.entry, true
	}
	f.following[run.Remote] = followed{run.Entry, before.times + 1}
	return "", false
}

func (f *Follower) leave(run RunRef) {
	f.mu.Lock()
	defer f.mu.Unlock()
	left := f.following[run.Remote].times - 1
	if left == 0 {
		delete(f.following, run.Remote)
		return
	}
	f.following[run.Remote] = followed{run.Entry, left}
}

// runLimits is the arithmetic of a run's limits, without clocks or connections.
//
// Time is charged to the run only while the worker reports it as running: a
// cold start has its own limit, and is charged neither to the run time limit
// nor to the limit on no progress.
type runLimits struct {
	model    Model
	finishBy time.Time
	lostMax  time.Duration // how long "not there" must last to be believed

	last       time.Time // of the last observation
	answered   time.Time // of the last answer
	followedOn bool      // and not answered yet: the run may have ended before
	progressed time.Time // of the last change, or of the last moment not charged
	lost       time.Time // since when the worker does not know the run; zero: it does
	starting   bool
	progress   string
	ran        time.Duration
	cold       time.Duration
}

func newRunLimits(model Model, p Pending, now time.Time) *runLimits {
	w := &runLimits{
		model: model, finishBy: p.FinishBy, lostMax: 2 * model.PollInterval.Duration(),
		last: now, answered: now, progressed: now, starting: p.Starting, ran: p.Ran, followedOn: p.Ran > 0,
	}
	if p.Reports != nil && model.Protocol == ProtocolCog {
		// The worker is done before its callback has arrived; it repeats it for
		// a while if we did not answer.
		w.lostMax = model.Timeouts.Silence.Duration()
	}
	return w
}

// observe takes one answer, or the lack of one. end: o is final. limit: the run
// must be stopped because of it.
func (w *runLimits) observe(now time.Time, o Outcome) (end bool, limit error) {
	if o.Final() {
		return true, nil
	}
	w.charge(now)
	switch o.Kind {
	case Accepted:
		w.answered, w.followedOn, w.lost = now, false, time.Time{}
		if o.Starting || w.starting || o.Progress != w.progress {
			w.progressed = now
		}
		w.starting, w.progress = o.Starting, o.Progress
	case Unknown:
		w.answered = now
		if w.lost.IsZero() {
			w.lost = now
		}
		if now.Sub(w.lost) >= w.lostMax {
			return true, nil
		}
	default: // Busy, NotReady: no answer
	}
	return false, w.exceeded(now)
}

func (w *runLimits) charge(now time.Time) {
	elapsed := now.Sub(w.last)
	w.last = now
	if w.starting {
		w.cold += elapsed
	} else {
		w.ran += elapsed
	}
}

func (w *runLimits) exceeded(now time.Time) error {
	noProgress := w.model.Timeouts.NoProgress.Duration()
	if w.model.Protocol == ProtocolCog {
		noProgress = 0 // its health check does not tell how far a run is
	}
	switch {
	case !w.finishBy.IsZero() && !now.Before(w.finishBy):
		return ErrDeadline
	case now.Sub(w.answered) >= w.model.Timeouts.Silence.Duration():
		return ErrSilence
	case w.cold >= w.model.Timeouts.Start.Duration():
		return ErrStartLimit
	case w.ran >= w.model.MaxPollTime.Duration() && !w.followedOn:
		return ErrRunLimit
	case noProgress > 0 && !w.starting && now.Sub(w.progressed) >= noProgress:
		return ErrNoProgress
	}
	return nil
}
