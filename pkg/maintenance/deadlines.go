package maintenance

import (
	"context"
	"errors"
	"log/slog"
	"slices"
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
	queues        []*invalidation.Queue // the newest list
	parts         []part                // of the list, by place

	overrun   map[invalidation.Token]bool // reported
	overrunAt time.Time                   // last check

	batch map[int32]int // entries in one transaction, for queues where cfg.BatchEntriesMax would time out
	from  int           // the place in parts at which the next pass begins

	misdated misdatedWalk

	held bool // since the last pass: what comes by the clock waits until that is believed

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

// part is how QueuesAtOnce queues of the list are read. Quick answers say nothing of the part of a slow queue.
type part struct {
	wait  duty.Wait
	limit duty.Limit // queues of one reading
	from  int        // the queue, by its place in the part, at which the next reading begins
}

const (
	readQueues = 100         // of the first reading of a part
	readAim    = time.Second // for one reading
)

// pass serves the queues that have something to promote or to expire, and asks to be called again when the next
// entry comes due, at once if there is more. Entries pushed meanwhile are seen after cfg.Pause.
func (d *Deadlines) pass(ctx context.Context) (time.Duration, error) {
	queues, err := d.list(ctx)
	switch {
	case err == nil:
		d.queues = queues
	case len(d.queues) > 0 && duty.Late(err) && ctx.Err() == nil: // those known before are served
	default:
		return 0, err
	}
	d.cfg.failing.Note(ctx, d.cfg.Log, slog.LevelWarn, "read the queues in time", "queues", err)
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

// visit serves the queues in parts. An answer that comes too late ends it: the next one begins with another part, and
// reads fewer queues at once. That is an error only where no queue was read, as on a connection that is frozen: that
// there are many queues ends no term.
func (d *Deadlines) visit(ctx context.Context, queues []*invalidation.Queue) (time.Duration, error) {
	pause, late, read := d.cfg.Pause, 0.0, 0
	places := slices.Collect(slices.Chunk(queues, d.cfg.QueuesAtOnce))
	for len(d.parts) < len(places) {
		d.parts = append(d.parts, part{wait: duty.Wait{First: d.reads.First}, limit: d.readLimit(readQueues)})
	}
	for range places {
		place := d.from % len(places)
		d.from = place + 1
		for left := len(places[place]); left > 0; {
			works, visited, err := d.readNext(ctx, &d.parts[place], places[place], left)
			if err != nil && (read == 0 || !duty.Late(err) || ctx.Err() != nil) {
				return 0, err
			} else if err != nil {
				d.cfg.failing.Note(ctx, d.cfg.Log, slog.LevelWarn, readAll, readAll, err)
				d.done.Add(func(s *DeadlinesStatus) { s.Late = max(s.Late, seconds(-late)) })
				return pause, nil
			}
			read, left = read+visited, left-visited
			for _, w := range works {
				// Deadlines stay with entries that run: one that has passed is no backlog.
				late = min(late, value(w.Due))
				next, err := d.serve(ctx, w)
				if err != nil {
					return 0, err
				}
				pause = min(pause, next)
			}
		}
	}
	d.done.Add(func(s *DeadlinesStatus) { s.Late = seconds(-late) })
	return pause, nil
}

// list reads the queues.
func (d *Deadlines) list(ctx context.Context) (queues []*invalidation.Queue, err error) {
	ctx, end := d.reads.Context(ctx, 0)
	defer func() { end(err) }()
	queues, err = invalidation.ListSettings(ctx, d.db)
	if err != nil {
		return nil, err
	}
	if slices.ContainsFunc(queues, func(q *invalidation.Queue) bool {
		return q.Config.OnNoInstance == invalidation.OnNoInstanceFail
	}) {
		err := d.fence.InTx(ctx, func(tx pgx.Tx) error { return invalidation.NoteOutages(ctx, tx) })
		if err != nil {
			return nil, err
		}
	}
	return queues, nil
}

// errLater stands for an answer that says nothing of the bound on the next one.
var errLater = errors.New("not the first answer of a round")

// readNext reads what is due in the next queues of a part, of which so many are left, and returns how many it has
// visited. Those of a late answer are read anew, fewer at once, unless it is one queue: the others of the part do not
// wait for that.
func (d *Deadlines) readNext(
	ctx context.Context, p *part, queues []*invalidation.Queue, left int,
) (works []invalidation.NextWork, visited int, err error) {
	p.from %= len(queues)
	to := min(p.from+min(p.limit.Rows(), left), len(queues))
	visited = to - p.from
	start := time.Now()
	reading, end := p.wait.Context(ctx, 0)
	works, err = d.peek(reading, queues[p.from:to])
	took := time.Since(start)
	judged := err
	if err == nil && p.from > 0 {
		judged = errLater // the bound follows the first answer of each round: a slow queue is among the later ones too
	}
	end(judged)
	switch {
	case err == nil:
		p.limit.Done(took, nil)
	case duty.Late(err):
		// In large steps: before the loop gives up, a database that is slow, or one queue that is, is told from a
		// connection that is frozen. A slow database is so for the other parts.
		for i := range d.parts {
			if few := max(1, visited/20); few < d.parts[i].limit.Rows() {
				d.parts[i].limit = d.readLimit(few)
			}
		}
	}
	if err == nil || visited == 1 {
		p.from = to
	}
	return works, visited, err
}

// readLimit bounds the queues of a reading, so many at first.
func (d *Deadlines) readLimit(first int) duty.Limit {
	return duty.Limit{First: min(first, d.cfg.QueuesAtOnce), Max: d.cfg.QueuesAtOnce, Aim: readAim}
}

// Names of steps in the log.
const (
	readDue     = "read due entries"
	readAll     = "read the due entries of all queues in time" // if not, the next pass goes on
	findOverrun = "find entries that run after their deadline in time"
)

// peek reads queues in one round trip, and if that fails one by one: a queue that cannot be
// read is reported and does not delay others.
func (d *Deadlines) peek(ctx context.Context, queues []*invalidation.Queue) ([]invalidation.NextWork, error) {
	works, err := invalidation.ReadNextWork(ctx, d.db, queues)
	if err == nil {
		for _, q := range queues {
			_ = d.cfg.tolerate(ctx, nil, readDue, "queue", q.Name)
		}
	}
	if err == nil || postgres.Unavailable(err) || ctx.Err() != nil {
		return works, err
	}
	works = nil
	for i, q := range queues {
		one, err := invalidation.ReadNextWork(ctx, d.db, queues[i:i+1])
		dropped := err != nil && d.dropped(ctx, q, err)
		if !dropped {
			if err := d.cfg.tolerate(ctx, err, readDue, "queue", q.Name); err != nil {
				return nil, err
			}
		}
		if err != nil && !dropped {
			d.done.Add(func(s *DeadlinesStatus) { s.Errors++ })
		}
		works = append(works, one...)
	}
	return works, nil
}

const queueExistsSQL = `SELECT EXISTS (SELECT FROM penstock.queue WHERE id = $1)`

// dropped reports whether the table of a queue is missing because the queue was dropped after the pass had read it.
func (d *Deadlines) dropped(ctx context.Context, q *invalidation.Queue, err error) bool {
	if postgres.Code(err) != postgres.UndefinedTable {
		return false
	}
	ctx, cancel := context.WithTimeout(ctx, duty.AnswerMax)
	defer cancel()
	exists := true
	err = d.db.QueryRow(ctx, queueExistsSQL, q.ID).Scan(&exists)
	return err == nil && !exists
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
		dropped := err != nil && d.dropped(ctx, q, err)
		if !dropped {
			if err := d.cfg.tolerate(ctx, err, "process due entries", "verb", v.name, "queue", q.Name); err != nil {
				return false, err
			}
		}
		if err != nil && !dropped {
			d.done.Add(func(s *DeadlinesStatus) { s.Errors++ })
		}
		d.learn(q.ID, n, err)
		if err != nil {
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

const (
	overrunGrace = 30 * time.Second // for a node to end a run after its deadline
	overrunPause = 5 * time.Second  // between two checks
)

// reportOverrun logs entries that still run although their deadline is long past: their handler
// ignores its context. Their lock is not freed, since the next entries of the key would then run
// beside them.
func (d *Deadlines) reportOverrun(ctx context.Context) error {
	if time.Since(d.overrunAt) < overrunPause {
		return nil
	}
	reading, cancel := context.WithTimeout(ctx, duty.AnswerMax) // its speed says nothing of readings of due entries
	defer cancel()
	locks, err := invalidation.ExpiredLocks(reading, d.db, overrunGrace)
	switch {
	case err == nil:
		d.cfg.failing.Note(ctx, d.cfg.Log, slog.LevelWarn, findOverrun, findOverrun, nil)
	case duty.Late(err) && ctx.Err() == nil: // there may be many locks; a report ends no term
		d.cfg.failing.Note(ctx, d.cfg.Log, slog.LevelWarn, findOverrun, findOverrun, err)
		d.overrunAt = time.Now()
		return nil
	default:
		return err
	}
	d.overrunAt = time.Now()
	before := d.overrun
	d.overrun = map[invalidation.Token]bool{}
	for _, l := range locks {
		d.overrun[l.Token] = true
		if !before[l.Token] {
			d.cfg.Log.ErrorContext(ctx, "entry still runs after its deadline: its handler ignores its context",
				"queue_id", l.QueueID,
				"entry", l.Entry, "lock_key", l.Key, "node", l.Node, "token", l.Token, "finish_by", l.FinishBy)
		}
	}
	d.done.Add(func(s *DeadlinesStatus) { s.Overrun = len(locks) })
	return nil
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

func value[T int64 | float64](v *T) T {
	if v == nil {
		return 0
	}
	return *v
}
