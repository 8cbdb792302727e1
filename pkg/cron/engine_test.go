package cron

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock/penstock/internal/duty"
	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// bed is a database with a cron queue and an engine whose clock the test sets.
type bed struct {
	*testing.T
	ctx    context.Context
	pool   *pgxpool.Pool
	q      *invalidation.Queue
	engine *Engine
	now    time.Time
	claims int32
}

// open is a fence that lets everything through.
type open struct{ db postgres.DB }

func (o open) InTx(ctx context.Context, fn func(pgx.Tx) error) error {
	return postgres.InTx(ctx, o.db, fn)
}

var noon = time.Date(2026, 6, 1, 12, 0, 0, 0, time.UTC)

const here invalidation.NodeID = 7001

func newBed(t *testing.T) *bed {
	t.Helper()
	b := &bed{T: t, ctx: t.Context(), now: noon}
	dsn := pgtest.Prepared(t, "reports", func(ctx context.Context, pool *pgxpool.Pool) error {
		_, err := invalidation.Create(ctx, pool, "reports", invalidation.Config{Kind: invalidation.KindCron})
		return err
	})
	var err error
	if b.pool, err = postgres.Open(t.Context(), postgres.Config{DSN: dsn, MaxConns: 8}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(b.pool.Close)
	if b.q, err = invalidation.Open(b.ctx, b.pool, "reports"); err != nil {
		t.Fatal(err)
	}
	b.engine = b.newEngine(open{b.pool})
	return b
}

func (b *bed) newEngine(f duty.Fence) *Engine {
	// Days pass within a second here. An engine that skips checks for ended runs, as after a slow
	// check, would miss them.
	e := New(b.pool, f, Config{Pause: time.Hour})
	e.clock = func(context.Context, postgres.DB) (time.Time, error) { return b.now, nil }
	e.believe = func(time.Time) error { return nil }
	return e
}

// job makes a job as of the test's clock.
func (b *bed) job(j Job) {
	b.Helper()
	j.Queue = "reports"
	if err := Create(b.ctx, b.pool, j, invalidation.By{Actor: "ada", Reason: "test"}); err != nil {
		b.Fatal(err)
	}
	b.exec(`UPDATE penstock.cron_job SET handled_at = $2 WHERE name = $1`, j.Name, b.now)
}

func (b *bed) exec(sql string, args ...any) {
	b.Helper()
	if _, err := b.pool.Exec(b.ctx, sql, args...); err != nil {
		b.Fatal(err)
	}
}

func (b *bed) count(sql string, args ...any) (n int) {
	b.Helper()
	if err := b.pool.QueryRow(b.ctx, sql, args...).Scan(&n); err != nil {
		b.Fatal(err)
	}
	return n
}

// present is the time of the database, by which functions of the schema go. That of this process may be another one.
func (b *bed) present() (now time.Time) {
	b.Helper()
	if err := b.pool.QueryRow(b.ctx, `SELECT clock_timestamp()`).Scan(&now); err != nil {
		b.Fatal(err)
	}
	return now.UTC()
}

// at sets the clock and lets the engine make a pass.
func (b *bed) at(now time.Time) {
	b.Helper()
	b.now = now
	if _, err := b.engine.pass(b.ctx); err != nil {
		b.Fatal(err)
	}
	if n := b.count(`SELECT count(*) FROM (SELECT name FROM penstock.entry GROUP BY name HAVING count(*) > 1) d`); n > 0 {
		b.Errorf("%d jobs have more than one entry", n)
	}
}

// firings lists the nominal times that a job was fired for.
func (b *bed) firings(job string) []time.Time {
	b.Helper()
	rows, err := b.pool.Query(b.ctx, `SELECT f.nominal_at FROM penstock.cron_firing f JOIN penstock.cron_job j ON j.id = f.job_id
	                                   WHERE j.name = $1 AND NOT f.manual ORDER BY f.fired_at, f.nominal_at`, job)
	if err != nil {
		b.Fatal(err)
	}
	times, err := pgx.CollectRows(rows, pgx.RowTo[time.Time])
	if err != nil {
		b.Fatal(err)
	}
	for i := range times {
		times[i] = times[i].UTC()
	}
	return times
}

func (b *bed) fired(job string, want ...time.Time) {
	b.Helper()
	if got := b.firings(job); !slices.EqualFunc(got, want, time.Time.Equal) {
		var row string
		if err := b.pool.QueryRow(b.ctx, `SELECT to_jsonb(s)::text FROM penstock.cron_status s WHERE job = $1`, job).Scan(&row); err != nil {
			row = err.Error()
		}
		b.Errorf("at %s %s has fired for %s, want %s; its row is %s", b.now.Format(time.RFC3339), job, got, want, row)
	}
}

// claim claims entries like a task node.
func (b *bed) claim() []*invalidation.Lock {
	b.Helper()
	b.claims++
	c, err := b.q.Claim(b.ctx, invalidation.ClaimRequest{Node: here, ClaimID: b.claims, Lane: invalidation.Lane{Priority: 1}, Limit: 500})
	if err != nil {
		b.Fatal(err)
	}
	return c.Locks
}

// finish ends runs well, as of the test's clock.
func (b *bed) finish(locks []*invalidation.Lock) {
	b.Helper()
	var endings []invalidation.Ending
	for _, l := range locks {
		e := invalidation.Done(l, l.Entries[0].ID, nil, time.Millisecond)
		e.Last = true
		endings = append(endings, e)
	}
	if _, err := b.q.Settle(b.ctx, here, endings); err != nil {
		b.Fatal(err)
	}
	b.exec(`UPDATE penstock.result SET finished_at = $1 WHERE finished_at > now() - interval '1 hour'`, b.now)
}

// idle wants a pass to write nothing.
func (b *bed) idle() {
	b.Helper()
	fence := &counted{open: open{b.pool}}
	e := b.newEngine(fence)
	if _, err := e.pass(b.ctx); err != nil {
		b.Fatal(err)
	}
	if fence.n > 0 {
		b.Errorf("a pass with nothing to do made %d transactions", fence.n)
	}
}

// work runs everything that is ready, and lets the engine see it.
func (b *bed) work() int {
	b.Helper()
	locks := b.claim()
	if len(locks) > 0 {
		b.finish(locks)
	}
	b.at(b.now)
	return len(locks)
}

func (b *bed) state(job string) (state string) {
	b.Helper()
	if err := b.pool.QueryRow(b.ctx, `SELECT state FROM penstock.cron_status WHERE job = $1`, job).Scan(&state); err != nil {
		b.Fatal(err)
	}
	return state
}

func TestJobHasOneEntryFromWaitingToWaiting(t *testing.T) {
	b := newBed(t)
	b.job(Job{Name: "hourly", Schedule: Schedule{Spec: "@hourly"}, Payload: json.RawMessage(`{"report": 7}`)})
	b.at(noon)
	if n := b.count(`SELECT count(*) FROM penstock.entry WHERE name = 'hourly' AND status = 'initial' AND due_at = $1`, noon.Add(time.Hour)); n == 0 {
		// push_many keeps a due time that is to come; this one is in the past of the database's clock.
		if n := b.count(`SELECT count(*) FROM penstock.entry WHERE name = 'hourly' AND status = 'initial'`); n != 1 {
			t.Fatalf("%d initial entries, want one", n)
		}
	}
	if _, err := b.q.Promote(b.ctx, 10); err != nil {
		t.Fatal(err)
	}
	if locks := b.claim(); len(locks) != 0 {
		t.Fatal("promotion fired a job; only the engine may")
	}
	b.at(noon.Add(time.Hour))
	b.fired("hourly", noon.Add(time.Hour))
	locks := b.claim()
	if len(locks) != 1 {
		t.Fatalf("claimed %d, want the one firing", len(locks))
	}
	var payload struct {
		Report  int
		Nominal time.Time `json:"nominal_at"`
	}
	if err := json.Unmarshal(locks[0].Entries[0].Payload, &payload); err != nil || payload.Report != 7 || !payload.Nominal.Equal(noon.Add(time.Hour)) {
		t.Errorf("payload %s, %v", locks[0].Entries[0].Payload, err)
	}
	b.at(noon.Add(61 * time.Minute))
	if n := b.count(`SELECT count(*) FROM penstock.entry`); n != 1 {
		t.Errorf("%d entries while it runs, want one", n)
	}
	b.finish(locks)
	b.at(noon.Add(62 * time.Minute))
	b.idle()
	if n := b.count(`SELECT count(*) FROM penstock.entry WHERE status = 'initial'`); n != 1 || b.state("hourly") != "waiting" {
		t.Errorf("%d initial entries, job is %s", n, b.state("hourly"))
	}
	if got := b.count(`SELECT count(*) FROM penstock.cron_job WHERE nominal_at = $1`, noon.Add(2*time.Hour)); got != 1 {
		t.Error("the next entry is not for the next nominal time")
	}
}

func TestRetryOfARunIsNotAnotherFiring(t *testing.T) {
	b := newBed(t)
	b.job(Job{Name: "hourly", Schedule: Schedule{Spec: "@hourly"}})
	b.at(noon)
	b.at(noon.Add(time.Hour))
	l := b.claim()[0]
	e := invalidation.Retry(l, l.Entries[0].ID, invalidation.Failure{Error: "no"}, 0, 0)
	e.Last = true
	if _, err := b.q.Settle(b.ctx, here, []invalidation.Ending{e}); err != nil {
		t.Fatal(err)
	}
	b.at(noon.Add(61 * time.Minute))
	if n, err := b.q.Promote(b.ctx, 10); n != 1 || err != nil {
		t.Fatalf("promoted %d, %v: the retry must come back into line", n, err)
	}
	if n := b.work(); n != 1 {
		t.Errorf("ran %d entries, want the retry", n)
	}
	b.fired("hourly", noon.Add(time.Hour))
}

func TestYearAwayUnderEachCatchUpPolicy(t *testing.T) {
	b := newBed(t)
	for _, policy := range []CatchUp{CatchUpNone, CatchUpLast, CatchUpAll} {
		b.job(Job{Name: string(policy), Schedule: Schedule{Spec: "@daily", CatchUp: policy, CatchUpMax: 3}})
	}
	b.at(noon)
	back := noon.AddDate(1, 0, 0)
	for b.at(back); b.work() > 0; {
	}
	day := func(n int) time.Time { return back.Truncate(24*time.Hour).AddDate(0, 0, n) }
	b.fired("none")
	b.fired("last", day(0))
	b.fired("all", day(-2), day(-1), day(0))
	for b.at(day(1)); b.work() > 0; {
	}
	b.fired("none", day(1))
	b.fired("last", day(0), day(1))
}

func TestClockThatJumpsAnHourFiresNothingTwice(t *testing.T) {
	b := newBed(t)
	b.job(Job{Name: "tens", Schedule: Schedule{Spec: "*/10 * * * *", CatchUp: CatchUpAll}})
	for _, minutes := range []int{0, 1, 10, 70, 11, 20, 69, 70, 75, 80} {
		for b.at(noon.Add(time.Duration(minutes) * time.Minute)); b.work() > 0; {
		}
	}
	seen := map[time.Time]bool{}
	for _, nominal := range b.firings("tens") {
		if seen[nominal] {
			t.Errorf("%s fired twice", nominal)
		}
		seen[nominal] = true
	}
	// Nominal times during a run are skipped; under this clock no run takes any time.
	if len(seen) != 8 {
		t.Errorf("%d nominal times fired, want 8 from 12:10 to 13:20", len(seen))
	}
}

// A clock that is a day ahead for a moment fires nothing: each job would be at that day, and silent until it has come.
func TestAClockThatIsFarAheadFiresNothing(t *testing.T) {
	b := newBed(t)
	b.engine.believe = func(now time.Time) error { return b.engine.cfg.Clock.CheckWithin(now, jumpMax) }
	b.job(Job{Name: "tens", Schedule: Schedule{Spec: "*/10 * * * *"}})
	b.at(noon)
	b.at(noon.Add(24 * time.Hour))
	b.fired("tens")
	b.at(noon)
	b.at(noon.Add(10 * time.Minute))
	b.work()
	b.fired("tens", noon.Add(10*time.Minute))
}

// A job that fired by a clock that was ahead is silent until that time has come. The spec that it has, set again, makes it
// count from now on.
func TestAlteringTheSpecEndsTheSilenceAfterAClockThatWasAhead(t *testing.T) {
	b := newBed(t)
	right := b.present().Truncate(time.Hour)
	ahead, next := right.Add(24*time.Hour+30*time.Minute), right.Add(2*time.Hour)
	b.now = right
	b.job(Job{Name: "hourly", Schedule: Schedule{Spec: "@hourly", CatchUp: CatchUpNone}}) // drops what it was late for
	b.job(Job{Name: "tens", Schedule: Schedule{Spec: "*/10 * * * *"}})
	b.at(right)
	b.at(ahead)
	b.work()
	b.at(next)
	b.fired("hourly")
	b.fired("tens", ahead)
	b.exec(`UPDATE penstock.cron_job SET handled_at = clock_timestamp() WHERE name = 'hourly'`) // which fired nothing
	b.exec(`SELECT penstock.alter_cron_job(name, jsonb_build_object('spec', spec)) FROM penstock.cron_job`)
	if n := b.count(`SELECT count(*) FROM penstock.cron_job
		WHERE greatest(handled_at, ended_at, catching_up_to) > clock_timestamp()`); n != 0 {
		t.Errorf("%d jobs are ahead of the clock", n)
	}
	b.at(next)
	b.work()
	b.fired("hourly", next)
	b.fired("tens", next, ahead)
	b.at(ahead)
	b.at(ahead.Add(10 * time.Minute))
	b.fired("tens", next, ahead, ahead.Add(10*time.Minute))
}

// A deployment that sets all settings of a job again does not fire a time whose entry an operator has cancelled.
func TestAlteringTheSpecDoesNotFireATimeWhoseEntryWasCancelled(t *testing.T) {
	b := newBed(t)
	today := b.present().Truncate(24 * time.Hour)
	tomorrow := today.Add(24 * time.Hour)
	b.now = today
	b.job(Job{Name: "nightly", Schedule: Schedule{Spec: "@daily"}})
	b.at(today)
	b.exec(`SELECT penstock.cancel_entry(entry_id) FROM penstock.cron_job`)
	for range 3 { // the sweep for missing entries comes to its end, and begins anew
		b.at(today)
	}
	b.exec(`SELECT penstock.alter_cron_job(name, jsonb_build_object('spec', spec)) FROM penstock.cron_job`)
	for _, now := range []time.Time{today, tomorrow, tomorrow.Add(24 * time.Hour)} {
		b.at(now)
		b.work()
	}
	b.fired("nightly", tomorrow.Add(24*time.Hour))
}

func TestDaylightSavingThroughTheEngine(t *testing.T) {
	berlin, err := time.LoadLocation("Europe/Berlin")
	if err != nil {
		t.Fatal(err)
	}
	for name, c := range map[string]struct {
		from, to time.Time
		want     []time.Time
	}{
		"gap": {
			time.Date(2026, 3, 28, 12, 0, 0, 0, berlin), time.Date(2026, 3, 30, 12, 0, 0, 0, berlin),
			[]time.Time{time.Date(2026, 3, 29, 1, 0, 0, 0, time.UTC), time.Date(2026, 3, 30, 2, 30, 0, 0, berlin)},
		},
		"fold": {
			time.Date(2026, 10, 24, 12, 0, 0, 0, berlin), time.Date(2026, 10, 26, 12, 0, 0, 0, berlin),
			[]time.Time{time.Date(2026, 10, 25, 0, 30, 0, 0, time.UTC), time.Date(2026, 10, 26, 2, 30, 0, 0, berlin)},
		},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBed(t)
			b.now = c.from
			b.job(Job{Name: "nightly", Schedule: Schedule{Spec: "30 2 * * *", Zone: "Europe/Berlin"}})
			for now := c.from; !now.After(c.to); now = now.Add(15 * time.Minute) {
				for b.at(now); b.work() > 0; {
				}
			}
			b.fired("nightly", c.want...)
		})
	}
}

// A schedule that has missed nominal times fires them one after another, each when the run of the one before has ended. The
// engine looks for that end soon, and less and less often while the run lasts, and where nothing is missed any more.
func TestScheduleThatIsBehindIsLookedAtSoon(t *testing.T) {
	b := newBed(t)
	b.job(Job{Name: "job", Schedule: Schedule{Spec: "* * * * *", CatchUp: CatchUpAll}, Overlap: OverlapQueue})
	pass := func() time.Duration {
		t.Helper()
		next, err := b.engine.pass(b.ctx)
		if err != nil {
			t.Fatal(err)
		}
		return next
	}
	pass() // makes the first entry
	b.now = noon.Add(3*time.Minute + time.Second)
	for missed := 1; missed <= 2; missed++ {
		if next := pass(); next != behindFirst {
			t.Fatalf("with nominal time %d of 3 fired the next pass comes after %v, want %v", missed, next, behindFirst)
		}
		run := b.claim()
		if next := pass(); next != 2*behindFirst {
			t.Errorf("while the run lasts the next pass comes after %v, want %v", next, 2*behindFirst)
		}
		b.finish(run)
	}
	for want := 4 * behindFirst; want < time.Second; want *= 2 {
		if next := pass(); next != want {
			t.Errorf("with all of them fired the next pass comes after %v, want %v", next, want)
		}
	}
	b.fired("job", noon.Add(time.Minute), noon.Add(2*time.Minute), noon.Add(3*time.Minute))
}

func TestOverlapPolicies(t *testing.T) {
	minute := func(n int) time.Time { return noon.Add(time.Duration(n) * time.Minute) }
	for _, c := range []struct {
		overlap Overlap
		want    []time.Time // after a run of the first that lasts until 12:03:30
	}{
		{OverlapSkip, []time.Time{minute(1), minute(4)}},
		{OverlapQueue, []time.Time{minute(1), minute(3), minute(4)}},
	} {
		t.Run(string(c.overlap), func(t *testing.T) {
			b := newBed(t)
			b.job(Job{Name: "job", Schedule: Schedule{Spec: "* * * * *", CatchUp: CatchUpNone, Grace: time.Second}, Overlap: c.overlap})
			b.at(noon)
			b.at(minute(1))
			run := b.claim()
			b.at(minute(2))
			b.at(minute(3))
			b.at(minute(3).Add(30 * time.Second))
			b.fired("job", minute(1))
			b.finish(run)
			for b.at(b.now); b.work() > 0; {
			}
			for b.at(minute(4)); b.work() > 0; {
			}
			b.fired("job", c.want...)
		})
	}
}

func TestOverlapCancelsTheRunForTheNext(t *testing.T) {
	b := newBed(t)
	b.job(Job{Name: "job", Schedule: Schedule{Spec: "* * * * *", CatchUp: CatchUpNone}, Overlap: OverlapCancel})
	b.at(noon)
	b.at(noon.Add(time.Minute))
	l := b.claim()[0]
	b.at(noon.Add(2 * time.Minute))
	if n := b.count(`SELECT count(*) FROM penstock.cancel_request WHERE entry_id = $1`, l.Entries[0].ID); n != 1 {
		t.Fatal("the cancel of the run was not requested")
	}
	b.fired("job", noon.Add(time.Minute))
	e := invalidation.Cancel(l, l.Entries[0].ID, "asked")
	e.Last = true
	if _, err := b.q.Settle(b.ctx, here, []invalidation.Ending{e}); err != nil {
		t.Fatal(err)
	}
	b.at(noon.Add(2*time.Minute + time.Second))
	b.fired("job", noon.Add(time.Minute), noon.Add(2*time.Minute))
	if len(b.claim()) != 1 {
		t.Error("the next run is not ready")
	}
}

func TestPauseResumeRunNowAlterDrop(t *testing.T) {
	b := newBed(t)
	by := invalidation.By{Actor: "ada", Reason: "window"}
	b.job(Job{Name: "job", Schedule: Schedule{Spec: "@hourly"}})
	b.at(noon)
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(Pause(b.ctx, b.pool, "job", by, time.Time{}))
	b.at(noon.Add(90 * time.Minute))
	b.fired("job")
	if b.state("job") != "paused" {
		t.Errorf("job is %s", b.state("job"))
	}
	if n := b.count(`SELECT count(*) FROM penstock.check_invariants()`); n != 0 {
		t.Error("the check of the tables takes the waiting entry of a paused job for a broken one")
	}
	must(RunNow(b.ctx, b.pool, "job", by))
	b.at(noon.Add(91 * time.Minute))
	if err := RunNow(b.ctx, b.pool, "job", by); !errors.Is(err, invalidation.ErrState) {
		t.Errorf("a second run beside the first: %v", err)
	}
	if n := b.work(); n != 1 {
		t.Fatalf("ran %d, want the one that was asked for", n)
	}
	b.fired("job")
	must(Resume(b.ctx, b.pool, "job", by))
	b.at(noon.Add(2 * time.Hour))
	b.work()
	b.fired("job", noon.Add(2*time.Hour)) // of 13:00, which passed in the pause, and 14:00 the latest
	must(Alter(b.ctx, b.pool, Job{Name: "job", Schedule: Schedule{Spec: "30 * * * *"}}, by))
	b.exec(`UPDATE penstock.cron_job SET handled_at = $1`, b.now) // as of the test's clock
	b.at(b.now)
	b.at(noon.Add(150 * time.Minute))
	b.work()
	b.fired("job", noon.Add(2*time.Hour), noon.Add(150*time.Minute))
	must(Drop(b.ctx, b.pool, "job", by))
	if n := b.count(`SELECT count(*) FROM penstock.entry`); n != 0 {
		t.Errorf("%d entries left of a dropped job", n)
	}
	if err := Pause(b.ctx, b.pool, "job", by, time.Time{}); !errors.Is(err, ErrJobNotFound) {
		t.Errorf("pause of a dropped job: %v", err)
	}
	if n := b.count(`SELECT count(DISTINCT verb) FROM penstock.audit WHERE object = 'cron job job' AND actor = 'ada'`); n != 5 {
		t.Errorf("%d verbs in the audit, want 5", n)
	}
}

func TestBadSpecFromSQLIsReportedAndBlocksNobody(t *testing.T) {
	b := newBed(t)
	b.exec(`SELECT penstock.create_cron_job('bad', 'reports', '61 * * * *')`)
	b.job(Job{Name: "good", Schedule: Schedule{Spec: "* * * * *"}})
	b.at(noon)
	b.at(noon.Add(time.Minute))
	b.fired("good", noon.Add(time.Minute))
	b.fired("bad")
	var problem string
	if err := b.pool.QueryRow(b.ctx, `SELECT problem FROM penstock.cron_status WHERE job = 'bad' AND state = 'broken'`).Scan(&problem); err != nil || !strings.Contains(problem, "minute") {
		t.Errorf("problem %q, %v", problem, err)
	}
	b.exec(`SELECT penstock.alter_cron_job('bad', '{"spec": "* * * * *"}')`)
	b.exec(`UPDATE penstock.cron_job SET handled_at = $1 WHERE name = 'bad'`, b.now)
	b.at(noon.Add(time.Minute))
	b.at(noon.Add(2 * time.Minute))
	b.fired("bad", noon.Add(2*time.Minute))
	if err := Create(b.ctx, b.pool, Job{Name: "x", Queue: "reports", Schedule: Schedule{Spec: "61 * * * *"}}, invalidation.By{}); !errors.Is(err, invalidation.ErrInvalid) {
		t.Errorf("Go took a bad spec: %v", err)
	}
}

func TestRefusedPushIsReportedAndBlocksNobody(t *testing.T) {
	b := newBed(t)
	b.job(Job{Name: "large", Schedule: Schedule{Spec: "* * * * *"}, Payload: json.RawMessage(`{"x": "` + strings.Repeat("y", 2000) + `"}`)})
	b.job(Job{Name: "small", Schedule: Schedule{Spec: "* * * * *"}})
	b.exec(`SELECT penstock.alter_queue('reports', '{"payload_limit": 1000}')`)
	b.exec(`UPDATE penstock.cron_job SET payload = payload || jsonb_build_object('z', (SELECT jsonb_agg(i) FROM generate_series(1, 1000) i)) WHERE name = 'large'`)
	b.at(noon)
	b.at(noon.Add(time.Minute))
	b.fired("small", noon.Add(time.Minute))
	if n := b.count(`SELECT count(*) FROM penstock.cron_job WHERE name = 'large' AND problem LIKE '%takes at most%' AND entry_id IS NULL`); n != 1 {
		t.Error("the refused push is not reported")
	}
}

// A push of such a job would be refused at each firing: the setting that comes second is refused instead.
func TestALockKeyDoesNotGoWithABoundOfNames(t *testing.T) {
	b := newBed(t)
	bound := map[string]any{"max_concurrent_per_name": 2}
	keyed := Job{Name: "keyed", Queue: "reports", Schedule: Schedule{Spec: "* * * * *"}, LockKey: "k"}
	b.job(keyed)
	_, err := invalidation.Alter(b.ctx, b.pool, "reports", bound)
	if !errors.Is(err, invalidation.ErrInvalid) || !strings.Contains(err.Error(), "keyed") {
		t.Errorf("a bound beside a job with a lock key: %v, want ErrInvalid that names the job", err)
	}
	b.exec(`SELECT penstock.alter_cron_job('keyed', '{"lock_key": null}')`)
	if _, err := invalidation.Alter(b.ctx, b.pool, "reports", bound); err != nil {
		t.Fatal(err)
	}
	if err := Alter(b.ctx, b.pool, keyed, invalidation.By{}); !errors.Is(err, invalidation.ErrInvalid) || !strings.Contains(err.Error(), "lock_key") {
		t.Errorf("a lock key for a job of a queue with a bound: %v, want ErrInvalid that names lock_key", err)
	}
	keyed.Name = "another"
	if err := Create(b.ctx, b.pool, keyed, invalidation.By{}); !errors.Is(err, invalidation.ErrInvalid) {
		t.Errorf("a new job with a lock key: %v, want ErrInvalid", err)
	}
	b.at(noon)
	b.at(noon.Add(time.Minute))
	b.fired("keyed", noon.Add(time.Minute))
}

func TestCancelledWaitingEntryTakesItsTimeWithIt(t *testing.T) {
	b := newBed(t)
	b.job(Job{Name: "job", Schedule: Schedule{Spec: "@hourly"}})
	b.at(noon)
	b.exec(`SELECT penstock.cancel_entry(entry_id) FROM penstock.cron_job`)
	b.at(noon.Add(time.Minute)) // the sweep comes to its end
	b.at(noon.Add(time.Minute)) // and begins anew
	b.at(noon.Add(time.Minute))
	if n := b.count(`SELECT count(*) FROM penstock.entry`); n != 1 {
		t.Errorf("%d entries, want the one for the time after", n)
	}
	b.at(noon.Add(time.Hour))
	b.fired("job")
	b.at(noon.Add(2 * time.Hour))
	b.fired("job", noon.Add(2*time.Hour))
}

func TestScheduleEndsAndStarts(t *testing.T) {
	b := newBed(t)
	b.job(Job{Name: "job", Schedule: Schedule{Spec: "@hourly", Start: noon.Add(90 * time.Minute), End: noon.Add(3*time.Hour + time.Second)}})
	for h := range 6 {
		for b.at(noon.Add(time.Duration(h) * time.Hour)); b.work() > 0; {
		}
	}
	b.fired("job", noon.Add(2*time.Hour), noon.Add(3*time.Hour))
	if b.state("job") != "ended" || b.count(`SELECT count(*) FROM penstock.entry`) != 0 {
		t.Errorf("job is %s", b.state("job"))
	}
}

// counted is a fence that counts.
type counted struct {
	open
	n int
}

func (c *counted) InTx(ctx context.Context, fn func(pgx.Tx) error) error {
	c.n++
	return c.open.InTx(ctx, fn)
}

// cut is a fence whose term ends after some transactions: the one under way changes nothing.
type cut struct {
	open
	left int
}

var errTermOver = errors.New("term is over")

func (c *cut) InTx(ctx context.Context, fn func(pgx.Tx) error) error {
	c.left--
	return c.open.InTx(ctx, func(tx pgx.Tx) error {
		if err := fn(tx); err != nil {
			return err
		}
		if c.left < 0 {
			return errTermOver
		}
		return nil
	})
}

func TestLeaderChangeAmidFiringFiresEachOnce(t *testing.T) {
	b := newBed(t)
	const jobs = 500
	b.exec(`INSERT INTO penstock.cron_job (queue_id, name, spec, handled_at)
	        SELECT $1, 'job ' || i, '* * * * *', $2 FROM generate_series(1, $3) i`, b.q.ID, noon, jobs)
	b.engine.cfg.BatchJobsMax = 64
	b.at(noon)
	b.now = noon.Add(time.Minute)
	for terms := 0; ; terms++ {
		fence := &cut{open: open{b.pool}, left: 3}
		e := b.newEngine(fence)
		e.cfg.BatchJobsMax = 64
		_, err := e.pass(b.ctx)
		if err != nil && !errors.Is(err, errTermOver) {
			t.Fatal(err)
		}
		// Each term makes three batches; the fourth is cut off and fires nothing.
		if n := b.count(`SELECT count(*) FROM penstock.cron_firing`); n != min(jobs, (terms+1)*3*64) {
			t.Fatalf("%d fired after %d terms", n, terms+1)
		}
		if err == nil {
			break
		}
	}
	if n := b.count(`SELECT count(*) FROM penstock.ready`); n != jobs {
		t.Errorf("%d ready rows, want %d", n, jobs)
	}
}

func TestTwoEnginesAtOnceFireEachOnce(t *testing.T) {
	b := newBed(t)
	const jobs = 2000
	b.exec(`INSERT INTO penstock.cron_job (queue_id, name, spec, handled_at)
	        SELECT $1, 'job ' || i, '* * * * *', $2 FROM generate_series(1, $3) i`, b.q.ID, noon, jobs)
	b.at(noon)
	b.now = noon.Add(time.Minute)
	var both sync.WaitGroup
	var fired [2]int64
	for i := range fired {
		both.Go(func() {
			e := b.newEngine(open{b.pool})
			e.cfg.BatchJobsMax = 50
			for range 3 {
				if _, err := e.pass(b.ctx); err != nil {
					t.Error(err)
				}
			}
			fired[i] = e.Status().Fired
		})
	}
	both.Wait()
	if fired[0]+fired[1] != jobs {
		t.Errorf("%d and %d fired, want %d together", fired[0], fired[1], jobs)
	}
	if n := b.count(`SELECT count(*) FROM penstock.ready`); n != jobs {
		t.Errorf("%d ready rows, want %d", n, jobs)
	}
}

func TestRunFiresByTheDatabasesClock(t *testing.T) {
	b := newBed(t)
	if err := Create(b.ctx, b.pool, Job{Name: "tick", Queue: "reports", Schedule: Schedule{Spec: "* * * * * *"}}, invalidation.By{}); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(b.ctx)
	ended := make(chan error, 1)
	go func() { ended <- New(b.pool, open{b.pool}, Config{}).Run(ctx) }()
	deadline := time.Now().Add(time.Minute)
	for ran := 0; ran < 2; {
		if time.Now().After(deadline) {
			t.Fatal("it did not fire twice in a minute")
		}
		locks := b.claim()
		for _, l := range locks {
			if waited := b.count(`SELECT (extract(epoch FROM fired_at - nominal_at) * 1000)::int FROM penstock.cron_firing WHERE entry_id = $1`, l.Entries[0].ID); waited < 0 {
				t.Errorf("fired %d ms before its time", -waited)
			}
		}
		if len(locks) > 0 {
			b.finishNow(locks)
			ran += len(locks)
		}
		time.Sleep(20 * time.Millisecond)
	}
	stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}

func (b *bed) finishNow(locks []*invalidation.Lock) {
	b.Helper()
	for _, l := range locks {
		e := invalidation.Done(l, l.Entries[0].ID, nil, 0)
		e.Last = true
		if _, err := b.q.Settle(b.ctx, here, []invalidation.Ending{e}); err != nil {
			b.Fatal(fmt.Errorf("finish: %w", err))
		}
	}
}
