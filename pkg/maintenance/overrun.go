package maintenance

import (
	"context"
	"log/slog"
	"time"

	"github.com/penstock/penstock/internal/duty"
	"github.com/penstock/penstock/pkg/invalidation"
)

// overrunReport is what is known of entries that run after their deadline.
type overrunReport struct {
	at     time.Time                   // of the last check
	logged map[invalidation.Token]bool // the locks that it found
}

const (
	overrunGrace = 30 * time.Second // for a node to end a run after its deadline
	overrunPause = 5 * time.Second  // between two checks
)

const findOverrun = "find entries that run after their deadline in time" // the name of the step in the log

// reportOverrun logs entries that still run although their deadline is long past: their handler
// ignores its context. Their lock is not freed, since the next entries of the key would then run
// beside them.
func (d *Deadlines) reportOverrun(ctx context.Context) error {
	if time.Since(d.overrun.at) < overrunPause {
		return nil
	}
	reading, cancel := context.WithTimeout(ctx, duty.AnswerMax) // its speed says nothing of readings of due entries
	defer cancel()
	locks, err := invalidation.ExpiredLocks(reading, d.db, overrunGrace)
	late := duty.Late(err) && ctx.Err() == nil // there may be many locks; a report ends no term
	if err != nil && !late {
		return err
	}
	d.overrun.at = time.Now()
	d.cfg.failing.Note(ctx, d.cfg.Log, slog.LevelWarn, findOverrun, findOverrun, err)
	if late {
		return nil
	}
	before := d.overrun.logged
	d.overrun.logged = make(map[invalidation.Token]bool, len(locks))
	for _, l := range locks {
		d.overrun.logged[l.Token] = true
		if !before[l.Token] {
			d.cfg.Log.ErrorContext(ctx, "entry still runs after its deadline: its handler ignores its context",
				"queue_id", l.QueueID,
				"entry", l.Entry, "lock_key", l.Key, "node", l.Node, "token", l.Token, "finish_by", l.FinishBy)
		}
	}
	d.done.Add(func(s *DeadlinesStatus) { s.Overrun = len(locks) })
	return nil
}
