package inference

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"strings"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/worker"
)

// Class of an entry that may have run, or not, and must not run twice.
const classUnknown = "unknown"

// conclude turns an outcome into the answer to the queue, and lets go of the run and of its slot:
//
//	the run                                           what is stored of it    its slot
//	has ended, or was not begun                       is forgotten            is free; a gateway's if preempted
//	goes on, as the worker has accepted it            stays                   stays counted: in doubt
//	may go on, and the next node asks for it again    stays                   stays counted: in doubt
//	may go on, and no node asks for it                is forgotten            stays counted: in doubt
func (d *dispatch) conclude(ctx context.Context, o worker.Outcome) (json.RawMessage, error) {
	cause := context.Cause(ctx)
	accepted := o.Kind == worker.Accepted // record has not counted it
	if cause != nil && !o.Final() {
		o = d.interrupted(ctx, o, cause)
	}
	if !d.run.Lock.Solo() && errors.Is(cause, invalidation.ErrCancelled) && o.Kind == worker.Done {
		// Its call was left open for the sake of its lock key: see outliveCancel.
		o = worker.Outcome{Kind: worker.Cancelled, Err: cause, Reason: "the run ended after the cancel"}
		d.dropAnswer()
	}
	d.keepOrForget(ctx, o)
	d.releaseSlot(ctx, o)
	if followedOn := o.Kind == worker.Accepted && d.stored && goesToNextNode(ctx); accepted && !followedOn {
		d.use(o, 1)
	}
	return d.answer(ctx, o)
}

// answer is the ending that the queue is given.
func (d *dispatch) answer(ctx context.Context, o worker.Outcome) (json.RawMessage, error) {
	d.run.Note(d.meta(o))
	if d.poison != nil {
		return nil, d.poison
	}
	switch o.Kind {
	case worker.Done:
		result, err := d.result(ctx, o)
		if err != nil {
			d.dropAnswer()
		}
		return result, err
	case worker.Cancelled:
		if cause := context.Cause(ctx); cause != nil {
			return nil, fmt.Errorf("%w (%s)", cause, o.Reason)
		}
		return nil, d.givenUp(ctx, o)
	case worker.Busy, worker.NotReady:
		if o.MaybeRunning && d.model.OnUnknown == worker.AtMostOnce {
			return nil, d.unknownOutcome(o.Reason)
		}
		return nil, invalidation.NoCapacity(max(d.tuning.readyWait, o.RetryAfter), errors.New(o.Reason))
	case worker.Rejected:
		return nil, invalidation.Permanent(invalidation.WithClass(string(worker.ClassInput), errors.New(o.Reason)))
	case worker.Failed:
		if o.Aborted {
			return nil, d.givenUp(ctx, o)
		}
		return nil, d.failure(ctx, o)
	default: // Unknown, and Accepted: handed over
		return nil, d.unsettled(ctx, o)
	}
}

// interrupted deals with a run whose context ended before it did: it is left to the next node, or stopped.
func (d *dispatch) interrupted(ctx context.Context, o worker.Outcome, cause error) worker.Outcome {
	o.Err = cause
	if !o.MaybeRunning || d.isLeft(o, cause) {
		return o
	}
	return d.stop(ctx, o, cause)
}

// isLeft says whether a run goes on for the next node. A drain leaves it one that was accepted, or that the worker can
// be asked about again. A lost lease leaves it any: the run to be stopped might be that node's.
func (d *dispatch) isLeft(o worker.Outcome, cause error) bool {
	leaseLost := errors.Is(cause, invalidation.ErrLeaseLost) ||
		errors.Is(context.Cause(d.lasting()), invalidation.ErrLeaseLost) // after a cancel
	known := o.Kind == worker.Accepted || d.model.OnUnknown == worker.Reattach
	return leaseLost || known && errors.Is(cause, invalidation.ErrDraining)
}

// stop has the worker stop a run, as far as that lets us, and returns how the run ended: unknown where the worker does
// not confirm that it has. A run that was accepted is followed for a while: it may end by the cancel, or by itself.
func (d *dispatch) stop(ctx context.Context, o worker.Outcome, cause error) worker.Outcome {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), d.tuning.cancelWait)
	defer cancel()
	run := d.call.RunRef
	run.Remote = run.Entry // a worker that knows entries by their id is asked by that
	if d.saved != nil && d.saved.Remote != "" {
		run.Remote = d.saved.Remote
	}
	c := d.held.endpoint.adapter.Cancel(ctx, run)
	accepted := o.Kind == worker.Accepted
	if accepted && c.Delivered && !c.Confirmed {
		reports, done := d.subscribe(d.saved.Token)
		defer done()
		end := d.held.endpoint.follower.Follow(ctx, worker.Pending{RunRef: run, Reports: reports})
		if end.Final() {
			end.Err = cause
			return end
		}
	}
	switch {
	case c.Confirmed:
		return worker.Outcome{Kind: worker.Cancelled, Err: cause, Reason: "worker confirmed the cancel"}
	case accepted && errors.Is(cause, invalidation.ErrCancelled) && !d.run.Lock.Solo():
		// The next entry of the key must not start beside the run: it is followed to its end.
		end := d.followOn(run, o)
		end.Err = cause
		return end
	}
	o.Kind, o.Reason = worker.Unknown, worker.Clip("cancel_unconfirmed: "+c.Reason)
	return o
}

// followOn follows a cancelled run that goes on until it ends or reaches its limits, or the node may not follow it any
// more. Then it stays stored: the worker is told again when the entry has ended.
func (d *dispatch) followOn(run worker.RunRef, o worker.Outcome) worker.Outcome {
	reports, done := d.subscribe(d.saved.Token)
	defer done()
	end := d.followAndStore(d.lasting(), worker.Pending{
		RunRef: run, FinishBy: d.call.FinishBy, Ran: time.Since(d.began), Starting: o.Starting, Reports: reports,
	})
	switch {
	case end.Final():
		return worker.Outcome{Kind: worker.Cancelled, Reason: "the run ended after the cancel: " + end.Kind.String()}
	case end.Kind == worker.Accepted:
		end.Reason = worker.Clip("cancel_unconfirmed: " + end.Err.Error())
	}
	return end
}

// keepOrForget keeps what is stored about a run that another node is to follow on or to ask for again, and forgets it
// otherwise.
func (d *dispatch) keepOrForget(ctx context.Context, o worker.Outcome) {
	handedOver := o.Kind == worker.Accepted
	askedAgain := o.Kind == worker.Unknown && o.MaybeRunning && d.model.OnUnknown == worker.Reattach &&
		goesToNextNode(ctx) && !errors.Is(o.Err, worker.ErrSharedID)
	kept := handedOver || askedAgain || d.unreachable
	switch {
	case kept && !d.stored:
		// It logs; without it the worker is asked as if anew, or the entry is not run again: see unsettled.
		_ = d.save(context.WithoutCancel(ctx), d.remote(), o.Ran)
	case handedOver:
		d.charge(ctx, o.Ran)
	case !kept && d.saved != nil:
		d.forget(ctx, d.saved)
	}
}

// releaseSlot frees the slot, or leaves it counted while the call may still run.
func (d *dispatch) releaseSlot(ctx context.Context, o worker.Outcome) {
	switch {
	case o.MaybeRunning:
		d.held.doubt(d.run.Queue.ID, d.run.Entry.ID, worker.Clip(o.Kind.String()+": "+o.Reason))
	case errors.Is(context.Cause(ctx), errPreempted):
		d.held.cede()
	default:
		d.held.release()
	}
}

const leftByPanic = "the call was left by a panic"

// abandon puts the slot in doubt if the call was left by a panic: it is unknown whether it runs on.
func (d *dispatch) abandon() {
	if d.held != nil && !d.held.ended {
		d.held.doubt(d.run.Queue.ID, d.run.Entry.ID, leftByPanic)
	}
}

// goesToNextNode says whether nobody has ended the run: the node that claims its entry next follows it on.
func goesToNextNode(ctx context.Context) bool {
	cause := context.Cause(ctx)
	return cause == nil || errors.Is(cause, invalidation.ErrDraining) || errors.Is(cause, invalidation.ErrLeaseLost)
}

// result hands the answer on, through the object store if it is large. While the store is away the
// answer is kept: the GPU's work is not done again for that. The entry's permit keeps an idle slot from
// others meanwhile. When the store stays away the answer is stored in its row if it is not too large.
func (d *dispatch) result(ctx context.Context, o worker.Outcome) (json.RawMessage, error) {
	key := fmt.Sprintf("%s/%d-%d.json", d.run.Queue.Name, d.run.Entry.ID, d.run.Lock.Token)
	putting := time.Now()
	for wait := storeRetryMin; ; wait = min(2*wait, storeRetryMax) {
		put, cancel := context.WithTimeout(ctx, time.Minute)
		result, err := storeLarge(put, d.objects, d.tuning.inlineBytes, key, o.Result)
		cancel()
		if err == nil {
			return result, nil
		}
		if ctx.Err() == nil && time.Since(putting)+wait < d.tuning.storeWait {
			d.log.Warn("store result; trying on", "entry", d.run.Entry.ID, "error", err)
			pause(ctx, wait)
			continue
		}
		switch cause := context.Cause(ctx); {
		case errors.Is(cause, invalidation.ErrLeaseLost) || errors.Is(cause, invalidation.ErrCancelled):
			return nil, fmt.Errorf("%w (%w)", cause, err)
		case len(o.Result) <= inlineMax:
			return o.Result, nil
		}
		return nil, invalidation.WithClass("store", err)
	}
}

const (
	storeRetryMin = 500 * time.Millisecond // between attempts to store a result, or a run
	storeRetryMax = 30 * time.Second
	inlineMax     = 8 << 20 // bytes of a result that stand in its row when the object store is not to be had
)

// pause waits for d, or until ctx ends.
func pause(ctx context.Context, d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-ctx.Done():
	case <-timer.C:
	}
}

// givenUp is for a run that its worker ended by itself, as it does when it shuts down. The entry goes on, also where
// the worker calls the run cancelled: to cancel the entry is for those who pushed it, and ends the context.
func (d *dispatch) givenUp(ctx context.Context, o worker.Outcome) error {
	if d.wentAway(ctx) {
		return invalidation.NoCapacity(d.tuning.readyWait, errors.New(o.Reason+" (the instance went away)"))
	}
	return d.failure(ctx, o)
}

func (d *dispatch) failure(ctx context.Context, o worker.Outcome) error {
	switch {
	case context.Cause(ctx) != nil:
		return fmt.Errorf("%w (%s)", context.Cause(ctx), o.Reason)
	case errors.Is(o.Err, worker.ErrDeadline):
		return fmt.Errorf("%w: %s", invalidation.ErrFinishBy, o.Reason)
	case isLimit(o.Err):
		return invalidation.WithClass("timeout", errors.New(o.Reason))
	case o.Class == worker.ClassInput:
		return invalidation.Permanent(invalidation.WithClass(string(o.Class), errors.New(o.Reason)))
	}
	return invalidation.WithClass(string(o.Class.OrTransient()), errors.New(o.Reason))
}

func isLimit(err error) bool {
	return errors.Is(err, worker.ErrRunLimit) || errors.Is(err, worker.ErrNoProgress) ||
		errors.Is(err, worker.ErrStartLimit)
}

// unsettled is for a run of which it is unknown whether it ended, or that is handed over.
func (d *dispatch) unsettled(ctx context.Context, o worker.Outcome) error {
	switch cause := context.Cause(ctx); {
	case cause != nil && o.Kind == worker.Accepted && !d.stored && d.model.OnUnknown == worker.AtMostOnce:
		return d.unknownOutcome(cause.Error() + " (the run that the worker accepted could not be stored)")
	case cause != nil && o.Kind == worker.Unknown && d.model.OnUnknown == worker.AtMostOnce:
		return d.unknownOutcome(cause.Error() + " (" + o.Reason + ")")
	case cause != nil:
		return fmt.Errorf("%w (%s)", cause, o.Reason)
	case errors.Is(o.Err, worker.ErrDeadline):
		return fmt.Errorf("%w: %s", invalidation.ErrFinishBy, o.Reason)
	case d.model.OnUnknown == worker.AtMostOnce:
		return d.unknownOutcome(o.Reason)
	case isLimit(o.Err):
		return invalidation.WithClass("timeout", errors.New(o.Reason))
	}
	return invalidation.WithClass(classUnknown, errors.New(o.Reason))
}

func (d *dispatch) unknownOutcome(reason string) error {
	return invalidation.Unrepeatable(invalidation.WithClass(classUnknown,
		fmt.Errorf("it is unknown whether this entry ran, and it must not run twice: %s", reason)))
}

// meta is what is kept beside the outcome.
func (d *dispatch) meta(o worker.Outcome) json.RawMessage {
	if len(o.Metrics) > metricsMax || invalidation.CheckJSON(o.Metrics) != nil {
		o.Metrics = nil
	}
	text, err := json.Marshal(struct {
		Model      string          `json:"model"`
		Instance   string          `json:"instance"`
		InstanceID int32           `json:"instance_id"`
		Slot       int32           `json:"slot"`
		QueueMS    int64           `json:"queue_ms"`
		RunMS      int64           `json:"run_ms"`
		FirstMS    float64         `json:"first_byte_ms,omitempty"` // of that, until an answer began
		Attempts   int             `json:"attempts"`
		Instances  int             `json:"instances_tried"`
		Members    int             `json:"batch,omitempty"` // entries in the call
		Swapped    bool            `json:"swapped,omitempty"`
		Outcome    string          `json:"outcome"`
		Status     int             `json:"status,omitempty"`
		Remote     string          `json:"remote_id,omitempty"`
		Reattached bool            `json:"reattached,omitempty"`
		GPUMS      int64           `json:"gpu_ms,omitempty"`
		TokensIn   int64           `json:"tokens_in,omitempty"`
		Cached     int64           `json:"tokens_cached,omitempty"`
		TokensOut  int64           `json:"tokens_out,omitempty"`
		Logs       string          `json:"logs,omitempty"` // Cog: the end of them
		Metrics    json.RawMessage `json:"metrics,omitempty"`
	}{
		Model: d.model.Name, Instance: d.held.endpoint.Server, InstanceID: d.held.endpoint.ID, Slot: d.held.slot.Number,
		QueueMS:  (d.run.Entry.Waited + d.start.Sub(d.run.Lock.ClaimedAt)).Milliseconds(),
		RunMS:    d.took().Milliseconds(),
		FirstMS:  math.Round(d.first.Seconds()*1e5) / 100,
		Attempts: d.call.Attempt, Instances: d.tries, Members: d.members, Swapped: d.held.swapped,
		Outcome: o.Kind.String(), Status: o.StatusCode, Remote: d.remote(),
		Reattached: d.saved != nil && d.saved.Token != d.call.Token, Metrics: o.Metrics,
		GPUMS: d.used.GPU.Milliseconds(), TokensIn: d.used.Tokens.In, Cached: d.used.Tokens.Cached,
		TokensOut: d.used.Tokens.Out, Logs: tail(o.Logs, logsMax),
	})
	if err != nil {
		return nil // the worker's metrics were no JSON
	}
	return text
}

// metricsMax is how many bytes of a worker's own metrics are kept beside the outcome.
const metricsMax = 16 << 10

// logsMax is how many bytes of a run's logs are kept beside its outcome.
const logsMax = 4 << 10

// tail returns the end of a text, as a valid one.
func tail(text string, most int) string {
	if len(text) > most {
		text = text[len(text)-most:]
	}
	return strings.ReplaceAll(strings.ToValidUTF8(text, ""), "\x00", "")
}

func (d *dispatch) remote() string {
	if d.saved == nil {
		return ""
	}
	return d.saved.Remote
}
