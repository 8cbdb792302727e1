package doctor

import (
	"strings"
	"testing"
	"time"
)

func TestMultixactsCountAsTransactionsDo(t *testing.T) {
	for severity, ages := range map[Severity][2]int64{"": {2e8, 3e8}, Warning: {2e8, 11e8}, Critical: {12e8, 17e8}} {
		if f := judgeAges(ages[0], ages[1]); f.Severity != severity {
			t.Errorf("ages of %v: %+v", ages, f)
		}
	}
	want(t, find(t, newPool(t), "wraparound", Config{}), Fine, "multixacts")
}

// Samples have no default partition: without one of today they are not stored.
func TestAMissingDayOfAnyTableIsAWarning(t *testing.T) {
	pool := newPool(t)
	exec(t, pool, `SELECT penstock.make_partition(parent, 3) FROM penstock.retention, generate_series(0, 3)`)
	want(t, find(t, pool, "partitions", Config{}), Fine)
	today, tomorrow := time.Now().UTC().Format(day), time.Now().UTC().AddDate(0, 0, 1).Format(day)
	for table, without := range map[string]string{
		"sample": today, "sample_minute": today, "model_minute": tomorrow, "scale_decision": tomorrow,
	} {
		exec(t, pool, `DROP TABLE penstock.`+table+`_`+strings.ReplaceAll(without, "-", ""))
		want(t, find(t, pool, "partitions", Config{}), Warning, table+" has 3 partitions", "without "+without)
		exec(t, pool, `SELECT penstock.make_partition(parent, 3) FROM penstock.retention, generate_series(0, 3)`)
	}
}
