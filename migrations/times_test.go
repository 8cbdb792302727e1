package migrations_test

import (
	"testing"
	"time"

	"github.com/penstock/penstock/internal/pgtest"
)

// A transaction that pushes may have begun long before: an entry that counted its deadlines from then was expired at once.
func TestDeadlinesOfAQueueCountFromThePush(t *testing.T) {
	c := connect(t, pgtest.DSN(t))
	exec(t, c, `SELECT penstock.create_queue('mail', '{"start_within": "1 hour", "finish_within": "2 hours"}')`)
	exec(t, c, `BEGIN`)
	exec(t, c, `SELECT pg_sleep(0.01)`)
	began := query[time.Time](t, c, `SELECT clock_timestamp()`)
	exec(t, c, `SELECT penstock.push('mail', '{}')`)
	if !query[bool](t, c, `SELECT start_by >= $1::timestamptz + interval '1 hour' AND finish_by >= $1::timestamptz + interval '2 hours'
	                         FROM penstock.entry`, began) {
		t.Error("the deadlines are those of the beginning of the transaction")
	}
	exec(t, c, `COMMIT`)
}
