package operator_test

import (
	"encoding/json"
	"errors"
	"testing"

	. "github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
)

// beat makes node `here` list these tokens.
func (b *queueBed) beat(tokens ...Token) {
	b.Helper()
	_, err := Renew(b.ctx, b.pool, here, Beat{Tokens: tokens})
	b.must(err)
}

func TestForceUnlockEndsOnlyWhatNoLiveNodeLists(t *testing.T) {
	b := newQueueBed(t, Config{})
	b.push("k", "k")
	held := b.claimOne()
	unlock := operator.Unlock{Queue: "work", LockKey: "k", Token: int64(held.Token), By: ann}
	b.beat(held.Token)
	if err := b.d.ForceUnlock(b.ctx, unlock); !errors.Is(err, ErrState) {
		t.Errorf("a lock that its live node lists: got %v, want ErrState", err)
	}
	b.beat()
	b.must(b.d.ForceUnlock(b.ctx, unlock))
	if err := b.d.ForceUnlock(b.ctx, unlock); !errors.Is(err, ErrNotFound) {
		t.Errorf("a second time: got %v, want ErrNotFound", err)
	}
	if again := b.claimOne(); again.Key != "k" || len(again.Entries) != 2 {
		t.Errorf("the key is not ready again: %+v", again)
	}
	audit, err := b.d.Audits(b.ctx, operator.AuditFilter{Limit: 1})
	if err != nil || len(audit) != 1 || audit[0].Verb != "force_unlock" || audit[0].Reason != ann.Reason {
		t.Errorf("audit has %+v, %v", audit, err)
	}
}

func TestForceUnlockOfAListedLockFencesItsNode(t *testing.T) {
	b := newQueueBed(t, Config{})
	b.push("k")
	held := b.claimOne()
	b.beat(held.Token)
	b.must(b.d.ForceUnlock(b.ctx, operator.Unlock{
		Queue: "work", LockKey: "k", Token: int64(held.Token), EvenListed: true, By: ann,
	}))
	if again := b.claimOne(); again.Token == held.Token {
		t.Errorf("the key is claimed under the old token %d", held.Token)
	}
	if ours := b.settleOn(b.pool, doneAll(held)...); ours != 0 {
		t.Errorf("the fenced node settled %d locks", ours)
	}
}

func TestRunTimesAreThoseOfTheLastResults(t *testing.T) {
	b := newQueueBed(t, Config{})
	b.exec(b.pool, `INSERT INTO penstock.result (entry_id, created_at, queue_id, run_ms, attempt, outcome)
	                SELECT n, now(), $1, CASE WHEN n <= 500 THEN 60000 ELSE (n - 500) * 10 END, 1, 'done' FROM generate_series(1, 1000) n`, b.q.ID)
	got, err := b.d.RunTimes(b.ctx, "work", "no such queue")
	b.must(err)
	if len(got) != 1 || got[0].Runs != 500 || *got[0].P50 < 2.4 || *got[0].P50 > 2.6 || *got[0].P99 > 5 {
		t.Errorf("got %+v", got)
	}
}

func TestCronSchedulesHaveTheirLastFirings(t *testing.T) {
	b := newQueueBed(t, Config{})
	b.must(b.d.CreateQueue(b.ctx, "reports", map[string]any{"kind": "cron"}, ann))
	b.must(b.d.CreateCronJob(b.ctx, "nightly", "reports", "30 2 * * *", map[string]any{"zone": "Europe/Berlin"}, ann))
	b.exec(b.pool, `INSERT INTO penstock.cron_firing (job_id, nominal_at, fired_at, entry_id, manual)
	                SELECT id, now() - n * interval '1 day', now() - n * interval '1 day', n, false
	                  FROM penstock.cron_job, generate_series(1, 9) n`)
	got, err := b.d.CronSchedules(b.ctx, operator.CronFilter{})
	b.must(err)
	if len(got) != 1 || got[0].Name != "nightly" || got[0].Zone != "Europe/Berlin" {
		t.Fatalf("got %+v", got)
	}
	var firings []struct {
		EntryID int64 `json:"entry_id"`
	}
	b.must(json.Unmarshal(got[0].Firings, &firings))
	if len(firings) != 5 || firings[0].EntryID != 1 {
		t.Errorf("got firings %+v", firings)
	}
	if rest, err := b.d.CronSchedules(b.ctx, operator.CronFilter{After: "nightly"}); err != nil || len(rest) != 0 {
		t.Errorf("after the last one: got %+v, %v", rest, err)
	}
}
