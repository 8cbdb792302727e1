package maintenance

import (
	"context"
	"errors"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/duty"
	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// Deadlines is the duty that promotes entries when they are due, expires entries past their
// deadline, and cancels entries whose cancel was requested while they ran and which were then
// released or retried. It also fails entries that wait for an instance of a model that has had none for as long as
// their queue allows (invalidation.OnNoInstanceFail).
type Deadlines struct {
	cfg   Config
	db    postgres.DB
	fence Fence
	// An entry that is due must not wait for a frozen connection, as with Locks.
	reads, writes duty.Wait

	queues []*invalidation.Queue // the newest list
	parts  []*part               // of the list
	next   int                   // the part at which the next pass begins

	batch map[int32]int // entries in one transaction, for queues where cfg.BatchEntriesMax would time out
	held  bool          // in this pass: what comes by the clock waits until that is believed

	misdated misdatedWalk
	overrun  overrunReport

	done duty.Tally[DeadlinesStatus]
}

// DeadlinesStatus has the counters of the duty in this term.
type DeadlinesStatus struct {
	Promoted  int64         // entries
	Expired   int64         // entries
	Cancelled int64         // entries, by a requested cancel
	Failed    int64         // entries, for want of an instance of their model
	Late      time.Duration // greatest lateness of due entries in the last pass; deadlines do not count
	Errors    int64         // failed batches; each one was logged
	Overrun   int           // entries that still run long after their finish_by
}

// NewDeadlines returns the duty for one term. It reads through db and writes through fence.
func NewDeadlines(db postgres.DB, fence Fence, cfg Config) *Deadlines {
	d := &Deadlines{cfg: cfg.withDefaults(), db: db, fence: fence, batch: map[int32]int{}}
	d.reads.ForLease(usualLease)
	d.writes = duty.Wait{First: writeMax}
	return d
}

// usualLease is that of nodes by default.
const usualLease = 10 * time.Second

// writeMax is longer than the server lets a statement of the term take (2 s): that one halves the batch, and the duty
// goes on with the next queue.
const writeMax = 2500 * time.Millisecond

// Run promotes, expires and cancels entries until ctx ends.
func (d *Deadlines) Run(ctx context.Context) error { return d.cfg.loop("deadlines").Run(ctx, d.pass) }

// Status is safe to call at any time.
func (d *Deadlines) Status() DeadlinesStatus { return d.done.Read() }

// pass serves the queues that have work to do, and asks to be called again when the next work comes due, at once if
// there is more. Entries pushed meanwhile are seen after cfg.Pause.
func (d *Deadlines) pass(ctx context.Context) (time.Duration, error) {
	if err := d.list(ctx); err != nil {
		return 0, err
	}
	before := d.held
	d.held = false
	pause, err := d.visit(ctx, d.queues)
	if err != nil {
		return 0, err
	}
	switch {
	case d.held && !before:
		d.cfg.Log.WarnContext(ctx, "due entries and deadlines wait until the database's clock is believed",
			"error", duty.ErrClock)
	case before && !d.held:
		d.cfg.Log.InfoContext(ctx, "due entries and deadlines wait no more for the database's clock")
	}
	if err := d.redate(ctx); err != nil {
		return 0, err
	}
	return pause, d.reportOverrun(ctx)
}

// visit does the work of the queues that is due, and returns the time until the next is. It fails where no queue could
// be read.
func (d *Deadlines) visit(ctx context.Context, queues []*invalidation.Queue) (pause time.Duration, err error) {
	pause, late := d.cfg.Pause, 0.0
	all, err := d.readParts(ctx, queues, func(w invalidation.NextWork) error {
		// Deadlines stay with entries that run: one that has passed is no backlog.
		late = max(late, -value(w.Due))
		next, err := d.serve(ctx, w)
		pause = min(pause, next)
		return err
	})
	if err != nil {
		return 0, err
	}
	d.done.Add(func(s *DeadlinesStatus) {
		if all {
			s.Late = 0
		}
		s.Late = max(s.Late, seconds(late))
	})
	return pause, nil
}

// verb is one kind of work on a queue's entries, done in batches when it is due.
type verb struct {
	name    string
	in      *float64 // seconds until the work is due; nil: never
	clock   bool     // it comes by the clock alone
	readies bool     // entries become ready by it
	run     func(*invalidation.Queue, context.Context, int) (int, error)
	total   func(*DeadlinesStatus) *int64
}

// verbsOf returns the work of each kind, with the time until it is due.
func verbsOf(w invalidation.NextWork) []verb {
	return []verb{
		{
			name: "promote", in: w.Due, clock: true, readies: true, run: (*invalidation.Queue).Promote,
			total: func(s *DeadlinesStatus) *int64 { return &s.Promoted },
		},
		{
			name: "expire", in: w.Deadline, clock: true, run: (*invalidation.Queue).Expire,
			total: func(s *DeadlinesStatus) *int64 { return &s.Expired },
		},
		{
			name: "cancel", in: w.Cancel, run: (*invalidation.Queue).SettleCancelRequests,
			total: func(s *DeadlinesStatus) *int64 { return &s.Cancelled },
		},
		{
			name: "fail", in: w.Outage, clock: true, run: (*invalidation.Queue).FailWithoutInstance,
			total: func(s *DeadlinesStatus) *int64 { return &s.Failed },
		},
	}
}

// serve does the due work of a queue and returns the time until its next work is due.
func (d *Deadlines) serve(ctx context.Context, w invalidation.NextWork) (time.Duration, error) {
	wait := d.cfg.Pause
	for _, v := range verbsOf(w) {
		switch {
		case v.in == nil, v.clock && d.held:
		case *v.in > 0:
			// Times of any year are taken: those centuries ahead would not fit a time.Duration.
			wait = min(wait, seconds(min(*v.in, wait.Seconds()))+time.Millisecond)
		default:
			more, err := d.do(ctx, w.Queue, v)
			if err != nil {
				return 0, err
			}
			if more {
				wait = 0
			}
		}
	}
	return wait, nil
}

// servedBatchesMax is how many batches of one queue are done before the next queue's.
const servedBatchesMax = 5

// do runs a few batches and reports whether there is more. An error that concerns only this queue
// is logged and does not delay others.
func (d *Deadlines) do(ctx context.Context, q *invalidation.Queue, v verb) (more bool, err error) {
	for range servedBatchesMax {
		limit := d.limit(q.ID)
		n, err := d.carryOut(ctx, q, limit, v.clock, v.run)
		if errors.Is(err, duty.ErrClock) {
			d.held = true
			return false, nil
		}
		if err != nil && d.dropped(ctx, q, err) {
			return false, nil
		}
		if err := d.cfg.tolerate(ctx, err, "process due entries", "verb", v.name, "queue", q.Name); err != nil {
			return false, err
		}
		d.learn(q.ID, n, err)
		if err != nil {
			d.done.Add(func(s *DeadlinesStatus) { s.Errors++ })
			return false, nil
		}
		d.done.Add(func(s *DeadlinesStatus) { *v.total(s) += int64(n) })
		if n > 0 && v.readies {
			d.cfg.Hint(q.ID)
		}
		if n < limit {
			return false, nil
		}
	}
	return true, nil
}

// heldAbove is how far ahead the database's clock may be while entries are promoted, expired and failed by it. It is
// above the two hours that package chaos lets the clock jump. A smaller bound would let all entries wait for five
// minutes after each pause of a machine or of a process that lasted so long.
const heldAbove = 3 * time.Hour

// carryOut does a batch of a verb, within the term. One that comes by the clock is preceded by a reading of that, in
// the same transaction: a clock that has jumped ahead would end entries before their time, which cannot be taken back.
func (d *Deadlines) carryOut(ctx context.Context, q *invalidation.Queue, limit int, clock bool,
	verb func(*invalidation.Queue, context.Context, int) (int, error),
) (n int, err error) {
	ctx, end := d.writes.Context(ctx, 0)
	err = d.fence.InTx(ctx, func(tx pgx.Tx) error {
		if clock {
			if err := d.cfg.Clock.CheckTxWithin(ctx, tx, heldAbove); err != nil {
				return err
			}
		}
		n, err = verb(q.WithTx(tx), ctx, limit)
		return err
	})
	end(err)
	return n, err
}

func (d *Deadlines) limit(queue int32) int {
	if n, known := d.batch[queue]; known {
		return n
	}
	return d.cfg.BatchEntriesMax
}

// learn halves a queue's batch size after a failed batch, which may have timed out. It doubles it after a full
// one, and returns to BatchEntriesMax once the double would reach that.
func (d *Deadlines) learn(queue int32, n int, err error) {
	limit := d.limit(queue)
	switch {
	case err != nil:
		d.batch[queue] = max(1, limit/2)
	case limit*2 >= d.cfg.BatchEntriesMax:
		delete(d.batch, queue)
	case n == limit:
		d.batch[queue] = limit * 2
	}
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

func value[T int64 | float64](v *T) T {
	if v == nil {
		return 0
	}
	return *v
}
