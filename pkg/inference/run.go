package inference

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"strconv"
	"sync"
	"time"

	"go.opentelemetry.io/otel/attribute"
	"go.opentelemetry.io/otel/codes"
	"go.opentelemetry.io/otel/trace"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/worker"
)

// Dispatcher runs entries of inference queues: it is their invalidation.Handler. A permit for the
// entry was taken from the pool before the entry was claimed.
type Dispatcher struct {
	objects  ObjectStore // see ServiceConfig, as reports
	reports  *Reports
	tuning   tuning
	db       postgres.DB
	registry *Registry
	pool     *SlotPool
	log      *slog.Logger

	mu        sync.Mutex
	waitlists map[string]*waitlist // by model
	runs      runs
	blame     *blame
	usage     *UsageMeter
}

// triesMax is how many instances are tried for one claim before the entry is handed back.
const triesMax = 3

// newDispatcher returns the handler of all inference queues.
func newDispatcher(config ServiceConfig, t tuning, db postgres.DB, registry *Registry, pool *SlotPool) *Dispatcher {
	log := cmp.Or(config.Log, slog.Default())
	d := &Dispatcher{
		objects: config.Objects, reports: config.Reports, tuning: t, db: db, registry: registry, pool: pool, log: log,
		waitlists: map[string]*waitlist{}, blame: newBlame(), usage: newUsageMeter(db, t, pool.holder.Node, log),
	}
	registry.OnChange(d.forgetWaitlists)
	pool.idled = d.slotIdled
	pool.preempt = d.runs.preempt
	pool.unsupported = d.unsupported
	return d
}

// unsupported says why this node makes no calls of a model. A run of Cog is over when it has reported.
func (d *Dispatcher) unsupported(m worker.Model) error {
	if d.reports == nil && m.Protocol == worker.ProtocolCog && m.Type == worker.TypeAsync {
		return worker.ErrNoCallback
	}
	return nil
}

// dispatch is what one claim of an entry does with it: calls to one instance after another, until one has run it. A
// call for several entries has one of its own, besides those of its entries.
type dispatch struct {
	*Dispatcher
	run   *invalidation.Run // nil: see shared
	model worker.Model
	call  worker.Call

	// of the claim
	start   time.Time
	tries   int
	used    Used     // of workers
	counted struct { // what of that was counted last
		Used
		key usageKey
	}
	lost   int   // instances that lost their device to the entry
	poison error // why the entry must not run again

	// of one call: the present one, or else the last
	held        *slotRef
	saved       *remoteRun    // that the worker accepted, or may have: to be forgotten when it is over
	stored      bool          // saved is in the database
	began       time.Time     // of the exchange with the worker
	before      time.Duration // from the begin of its run, under an earlier lock, until then
	first       time.Duration // from then to the first byte of an answer; 0: there was none
	members     int           // in the call, where it was one for several entries
	notRun      bool          // it says nothing of the entry: it was not sent, or found no room
	unreachable bool          // the worker could not be asked about it: it may go on, and is to be asked again
}

// shared says that the call is one for several entries: it has no run of its own.
func (d *dispatch) shared() bool { return d.run == nil }

// Handle runs one entry on a worker. Its flow is charged GPU time alone: of a call that several entries
// share each pays its part, and waiting for a slot or for others costs nothing.
func (d *Dispatcher) Handle(ctx context.Context, r *invalidation.Run) (json.RawMessage, error) {
	call := callOf(r)
	ctx, done := d.runs.begin(ctx, int64(r.Lock.Token), func() bool {
		model, known := d.registry.Model(r.Queue.Config.Model)
		return known && model.StopsOnClose(call)
	})
	defer done()
	result, err := d.handle(ctx, r, call)
	return result, preempted(ctx, err)
}

func (d *Dispatcher) handle(ctx context.Context, r *invalidation.Run, call worker.Call) (json.RawMessage, error) {
	r.Charge(0) // until a worker has run it
	model, known := d.registry.Model(r.Queue.Config.Model)
	if !known {
		return nil, invalidation.NoCapacity(d.tuning.readyWait,
			fmt.Errorf("model %q is not registered", r.Queue.Config.Model))
	}
	claim := &dispatch{Dispatcher: d, run: r, model: model, call: call, start: time.Now()}
	claim.call.Output = outputLog{r} // adapters write to it what their servers stream
	if remembered := model.Type == worker.TypeAsync || model.OnUnknown == worker.Reattach; remembered {
		old, err := findRun(ctx, d.db, r.Queue.ID, r.Entry.ID)
		if err != nil {
			return nil, invalidation.NoCapacity(d.tuning.busyWait, err)
		}
		if old != nil {
			return claim.reattach(ctx, old)
		}
	}
	// Programs of the version before count a crash and set no mark.
	if (r.Entry.MayHaveRun || r.Entry.Crashes > 0) && model.OnUnknown == worker.AtMostOnce {
		return nil, claim.unknownOutcome("an earlier lock of it was ended by recovery or by hand while it may have run")
	}
	if usesWaitlist(model) {
		return claim.runShared(ctx)
	}
	return claim.submit(ctx)
}

// A chunk of output fits into one row of the log.
var _ [invalidation.OutputBytesMax - worker.ChunkBytesMax]struct{}

// outputLog is the log of a run in the database.
type outputLog struct{ run *invalidation.Run }

func (l outputLog) Append(ctx context.Context, c worker.Chunk) error {
	return l.run.AppendOutput(ctx, c.Seq, c.Data)
}

func callOf(r *invalidation.Run) worker.Call {
	return worker.Call{
		RunRef: worker.RunRef{
			Entry: strconv.FormatInt(int64(r.Entry.ID), 10), Token: int64(r.Lock.Token),
			Attempt: r.Entry.Attempt + 1, Request: r.Entry.Payload,
		},
		FinishBy: r.Entry.FinishBy, Payload: r.Entry.Payload, TraceParent: r.Entry.Trace,
	}
}

// submit sends the call to one instance after the other until one takes it; to the one first whose
// slot it has.
func (d *dispatch) submit(ctx context.Context) (json.RawMessage, error) {
	defer d.abandon()
	unfit, fits := d.unfit()
	if !fits && d.held == nil {
		return nil, d.fitsNowhere()
	}
	tried := d.blame.avoid(d.call.Entry, d.usableInstances())
	maps.Copy(tried, unfit)
	var last worker.Outcome
	for d.tries < triesMax {
		if d.held == nil {
			d.held, _ = d.pool.assign(d.model.Name, d.slotRequest(tried))
		}
		if d.held == nil {
			break
		}
		d.tries++
		tried[d.held.endpoint.ID] = true
		last = d.exchange(ctx)
		if d.poison != nil || !d.elsewhere(ctx, last) {
			return d.conclude(ctx, last)
		}
		d.held.release()
		d.held = nil
		if d.saved != nil { // accepted here, and over: what is reported of it says nothing of the next run
			d.forget(ctx, d.saved)
			d.saved, d.stored = nil, false
		}
		if d.lost > 1 {
			break // two instances are enough for one claim
		}
	}
	if last.Misrouted && d.blame.everywhere(d.model.Name, d.call.Entry, d.usableInstances(), time.Now()) {
		return nil, invalidation.Permanent(invalidation.WithClass(string(worker.ClassInput), fmt.Errorf(
			"every instance of model %q refuses it while others are served: %s", d.model.Name, last.Reason)))
	}
	return nil, d.noRoom(last)
}

// noRoom hands the entry back unspent: no instance took it, or there was no slot.
func (d *dispatch) noRoom(last worker.Outcome) error {
	wait := d.tuning.busyWait
	switch {
	case last.Kind == worker.NotReady || d.blame.caution(d.call.Entry) > together:
		wait = d.tuning.readyWait
	case d.tries == 0 && !d.pool.idle(d.model.Name):
		wait = 0 // it was claimed on a permit for another run or another kind of entry: it keeps its position
	}
	last.Reason = cmp.Or(last.Reason, "no free slot")
	return invalidation.NoCapacity(max(wait, last.RetryAfter), errors.New(last.Reason))
}

// affinity is the value of the affinity field for the entry, which the worker has to load. Empty: the entry needs
// nothing loaded.
func (d *dispatch) affinity() string {
	switch field := d.model.AffinityField; field {
	case "":
		return ""
	case worker.AffinityFlow:
		return d.run.Lock.Lane.Flow
	default:
		return worker.TextField(d.call.Payload, field)
	}
}

// exchange makes the call, and follows it to its end if the worker accepted it.
func (d *dispatch) exchange(ctx context.Context) worker.Outcome {
	reports, done := d.subscribe(d.reportsUnder())
	defer done()
	ctx, span := invalidation.StartSpan(ctx, "call "+d.model.Name, trace.SpanKindClient,
		attribute.String("penstock.model", d.model.Name), attribute.String("server.address", d.held.endpoint.Server))
	defer span.End()
	if parent := invalidation.TraceParent(ctx); parent != "" {
		d.call.TraceParent = parent
	}
	ctx, release := d.outliveCancel(ctx)
	defer release()
	d.began, d.first = time.Now(), 0
	o := d.held.endpoint.adapter.Submit(ctx, d.call)
	if !o.FirstByteAt.IsZero() {
		d.first = o.FirstByteAt.Sub(d.began)
	}
	switch {
	case o.Kind == worker.Accepted && d.shared():
		o = unanswered("worker took a batch without answering it", nil)
	case o.Kind == worker.Accepted:
		o = d.follow(ctx, o, reports)
	}
	d.notRun = o.Unsent || o.Kind == worker.Busy || (o.Kind == worker.NotReady && !o.Misrouted)
	o = d.record(ctx, o)
	span.SetAttributes(attribute.String("penstock.outcome", o.Kind.String()),
		attribute.Int("http.response.status_code", o.StatusCode))
	if o.Kind != worker.Done {
		span.SetStatus(codes.Error, o.Reason)
	}
	return o
}

// outliveCancel keeps a call open that was cancelled, where closing its connection is not known to
// stop the run and the entry has a lock key: the next entry of the key must not start beside it. The
// run's own limits still end it, as do a drain and a lost lease.
func (d *dispatch) outliveCancel(ctx context.Context) (context.Context, context.CancelFunc) {
	if d.shared() || d.run.Lock.Solo() || d.model.Type != worker.TypeSync || d.model.StopsOnClose(d.call) {
		return ctx, func() {}
	}
	open, end := context.WithCancelCause(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, func() {
		if cause := context.Cause(ctx); !errors.Is(cause, invalidation.ErrCancelled) {
			end(cause)
		}
	})
	lasting := d.lasting()
	stopLasting := context.AfterFunc(lasting, func() { end(context.Cause(lasting)) })
	return open, func() {
		stop()
		stopLasting()
		end(nil)
	}
}

// lasting is for what goes on after a cancel: see invalidation.Run.
func (d *dispatch) lasting() context.Context {
	if d.run.Lasting == nil {
		return context.Background()
	}
	return d.run.Lasting
}

// unanswered is the outcome of a call that a worker took, and of which it cannot be told how it
// ended.
func unanswered(reason string, err error) worker.Outcome {
	return worker.Outcome{Kind: worker.Unknown, Reason: worker.Clip(reason), Err: err, MaybeRunning: true}
}

// elsewhere says whether another instance should be tried: nothing ran here, and nothing has ended
// the run.
func (d *dispatch) elsewhere(ctx context.Context, o worker.Outcome) bool {
	return o.FreeOfCharge() && !o.MaybeRunning && !o.Alone && ctx.Err() == nil &&
		!errors.Is(o.Err, worker.ErrStaleToken)
}

// reportsUnder is the token in the address that the run reports to. A run that is asked for again keeps
// the address of the first call: not all protocols say whether it is that one or begins now.
func (d *dispatch) reportsUnder() int64 {
	if d.saved != nil {
		return d.saved.Token
	}
	return d.call.Token
}

// follow follows a run that the worker has accepted to its end.
func (d *dispatch) follow(
	ctx context.Context, accepted worker.Outcome, reports <-chan worker.Outcome,
) worker.Outcome {
	if err := d.save(ctx, accepted.Remote, 0); errors.Is(err, worker.ErrSharedID) {
		return unanswered(err.Error(), worker.ErrSharedID)
	}
	run := d.call.RunRef
	run.Remote = accepted.Remote
	return d.followAndStore(ctx, worker.Pending{
		RunRef: run, FinishBy: d.call.FinishBy, Starting: accepted.Starting, Reports: reports,
	})
}

// followAndStore follows a run to its end. Where it could not be stored before, it is stored meanwhile: without that no
// other node knows of it, and its worker has nobody to report to.
func (d *dispatch) followAndStore(ctx context.Context, run worker.Pending) worker.Outcome {
	ctx, end := context.WithCancelCause(ctx)
	defer end(nil)
	var (
		storing sync.WaitGroup
		shared  error
	)
	if !d.stored {
		remote := d.remote()
		storing.Go(func() {
			if shared = d.saveAgain(ctx, remote); shared != nil {
				end(shared)
			}
		})
	}
	o := d.held.endpoint.follower.Follow(ctx, run)
	end(nil)
	storing.Wait()
	if shared != nil {
		return unanswered(shared.Error(), worker.ErrSharedID)
	}
	return o
}
