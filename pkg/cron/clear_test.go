package cron

import (
	"testing"
	"time"
)

// Ten thousand jobs a minute leave twice as many firings as one batch removes.
func TestOldFiringsGoAsFastAsTheyCome(t *testing.T) {
	b := newBed(t)
	const old, young = 12_000, 3
	b.exec(`INSERT INTO penstock.cron_firing (job_id, nominal_at, fired_at, entry_id, manual)
		SELECT i, $1, $1, i, false FROM generate_series(1, $2::int) i`, noon.Add(-31*24*time.Hour), old)
	b.exec(`INSERT INTO penstock.cron_firing (job_id, nominal_at, fired_at, entry_id, manual)
		SELECT i, $1, $1, i, false FROM generate_series(1, $2::int) i`, noon.Add(-29*24*time.Hour), young)
	kept := func() int { return b.count(`SELECT count(*) FROM penstock.cron_firing`) }
	for deadline := time.Now().Add(30 * time.Second); kept() > young; b.at(noon) {
		if time.Now().After(deadline) {
			t.Fatalf("%d firings are left, want %d", kept(), young)
		}
	}
	b.at(noon)
	if n := kept(); n != young {
		t.Errorf("%d firings are left, want the %d that may be read", n, young)
	}
}
