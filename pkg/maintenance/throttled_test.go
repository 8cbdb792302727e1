package maintenance_test

import (
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/maintenance"
)

// A key is throttled until a time that is computed from the rate and the clock of that moment.
func TestThrottledKeyIsReadyInTimeAfterItsRateOrTheClockHasChanged(t *testing.T) {
	for name, change := range map[string]string{
		"rate raised":       `SELECT penstock.set_limit('keys', '{"rate": 10, "burst": 1}')`,
		"limit not used":    `SELECT penstock.use_limit('work', 'keys', 0)`,
		"limit removed":     `DELETE FROM penstock."limit"`,
		"clock is set back": `UPDATE penstock.ready SET pos = pos + 7200::bigint * 1000000 WHERE lock_key = 'K'`,
	} {
		t.Run(name, func(t *testing.T) {
			f := newUsualFleet(t)
			f.exec(`SELECT penstock.set_limit('keys', '{"rate": 0.001, "burst": 1, "per_key": true}')`)
			f.exec(`SELECT penstock.use_limit('work', 'keys')`)
			f.push(1, "K")
			f.exec(`SELECT penstock.throttle_key($1, 'K', 1000)`, f.q.ID)
			f.exec(`DELETE FROM penstock.ready WHERE priority >= 0`)
			duty := maintenance.NewDeadlines(f.pool, &term{db: f.pool}, maintenance.Config{Pause: 10 * time.Millisecond})
			run(t, duty)
			f.exec(change)
			eventually(t, "the key is ready", func() bool {
				return f.count(`SELECT count(*) FROM penstock.ready WHERE lock_key = 'K' AND priority = 1`) == 1
			})
		})
	}
}

// Keys whose time has come do not keep the others waiting.
func TestThrottledKeysOfAnOldRateAreRequeuedBesideThoseThatAreDue(t *testing.T) {
	f := newUsualFleet(t)
	for _, key := range []string{"A", "B"} {
		f.push(1, key)
		f.exec(`SELECT penstock.throttle_key($1, $2, CASE $2 WHEN 'A' THEN 0 ELSE 1000 END)`, f.q.ID, key)
	}
	if n := f.count(`SELECT penstock.requeue_throttled($1, 10)`, f.q.ID); n != 2 {
		t.Errorf("%d keys were requeued, want both", n)
	}
}
