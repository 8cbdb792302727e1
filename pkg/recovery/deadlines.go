package recovery

import (
	"context"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/duty"
	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// Deadlines is the duty that promotes entries when they are due, expires those that are late, and ends those that
// were asked to end while they ran and came back into line.
type Deadlines struct {
	cfg   Config
	db    postgres.DB
	fence Fence

	overrun   map[invalidation.Token]bool // reported
	overrunAt time.Time                   // last look

	batch map[int32]int // entries in one transaction, where fewer than cfg.BatchEntriesMax are as many as go in time

	done duty.Tally[DeadlinesStatus]
}

// DeadlinesStatus is what the duty has done in this term.
type DeadlinesStatus struct {
	Promoted int64         // entries
	Expired  int64         // entries
	Ended    int64         // entries, as somebody had wished
	Late     time.Duration // how far the work of the last pass was behind its time, at most
	Errors   int64         // batches that went wrong; each one was logged
	Overrun  int           // entries that run on long after their finish_by, because their node does not end them
}

// NewDeadlines returns the duty for one term. It reads through db and writes through fence.
func NewDeadlines(db postgres.DB, fence Fence, cfg Config) *Deadlines {
	return &Deadlines{cfg: cfg.withDefaults(), db: db, fence: fence, batch: map[int32]int{}}
}

// Run keeps due times and deadlines until ctx ends.
func (d *Deadlines) Run(ctx context.Context) error { return loop(ctx, d.cfg, "deadlines", d.pass) }

// Status is safe to call at any time.
func (d *Deadlines) Status() DeadlinesStatus { return d.done.Read() }

// horizon is when a queue next needs attention, relative to the look in seconds; negative: so long ago, nil: never.
type horizon struct {
	queue                 *invalidation.Queue
	due, deadline, cancel *float64
}

// pass serves the queues that have something to promote or to expire, and asks to be called again when the next
// entry comes due, at once if there is more. Entries pushed meanwhile are seen after cfg.Pause.
func (d *Deadlines) pass(ctx context.Context) (time.Duration, error) {
	queues, err := invalidation.List(ctx, d.db)
	if err != nil {
		return 0, err
	}
	horizons, err := d.peek(ctx, queues)
	if err != nil {
		return 0, err
	}
	pause := d.cfg.Pause
	late := 0.0
	for _, h := range horizons {
		late = min(late, value(h.due), value(h.deadline))
		next, err := d.serve(ctx, h)
		if err != nil {
			return 0, err
		}
		pause = min(pause, next)
	}
	d.done.Add(func(s *DeadlinesStatus) { s.Late = seconds(-late) })
	return pause, d.reportOverrun(ctx)
}

const (
	overrunGrace = 30 * time.Second // for a node to end a run after its deadline
	overrunPause = 5 * time.Second  // between two looks
)

// reportOverrun names entries that still run although their deadline is long past: a handler that does not heed its
// context. Their lock is left alone, since to free it would let the rest of the key run beside them.
func (d *Deadlines) reportOverrun(ctx context.Context) error {
	if time.Since(d.overrunAt) < overrunPause {
		return nil
	}
	locks, err := invalidation.ExpiredLocks(ctx, d.db, overrunGrace)
	if err != nil {
		return err
	}
	d.overrunAt = time.Now()
	before := d.overrun
	d.overrun = map[invalidation.Token]bool{}
	for _, l := range locks {
		d.overrun[l.Token] = true
		if !before[l.Token] {
			d.cfg.Log.ErrorContext(ctx, "entry runs on after its deadline: its node does not end it", "queue_id", l.QueueID,
				"entry", l.Entry, "lock_key", l.Key, "node", l.Node, "token", l.Token, "finish_by", l.FinishBy)
		}
	}
	d.done.Add(func(s *DeadlinesStatus) { s.Overrun = len(locks) })
	return nil
}

func value[T int64 | float64](v *T) T {
	if v == nil {
		return 0
	}
	return *v
}

// peekSQL reads the ends of three partial indexes and of the keys that wait for a token bucket (penstock.throttle_key), and whether anybody wished a cancel. Deadlines and wishes of
// entries that run stay there until their node ends them; such a queue is looked at in each pass, to no harm.
const peekSQL = `
SELECT extract(epoch FROM least((SELECT min(due_at) FROM penstock.entry_X WHERE status = 'initial'),
                                (SELECT to_timestamp(pos / 1e6) FROM penstock.ready WHERE queue_id = $1 AND priority = -2 AND flow = ''
                                  ORDER BY pos LIMIT 1)) - clock_timestamp())::float8,
       extract(epoch FROM least((SELECT min(start_by) FROM penstock.entry_X WHERE start_by IS NOT NULL),
                                (SELECT min(finish_by) FROM penstock.entry_X WHERE finish_by IS NOT NULL)) - clock_timestamp())::float8,
       (SELECT 0 FROM penstock.cancel_request WHERE queue_id = $1 LIMIT 1)::float8`

// peek asks for all queues in one round trip, and if that fails for each alone: a queue that cannot be read is
// reported and does not hold up others.
func (d *Deadlines) peek(ctx context.Context, queues []*invalidation.Queue) ([]horizon, error) {
	horizons, err := d.peekAt(ctx, queues)
	if err == nil || general(err) || ctx.Err() != nil {
		return horizons, err
	}
	horizons = nil
	for i, q := range queues {
		one, err := d.peekAt(ctx, queues[i:i+1])
		if err != nil && (general(err) || ctx.Err() != nil) {
			return nil, err
		}
		if err != nil {
			d.done.Add(func(s *DeadlinesStatus) { s.Errors++ })
			d.cfg.Log.ErrorContext(ctx, "due entries of a queue cannot be read", "queue", q.Name, "error", err)
		}
		horizons = append(horizons, one...)
	}
	return horizons, nil
}

func (d *Deadlines) peekAt(ctx context.Context, queues []*invalidation.Queue) ([]horizon, error) {
	var horizons []horizon
	batch := &pgx.Batch{}
	for _, q := range queues {
		batch.Queue(onTable(peekSQL, q), q.ID).QueryRow(func(row pgx.Row) error {
			h := horizon{queue: q}
			if err := row.Scan(&h.due, &h.deadline, &h.cancel); err != nil {
				return err
			}
			horizons = append(horizons, h)
			return nil
		})
	}
	if err := d.db.SendBatch(ctx, batch).Close(); err != nil {
		return nil, fmt.Errorf("look for due entries: %w", err)
	}
	return horizons, nil
}

// verb is one thing that is done to a queue's entries in batches, at its time.
type verb struct {
	name  string
	in    *float64 // seconds until it is time; nil: never
	run   func(*invalidation.Queue, context.Context, int) (int, error)
	total func(*DeadlinesStatus) *int64
}

func (h horizon) verbs() []verb {
	return []verb{
		{"promote", h.due, (*invalidation.Queue).Promote, func(s *DeadlinesStatus) *int64 { return &s.Promoted }},
		{"expire", h.deadline, (*invalidation.Queue).Expire, func(s *DeadlinesStatus) *int64 { return &s.Expired }},
		{"cancel", h.cancel, (*invalidation.Queue).SettleCancelRequests, func(s *DeadlinesStatus) *int64 { return &s.Ended }},
	}
}

// serve does to a queue what it is time for, and returns how long the queue can wait.
func (d *Deadlines) serve(ctx context.Context, h horizon) (time.Duration, error) {
	wait := d.cfg.Pause
	for _, v := range h.verbs() {
		switch {
		case v.in == nil:
		case *v.in > 0:
			wait = min(wait, seconds(*v.in)+time.Millisecond)
		default:
			more, err := d.do(ctx, h.queue, v)
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

// servedBatchesMax is how many batches of one queue are served before the next queue has its turn.
const servedBatchesMax = 5

// do serves a few batches and says whether there is more. An error that is the queue's own is reported and does not
// hold up others.
func (d *Deadlines) do(ctx context.Context, q *invalidation.Queue, v verb) (more bool, err error) {
	for range servedBatchesMax {
		limit := d.limit(q.ID)
		n, err := d.inTerm(ctx, q, limit, v.run)
		if err != nil && (general(err) || ctx.Err() != nil) {
			return false, err
		}
		d.learn(q.ID, n, err)
		if err != nil {
			d.done.Add(func(s *DeadlinesStatus) { s.Errors++ })
			d.cfg.Log.ErrorContext(ctx, "due entries were left for later", "verb", v.name, "queue", q.Name,
				"batch", limit, "error", err)
			return false, nil
		}
		d.done.Add(func(s *DeadlinesStatus) { *v.total(s) += int64(n) })
		if n > 0 {
			d.cfg.Hint(q.ID)
		}
		if n < limit {
			return false, nil
		}
	}
	return true, nil
}

func (d *Deadlines) inTerm(ctx context.Context, q *invalidation.Queue, limit int,
	verb func(*invalidation.Queue, context.Context, int) (int, error),
) (n int, err error) {
	err = d.fence.InTx(ctx, func(tx pgx.Tx) error {
		n, err = verb(q.On(tx), ctx, limit)
		return err
	})
	return n, err
}

func (d *Deadlines) limit(queue int32) int {
	if n, known := d.batch[queue]; known {
		return n
	}
	return d.cfg.BatchEntriesMax
}

// learn halves a queue's batch when one failed, perhaps for lack of time, and doubles it again with each that did not.
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
