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

// Deadlines reads when the next work of each queue is due, of many queues in one round trip. The answer may be late for
// three reasons: the database is slow, or has many queues to read; one queue is slow, behind a lock on its table for
// example; the connection is frozen, and no answer comes at all. So the list is cut into parts of Config.QueuesAtOnce
// queues, and each part is read in as many readings as its limit asks for:
//
//	a reading that is              is followed by
//	in time                        the work that it found. The limit of the part follows the time that the reading
//	                               took, and the bound on the wait that of the first reading of each round
//	late, and the first of a pass  the failure of the pass, as on a frozen connection
//	late, and not the first        the end of the pass; the next one begins with the next part
//
// After a late one all parts are read in smaller readings. Its queues are the next ones of their part again, unless it
// was one queue: the others do not wait for that.

// part is some queues that follow one another in the list. Quick answers say nothing of the part of a slow queue.
type part struct {
	queues []*invalidation.Queue
	wait   duty.Wait
	limit  duty.Limit // queues of one reading
	next   int        // the queue at which the next reading begins
}

const (
	readQueues = 100         // of the first reading of a part
	readAim    = time.Second // for one reading
)

// Names of steps in the log.
const (
	readDue = "read due entries"
	readAll = "read the due entries of all queues in time" // if not, the next pass goes on
)

// list reads the queues. If the answer comes too late, those known before are served.
func (d *Deadlines) list(ctx context.Context) error {
	queues, err := d.readList(ctx)
	switch {
	case err == nil:
		d.queues = queues
	case len(d.queues) > 0 && duty.Late(err) && ctx.Err() == nil:
	default:
		return err
	}
	d.cfg.failing.Note(ctx, d.cfg.Log, slog.LevelWarn, "read the queues in time", "queues", err)
	return nil
}

func (d *Deadlines) readList(ctx context.Context) (queues []*invalidation.Queue, err error) {
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

// readParts reads the queues part by part, and calls serve with the work of each. It reports whether it has read all of
// them. That an answer comes too late is an error only where no queue was read: that there are many ends no term.
func (d *Deadlines) readParts(
	ctx context.Context, queues []*invalidation.Queue, serve func(invalidation.NextWork) error,
) (all bool, err error) {
	read := 0
	parts := d.partsOf(queues)
	for range parts {
		at := d.next % len(parts)
		p := parts[at]
		d.next = at + 1
		for left := len(p.queues); left > 0; {
			works, n, err := d.readNext(ctx, p, left)
			if err != nil && read > 0 && duty.Late(err) && ctx.Err() == nil {
				d.cfg.failing.Note(ctx, d.cfg.Log, slog.LevelWarn, readAll, readAll, err)
				return false, nil
			}
			if err != nil {
				return false, err
			}
			read, left = read+n, left-n
			for _, w := range works {
				if err := serve(w); err != nil {
					return false, err
				}
			}
		}
	}
	d.cfg.failing.Note(ctx, d.cfg.Log, slog.LevelWarn, readAll, readAll, nil)
	return true, nil
}

// partsOf cuts the list into parts. Each goes on as the part did that was in its place before.
func (d *Deadlines) partsOf(queues []*invalidation.Queue) []*part {
	n := 0
	for chunk := range slices.Chunk(queues, d.cfg.QueuesAtOnce) {
		if n == len(d.parts) {
			d.parts = append(d.parts, &part{wait: duty.Wait{First: d.reads.First}, limit: d.readLimit(readQueues)})
		}
		d.parts[n].queues = chunk
		n++
	}
	return d.parts[:n]
}

// errLater stands for an answer that says nothing of the bound on the next one.
var errLater = errors.New("not the first answer of a round")

// readNext reads what is due in the next queues of a part, of which so many are left, and returns how many it has
// visited.
func (d *Deadlines) readNext(ctx context.Context, p *part, left int) (
	works []invalidation.NextWork, visited int, err error,
) {
	p.next %= len(p.queues)
	from, to := p.next, min(p.next+min(p.limit.Rows(), left), len(p.queues))
	start := time.Now()
	reading, end := p.wait.Context(ctx, 0)
	works, err = d.peek(reading, p.queues[from:to])
	took := time.Since(start)
	if err == nil && from > 0 {
		end(errLater) // the bound follows the first answer of each round: a slow queue is among the later ones too
	} else {
		end(err)
	}
	visited = to - from
	switch {
	case err == nil:
		p.limit.Done(took, nil)
	case duty.Late(err):
		d.readFewer(visited)
	}
	if err == nil || visited == 1 {
		p.next = to
	}
	return works, visited, err
}

// readFewer lowers the limits after a reading of so many queues that came too late. In large steps: before the loop
// gives up, a database that is slow, or one queue that is, is told from a connection that is frozen. A slow database is
// so for the other parts.
func (d *Deadlines) readFewer(queues int) {
	few := max(1, queues/20)
	for _, p := range d.parts {
		if few < p.limit.Rows() {
			p.limit = d.readLimit(few)
		}
	}
}

// readLimit bounds the queues of a reading, so many at first.
func (d *Deadlines) readLimit(first int) duty.Limit {
	return duty.Limit{First: min(first, d.cfg.QueuesAtOnce), Max: d.cfg.QueuesAtOnce, Aim: readAim}
}

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
		if err != nil && d.dropped(ctx, q, err) {
			continue
		}
		if err := d.cfg.tolerate(ctx, err, readDue, "queue", q.Name); err != nil {
			return nil, err
		}
		if err != nil {
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
