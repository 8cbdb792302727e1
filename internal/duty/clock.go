package duty

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
)

// ErrClock says that the database's clock has jumped ahead and is not believed yet: what would be deleted as too old
// may not be.
var ErrClock = errors.New("the database's clock is ahead of the time that has passed, and is not believed yet")

const (
	// jumpMax is how far a clock may be ahead of the time that has passed: more than clocks drift in a day.
	jumpMax = time.Minute
	// believeAfter is for how long a jump ahead has to last. A clock that is set right stays as it is.
	believeAfter = 5 * time.Minute
	// backAfter is for how long a clock has to be set back until later readings are compared with it.
	backAfter = time.Minute
)

// Clock judges readings of the database's clock by the monotonic clock of this process, for duties that delete what is
// old: one wrong reading would delete it before its time. It outlives the terms of a leader. Its zero value is ready to
// use, and begins with the wall clock of this process: the first reading may not be ahead of that either.
type Clock struct {
	mu      sync.Mutex
	base    reading // believed
	jump    reading // the first one of a jump that is not believed yet; zero: there is none
	back    reading // the first one of a clock that seems to be set back; zero: there is none
	started bool
}

// reading is a time of the database's clock and when it was read.
type reading struct {
	database time.Time
	at       time.Time // by the clock of this process, with its monotonic reading
}

// ahead is how far the clock is ahead of the one that r was read from.
func (r reading) ahead(of reading) time.Duration {
	return r.database.Sub(of.database) - r.at.Sub(of.at)
}

// Check returns ErrClock unless a reading that was just made is believed: it is no further ahead than the time that has
// passed since an earlier one, or the clock has been ahead by the same for some minutes. A clock that is set back is
// believed at once, since nothing is deleted too early by it. Later readings are compared with it once it has lasted: a
// reading that comes here late, since this process was stopped, is as far behind, and the next one is right.
func (c *Clock) Check(database time.Time) error { return c.CheckWithin(database, jumpMax) }

// CheckWithin is Check for what may go on while the clock is ahead by no more than so much.
func (c *Clock) CheckWithin(database time.Time, most time.Duration) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := reading{database: database, at: time.Now()}
	if err := c.judge(now); err != nil && now.ahead(c.base) > most {
		return err
	}
	return nil
}

// judge is Check with mu held.
func (c *Clock) judge(now reading) error {
	if !c.started {
		c.started = true
		c.base = reading{database: now.at.Round(0), at: now.at}
		if now.ahead(c.base) < -jumpMax {
			c.base = now // of two clocks that differ the one that deletes less
		}
	}
	switch ahead := now.ahead(c.base); {
	case ahead < -jumpMax:
		c.jump = reading{}
		c.setBack(now)
		return nil
	case ahead <= jumpMax:
		c.jump = reading{}
		if now.at.Sub(c.base.at) >= believeAfter {
			c.base = now // follows the drift between the clocks
		}
	case c.jump.at.IsZero() || now.ahead(c.jump).Abs() > jumpMax:
		c.jump = now
		return ErrClock
	case now.at.Sub(c.jump.at) < believeAfter:
		return ErrClock
	default:
		c.base, c.jump = now, reading{}
	}
	c.back = reading{}
	return nil
}

// CheckTx checks the later one of the time at the beginning of a transaction, which now() was in its statements, and of
// the time after them. A transaction that deletes what is old calls it last, and is not committed where it did so by a
// time that is not believed.
func (c *Clock) CheckTx(ctx context.Context, tx pgx.Tx) error {
	return c.CheckTxWithin(ctx, tx, jumpMax)
}

// CheckTxWithin is CheckTx for what may go on while the clock is ahead by no more than so much.
func (c *Clock) CheckTxWithin(ctx context.Context, tx pgx.Tx, most time.Duration) error {
	var latest time.Time
	if err := tx.QueryRow(ctx, `SELECT greatest(now(), clock_timestamp())`).Scan(&latest); err != nil {
		return fmt.Errorf("read the clock: %w", err)
	}
	return c.CheckWithin(latest, most)
}

// setBack takes note of a reading that is behind the time that has passed.
func (c *Clock) setBack(now reading) {
	switch {
	case c.back.at.IsZero() || now.ahead(c.back).Abs() > jumpMax:
		c.back = now
	case now.at.Sub(c.back.at) >= backAfter:
		c.base, c.back = now, reading{}
	}
}
