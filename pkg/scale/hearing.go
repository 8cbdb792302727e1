package scale

import (
	"context"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"
)

// hearing judges for how long instances could announce themselves. One that was not heard for longer than its time to
// live may run all the same: the database was away, its clock was stepped ahead, or a term has just begun, whose leader
// does not know either.
type hearing struct {
	since    time.Time // by the clock of this process: the database has answered, by a steady clock, ever since
	last     time.Time // when it answered last
	database time.Time // its clock then
}

const (
	// silenceMax is for how long the database may not have answered: instances announce themselves several times
	// within their time to live.
	silenceMax = 10 * time.Second
	// stepMax is how far its clock may be ahead of the time that has passed between two answers, one of which was late.
	stepMax = 5 * time.Second
)

// answered notes an answer of the database with its clock, and returns for how long it has answered without a gap.
func (h *hearing) answered(database, now time.Time) time.Duration {
	passed := now.Sub(h.last)
	if h.last.IsZero() || passed > silenceMax || database.Sub(h.database)-passed > stepMax {
		h.since = now
	}
	h.last, h.database = now, database
	return now.Sub(h.since)
}

const (
	clockSQL  = `SELECT clock_timestamp()`
	expireSQL = `SELECT penstock.expire_instances($1)`
)

// expire drains and removes instances whose time to live ended although they could have announced themselves. The clock
// is read first: after a step of it all of them have ended.
func (a *applier) expire(ctx context.Context) {
	var n int64
	err := a.fence.InTx(ctx, func(tx pgx.Tx) error {
		var clock time.Time
		if err := tx.QueryRow(ctx, clockSQL).Scan(&clock); err != nil {
			return err
		}
		return tx.QueryRow(ctx, expireSQL, a.hearing.answered(clock, time.Now())).Scan(&n)
	})
	a.failing.Note(ctx, a.cfg.Log, slog.LevelWarn, "remove instances whose time to live ended", "expire", err)
	if err != nil {
		return
	}
	a.count(func(st *OrderStatus) { st.Expired += n })
}
