package postgres

import (
	"context"
	"fmt"
	"sync/atomic"
	"time"
)

// Clock follows the database's clock, from one reading to the next by the monotonic clock of this process. Without a
// reading it is the wall clock of this process. Its zero value is ready to use, by several goroutines at once.
type Clock struct{ last atomic.Pointer[clockReading] }

// clockReading is a time of the database's clock and when it came here.
type clockReading struct{ database, came time.Time }

// Read reads the database's clock.
func (c *Clock) Read(ctx context.Context, db DB) error {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	var now time.Time
	if err := db.QueryRow(ctx, `SELECT clock_timestamp()`).Scan(&now); err != nil {
		return fmt.Errorf("read the database's clock: %w", err)
	}
	c.Set(now)
	return nil
}

// Set takes note of a reading that has just come.
func (c *Clock) Set(database time.Time) { c.last.Store(&clockReading{database, time.Now()}) }

// Now is the time by the database's clock, behind it by as long as the last reading was on its way.
func (c *Clock) Now() time.Time {
	r := c.last.Load()
	if r == nil {
		return time.Now()
	}
	return r.database.Add(time.Since(r.came))
}
