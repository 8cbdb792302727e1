package tasknode

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"runtime/debug"
	"slices"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
)

// assignment is a lock on its way through the node.
type assignment struct {
	lock    *invalidation.Lock
	queue   *invalidation.Queue
	handler invalidation.Handler
	service *service
	lane    invalidation.Candidate
	home    *lane
	leave   allowance // of the gates, given back when the run ends
	losses  int64     // of the node's lease, before it was claimed

	// guarded by desk
	charged float64   // what the ranker was told that it costs
	used    float64   // what its entries cost that have run
	began   time.Time // of the run whose cost is its time; zero while there is none
	cancel  context.CancelCauseFunc
	wishes  map[invalidation.EntryID]string // entries to be cancelled, and why; guarded by desk
	now     invalidation.EntryID            // the entry that runs; guarded by desk
	traced  *traced                         // nil: it is not
}

// accept takes claimed locks of a lane in. If the node has no others of the lane the first is let go before those that wait;
// it returns the rest.
//
// Locks whose claim began three quarters of a lease ago are handed back: while the answer was on its way no heartbeat listed
// them, and the leader may take a lock that is older than a lease for one that its node does not know.
func (n *Node) accept(v *visit, locks []*invalidation.Lock, a allowance, losses int64, claimed time.Time, t *traced) (rest []*assignment) {
	if len(locks) == 0 {
		return nil
	}
	late := time.Since(claimed) >= n.leaseBound()
	if late {
		n.cfg.Log.Warn("claim answered too late, its locks are handed back", "queue", v.name, "locks", len(locks), "took", time.Since(claimed))
	}
	seconds, total := n.board.estimate(v.service).Seconds(), 0.0
	for _, l := range locks {
		total += cost(l.Entries, seconds)
	}
	n.cfg.Ranker.Charge(v.ranked, total)
	first := n.board.hold(v.lane, len(locks))
	for _, l := range locks {
		job := &assignment{lock: l, queue: v.queue, handler: v.handler, service: v.service, lane: v.ranked, home: v.lane, charged: cost(l.Entries, seconds), leave: a, losses: losses, traced: t.another()}
		n.desk.add(job)
		if len(l.Entries) == 0 {
			// The key's entries went between its ready row and the claim. The ending looks for others once more.
			a.ran(1)
			n.end(job, last(invalidation.Done(l, 0, nil, 0)))
			continue
		}
		if late {
			a.ran(1)
			n.end(job, last(invalidation.Release(l, l.Entries[0].ID, 0)))
			continue
		}
		if first {
			n.express <- job
			first = false
			continue
		}
		rest = append(rest, job)
	}
	return rest
}

// enqueue hands what one claim brought to the processing threads, by place whatever the lane: recovery counts on that order
// when it tells what a dead node can have begun.
func (n *Node) enqueue(jobs []*assignment) {
	slices.SortStableFunc(jobs, func(a, b *assignment) int { return a.lock.Compare(b.lock) })
	for _, job := range jobs {
		n.work <- job
	}
}

// cost is what runs of entries cost that take so long each: what they declare, or the time.
func cost(entries []invalidation.Entry, seconds float64) float64 {
	sum := 0.0
	for i := range entries {
		if c := entries[i].Cost; c > 0 {
			sum += c
		} else {
			sum += seconds
		}
	}
	return sum
}

func last(e invalidation.Ending) invalidation.Ending {
	e.Last = true
	return e
}

// processor is one processing thread. It lets one lock go first, then runs one that is in line, and so on: neither kind
// waits for as long as there are others.
func (n *Node) processor() {
	for {
		n.letOne(false)
		var job *assignment
		more := true
		select {
		case job, more = <-n.work:
		default:
			select {
			case over := <-n.lent:
				<-over
				continue
			case job = <-n.express:
			case job, more = <-n.work:
			}
		}
		if !more {
			for n.letOne(false) {
			}
			return
		}
		n.process(job, false)
	}
}

// letOne makes way for one lock of a lane of which nothing else is on this node: it runs it, or waits for the standby
// that does. It says whether there was one.
func (n *Node) letOne(let bool) bool {
	select { // each by itself: then an empty channel takes no lock, which all threads would meet at
	case over := <-n.lent:
		<-over
		return true
	default:
	}
	select {
	case job := <-n.express:
		n.process(job, let)
		return true
	default:
		return false
	}
}

// standby is a thread beside the others for locks of lanes of which nothing else is on this node, so that these do not wait
// even for the run that ends next. The thread whose run that is waits in its stead: there is a run more than the node has threads
// until then, and no thread is idle for it.
func (n *Node) standby(ctx context.Context) {
	for {
		select {
		case <-ctx.Done():
			return
		case job := <-n.express:
			over := make(chan struct{})
			n.lent <- over
			n.process(job, true)
			close(over)
			select {
			case <-n.lent: // no run ended meanwhile
			default:
			}
		}
	}
}

// process runs the entries of one lock, oldest first, and passes on how each ended. Between two of them it lets others
// go first, unless it is itself one that was let.
func (n *Node) process(job *assignment, let bool) {
	start := time.Now()
	defer func() {
		charged, used := n.desk.account(job)
		n.cfg.Ranker.Settle(job.lane, charged, used)
		if len(job.leave.grants) > 0 {
			job.leave.ran(1)
			n.Freed()
		}
	}()
	if batch, ok := job.handler.(invalidation.BatchHandler); ok {
		n.processBatch(job, batch)
		return
	}
	entries := job.lock.Entries
	if len(entries) > 1 {
		defer func() { n.board.took(job.service, time.Since(start)) }()
	}
	for i := range entries {
		if i > 0 && !let && !n.makeWay(job, start, i) {
			return
		}
		if why := n.stop(job, start, i); why != nil {
			n.end(job, last(why(job.lock, entries[i].ID)))
			return
		}
		ending := n.runOne(job, &entries[i])
		// An entry that is handed back takes those behind it along, or they would overtake it.
		ending.Last = i == len(entries)-1 || ending.Verb() == "release"
		n.end(job, ending)
		if ending.Last {
			return
		}
	}
}

// makeWay lets others go before entry i of a lock. They may take long: when the lock's time is over it goes back meanwhile, and
// makeWay returns false.
func (n *Node) makeWay(job *assignment, start time.Time, i int) bool {
	if len(n.lent)+len(n.express) == 0 {
		return true
	}
	back := make(chan struct{})
	timer := time.AfterFunc(job.queue.Config.QuantumTime-time.Since(start), func() {
		n.end(job, last(n.stop(job, start, i)(job.lock, job.lock.Entries[i].ID)))
		close(back)
	})
	for n.letOne(true) {
	}
	if timer.Stop() {
		return true
	}
	<-back // before the thread may end, and the settlers with it
	return false
}

// stop says how to end a lock before entry i has run, nil to go on.
func (n *Node) stop(job *assignment, start time.Time, i int) func(*invalidation.Lock, invalidation.EntryID) invalidation.Ending {
	switch {
	case n.leaseLost(job) || n.handingBack.Load():
		return func(l *invalidation.Lock, e invalidation.EntryID) invalidation.Ending {
			return invalidation.Release(l, e, 0)
		}
	case i > 0 && time.Since(start) >= job.queue.Config.QuantumTime:
		return invalidation.Yield
	default:
		return nil
	}
}

// runOne runs an entry under its context and judges the outcome.
func (n *Node) runOne(job *assignment, e *invalidation.Entry) invalidation.Ending {
	sinceClaim := time.Since(job.lock.ClaimedAt)
	if sinceClaim >= e.StartIn {
		return invalidation.Expire(job.lock, e.ID, "start_by has passed")
	}
	if sinceClaim >= e.FinishIn {
		return invalidation.Expire(job.lock, e.ID, invalidation.ErrFinishBy.Error())
	}
	ctx, stop := n.runContext(job, e, sinceClaim)
	defer stop()
	if reason, wished := n.desk.begin(job, e.ID); wished {
		return invalidation.Cancel(job.lock, e.ID, reason)
	}
	// The lease may have been lost before the desk knew how to end this run.
	if n.leaseLost(job) {
		return invalidation.Release(job.lock, e.ID, 0)
	}
	start := time.Now()
	ctx, span := n.startRun(ctx, job, e)
	r := &invalidation.Run{Queue: job.queue, Entry: *e, Lock: job.lock, Node: n.id()}
	result, err := n.handle(ctx, job, r)
	ran := time.Since(start)
	endRun(span, job, err, e)
	n.board.ran(job.service, ran, len(job.lock.Entries) == 1)
	n.desk.ran(job, cost([]invalidation.Entry{*e}, ran.Seconds()))
	n.stats.ran(err, ran)
	n.cfg.Observer.Ran(job.service.name, e.Waited+sinceClaim, ran, err)
	if err != nil {
		err = withCause(ctx, err)
	}
	return invalidation.Judge(r, result, err, ran, n.random())
}

// withCause adds why the context ended, where that is why the handler returned an error.
func withCause(ctx context.Context, err error) error {
	if cause := context.Cause(ctx); cause != nil && !errors.Is(err, cause) {
		return fmt.Errorf("%w: %w", cause, err)
	}
	return err
}

// runContext is the context of one run. Its cause says why it ended.
func (n *Node) runContext(job *assignment, e *invalidation.Entry, sinceClaim time.Duration) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(n.runs)
	n.desk.cancelWith(job, cancel, e.Cost == 0)
	if e.FinishIn == invalidation.NoDeadline && job.queue.Config.RunTimeout == 0 {
		return ctx, func() { cancel(nil) }
	}
	stops := []func(){func() { cancel(nil) }}
	if e.FinishIn != invalidation.NoDeadline {
		var stop context.CancelFunc
		ctx, stop = context.WithTimeoutCause(ctx, e.FinishIn-sinceClaim, invalidation.ErrFinishBy)
		stops = append(stops, stop)
	}
	if limit := job.queue.Config.RunTimeout; limit > 0 {
		var stop context.CancelFunc
		ctx, stop = context.WithTimeoutCause(ctx, limit, invalidation.ErrRunTimeout)
		stops = append(stops, stop)
	}
	return ctx, func() {
		for _, stop := range stops {
			stop()
		}
	}
}

// handle calls the handler; a panic is an error like others.
func (n *Node) handle(ctx context.Context, job *assignment, r *invalidation.Run) (result json.RawMessage, err error) {
	defer func() {
		if v := recover(); v != nil {
			err = &invalidation.PanicError{Value: v, Stack: string(debug.Stack())}
			n.cfg.Log.Error("handler panicked", "queue", job.queue.Name, "entry", r.Entry.ID, "token", job.lock.Token, "panic", v)
		}
	}()
	return job.handler.Handle(ctx, r)
}

// processBatch gives all entries of a lock to the handler at once.
func (n *Node) processBatch(job *assignment, h invalidation.BatchHandler) {
	entries := job.lock.Entries
	if n.leaseLost(job) || n.handingBack.Load() {
		n.end(job, last(invalidation.Release(job.lock, entries[0].ID, 0)))
		return
	}
	var runs []*invalidation.Run
	var over []invalidation.Ending
	finishIn := invalidation.NoDeadline
	sinceClaim := time.Since(job.lock.ClaimedAt)
	for i := range entries {
		if min(entries[i].StartIn, entries[i].FinishIn) <= sinceClaim {
			over = append(over, invalidation.Expire(job.lock, entries[i].ID, "its deadline has passed"))
			continue
		}
		if reason, wished := n.desk.wished(job, entries[i].ID); wished {
			over = append(over, invalidation.Cancel(job.lock, entries[i].ID, reason))
			continue
		}
		finishIn = min(finishIn, entries[i].FinishIn)
		runs = append(runs, &invalidation.Run{Queue: job.queue, Entry: entries[i], Lock: job.lock, Node: n.id()})
	}
	endings := over
	if len(runs) > 0 {
		endings = append(endings, n.runBatch(job, h, runs, finishIn, sinceClaim)...)
	}
	endings[len(endings)-1].Last = true
	n.end(job, endings...)
}

func (n *Node) runBatch(job *assignment, h invalidation.BatchHandler, runs []*invalidation.Run, finishIn, sinceClaim time.Duration) []invalidation.Ending {
	ctx, stop := n.runContext(job, &invalidation.Entry{FinishIn: finishIn, Cost: runs[0].Entry.Cost}, sinceClaim)
	defer stop()
	// The lease may have been lost before the desk knew how to end this run.
	if n.leaseLost(job) {
		return []invalidation.Ending{invalidation.Release(job.lock, runs[0].Entry.ID, 0)}
	}
	start := time.Now()
	var entries []*invalidation.Entry
	if job.traced != nil {
		for _, r := range runs {
			entries = append(entries, &r.Entry)
		}
	}
	ctx, span := n.startRun(ctx, job, entries...)
	answers, err := callBatch(ctx, h, runs)
	ran := time.Since(start)
	endRun(span, job, err, entries...)
	n.board.ran(job.service, ran, true)
	n.stats.ran(err, ran)
	for _, r := range runs {
		n.desk.ran(job, cost([]invalidation.Entry{r.Entry}, ran.Seconds()/float64(len(runs))))
		n.cfg.Observer.Ran(job.service.name, r.Entry.Waited+sinceClaim, ran, err)
	}
	endings := make([]invalidation.Ending, len(runs))
	for i, r := range runs {
		answer := invalidation.BatchAnswer{Err: err}
		if err == nil {
			answer = answers[i]
		}
		if answer.Err != nil {
			answer.Err = withCause(ctx, answer.Err)
		}
		endings[i] = invalidation.Judge(r, answer.Result, answer.Err, ran/time.Duration(len(runs)), n.random())
	}
	return endings
}

func callBatch(ctx context.Context, h invalidation.BatchHandler, runs []*invalidation.Run) (answers []invalidation.BatchAnswer, err error) {
	defer func() {
		if v := recover(); v != nil {
			err = &invalidation.PanicError{Value: v, Stack: string(debug.Stack())}
		}
	}()
	answers = h.HandleBatch(ctx, runs)
	if len(answers) != len(runs) {
		return nil, fmt.Errorf("handler answered %d of %d entries", len(answers), len(runs))
	}
	return answers, nil
}
