package maintenance

import (
	"context"
	"log/slog"
	"time"

	"github.com/penstock/penstock/internal/duty"
	"github.com/penstock/penstock/pkg/invalidation"
)

// misdatedWalk is how far the look for misdated entries has come.
type misdatedWalk struct {
	at    time.Time // of the last part
	queue int       // by its place in the list
	place invalidation.DuePlace
}

const (
	misdatedPause = 10 * time.Second      // between two parts
	misdatedTime  = 50 * time.Millisecond // in which statements of a part begin
	misdatedRows  = 2000                  // that a statement reads
)

// redate looks through a part of the entries that are not due yet for those that were retried while the database's
// clock was ahead, and makes them due when they were to be. They would wait until that time has come again, which is a
// year where the clock was a year ahead.
func (d *Deadlines) redate(ctx context.Context) error {
	start := time.Now()
	if start.Sub(d.misdated.at) < misdatedPause {
		return nil
	}
	d.misdated.at = start
	for range d.queues {
		if time.Since(start) > misdatedTime {
			return nil
		}
		if err := d.redateNext(ctx, d.queues[d.misdated.queue%len(d.queues)]); err != nil {
			return err
		}
	}
	return nil
}

// redateNext does the next part of a queue.
func (d *Deadlines) redateNext(ctx context.Context, q *invalidation.Queue) error {
	reading, cancel := context.WithTimeout(ctx, duty.AnswerMax) // its speed says nothing of readings of due entries
	defer cancel()
	ids, next, err := q.Misdated(reading, d.misdated.place, misdatedRows)
	if d.misdated.place = next; next == (invalidation.DuePlace{}) {
		d.misdated.queue++
	}
	n := 0
	if err == nil && len(ids) > 0 {
		n, err = d.carryOut(ctx, q, 0, false, func(q *invalidation.Queue, ctx context.Context, _ int) (int, error) {
			return q.Redate(ctx, ids)
		})
	}
	if n > 0 && err == nil {
		d.cfg.Log.WarnContext(ctx, "entries were retried while the database's clock was ahead; they come due in time",
			"queue", q.Name, "entries", n)
	}
	if err != nil && d.dropped(ctx, q, err) {
		return nil
	}
	if late := duty.Late(err) && ctx.Err() == nil; late || err == nil {
		d.cfg.failing.Note(ctx, d.cfg.Log, slog.LevelWarn, findInTime, findInTime+q.Name, err, "queue", q.Name)
		if late {
			return nil
		}
	}
	return d.cfg.tolerate(ctx, err, findMisdated, "queue", q.Name)
}

// Names of steps in the log.
const (
	findMisdated = "find entries that were retried while the clock was ahead"
	findInTime   = findMisdated + ", in time" // if not, the next round tries the queue again
)
