package cron

import (
	"bytes"
	"fmt"
	"log/slog"
	"strconv"
	"strings"
	"testing"
	"time"
)

// otherRules lets the entries of jobs of these names wait for a time that is off by some, as rules of the zone of before
// would have.
func (b *bed) otherRules(names string, off time.Duration) {
	b.Helper()
	b.exec(`UPDATE penstock.entry SET due_at = due_at + $2 WHERE name LIKE $1`, names, off)
	b.exec(`UPDATE penstock.cron_job SET due_at = due_at + $2, nominal_at = nominal_at + $2 WHERE name LIKE $1`, names, off)
	b.engine = b.newEngine(open{b.pool}) // another term, whose program knows the rules of now
}

func TestATermFiresByTheRulesOfZonesThatItKnows(t *testing.T) {
	nine := time.Date(2026, 6, 2, 7, 0, 0, 0, time.UTC) // in Berlin
	for _, off := range []time.Duration{time.Hour, -time.Hour} {
		b := newBed(t)
		b.job(Job{Name: "close", Schedule: Schedule{Spec: "0 9 * * *", Zone: "Europe/Berlin", CatchUp: CatchUpNone}})
		b.at(noon)
		b.otherRules("close", off)
		b.at(noon.Add(time.Minute))
		b.at(nine.Add(-time.Hour))
		b.fired("close")
		b.at(nine)
		b.fired("close", nine)
		b.at(nine.Add(time.Hour))
		b.fired("close", nine)
	}
}

// The time has come by the rules of now, though the entry waits for a later one.
func TestATimeThatHasComeByTheRulesOfNowIsFired(t *testing.T) {
	b := newBed(t)
	b.job(Job{Name: "close", Schedule: Schedule{Spec: "1 14 * * *", Zone: "Europe/Berlin", CatchUp: CatchUpNone}})
	b.at(noon)
	b.otherRules("close", time.Hour)
	b.at(noon.Add(90 * time.Second))
	b.at(b.now)
	b.fired("close", noon.Add(time.Minute))
}

// Whatever the policies, an entry waits where the judgement of another term has it wait: a new leader moves none.
func TestNothingIsMovedByTheSameRules(t *testing.T) {
	b := newBed(t)
	for i, spec := range []string{"@hourly", "*/7 * * * *", "@every 90m", "30 2 29 2 *"} {
		for _, policy := range []CatchUp{CatchUpNone, CatchUpLast, CatchUpAll} {
			for _, jitter := range []time.Duration{0, 20 * time.Minute, 3 * time.Hour} {
				b.job(Job{Name: fmt.Sprint(i, policy, jitter), Schedule: Schedule{
					Spec: spec, Zone: "America/New_York", Jitter: jitter, CatchUp: policy,
				}})
			}
		}
	}
	for _, away := range []time.Duration{0, 5 * time.Minute, 17 * time.Minute, 3 * time.Hour, 50 * time.Hour} {
		b.at(b.now.Add(away))
		b.at(b.now)
		fence := &counted{open: open{b.pool}}
		if err := b.newEngine(fence).judgeAgain(b.ctx); err != nil || fence.n > 0 {
			t.Errorf("after %v at %s: entries were moved (%v)", away, b.now, err)
		}
		b.work()
	}
}

const inPlaceSQL = `SELECT count(*) FROM penstock.cron_job WHERE due_at = $1`

// A job that another session kept in the first round of a term stayed at its wrong time until the next leader.
func TestAJobThatIsLockedWhenItIsJudgedIsMovedLaterInTheTerm(t *testing.T) {
	for _, locked := range []string{`SELECT FROM penstock.cron_job`, `SELECT FROM penstock.entry`} {
		b := newBed(t)
		for _, name := range []string{"free", "kept"} {
			b.job(Job{Name: name, Schedule: Schedule{Spec: "@hourly"}})
		}
		b.at(noon)
		b.otherRules("%", time.Hour)
		tx := b.begin()
		if _, err := tx.Exec(b.ctx, locked+` WHERE name = 'kept' FOR UPDATE`); err != nil {
			t.Fatal(err)
		}
		for range 5 { // rounds end meanwhile
			b.at(noon.Add(time.Minute))
		}
		if n := b.count(inPlaceSQL, noon.Add(time.Hour)); n != 1 {
			t.Errorf("%s: %d jobs were moved beside one that is kept, want 1", locked, n)
		}
		if err := tx.Rollback(b.ctx); err != nil {
			t.Fatal(err)
		}
		for range 5 {
			b.at(noon.Add(time.Minute))
		}
		if n := b.count(inPlaceSQL, noon.Add(time.Hour)); n != 2 {
			t.Errorf("%s: %d jobs wait for their time once none is kept, want 2", locked, n)
		}
	}
}

// Where the jobs of a zone cannot be moved in time, fewer are moved at once; and whatever becomes of them, jobs without
// an entry get one. That transaction ended the pass before it, in each term anew.
func TestJobsThatCannotBeMovedInTimeKeepNoOtherJob(t *testing.T) {
	for _, most := range []int{7, 1, 0} {
		t.Run(strconv.Itoa(most), func(t *testing.T) {
			b := newBed(t)
			b.exec(`INSERT INTO penstock.cron_job (queue_id, name, spec, handled_at)
			        SELECT $1, 'moves ' || i, '@hourly', $2 FROM generate_series(1, 20) i`, b.q.ID, noon)
			b.at(noon)
			b.otherRules("moves%", time.Hour)
			b.job(Job{Name: "new", Schedule: Schedule{Spec: "@daily"}})
			b.exec(fmt.Sprintf(`
			    CREATE FUNCTION slow() RETURNS trigger LANGUAGE plpgsql AS $$
			    BEGIN
			        IF (SELECT count(*) FROM moved WHERE name LIKE 'moves%%') > %d THEN
			            RAISE EXCEPTION 'canceling statement due to statement timeout' USING ERRCODE = 'query_canceled';
			        END IF;
			        RETURN NULL;
			    END $$;
			    CREATE TRIGGER slow AFTER UPDATE ON penstock.cron_job REFERENCING NEW TABLE AS moved
			        FOR EACH STATEMENT EXECUTE FUNCTION slow()`, most))
			var log bytes.Buffer
			b.engine.cfg.Log = slog.New(slog.NewTextHandler(&log, nil))
			b.at(noon.Add(time.Minute))
			if s := b.state("new"); s != "waiting" {
				t.Errorf("the job that had no entry is %s", s)
			}
			for range 60 {
				b.at(noon.Add(time.Minute))
			}
			want := 20
			if most == 0 {
				want = 0
			}
			if n := b.count(inPlaceSQL, noon.Add(time.Hour)); n != want {
				t.Errorf("%d jobs were moved, want %d", n, want)
			}
			for i := range 20 {
				line := fmt.Sprintf("job=%d ", i+1)
				if n := strings.Count(log.String(), line); n > 1 || most == 0 && n == 0 {
					t.Errorf("the log has %d lines with %q", n, line)
				}
			}
		})
	}
}
