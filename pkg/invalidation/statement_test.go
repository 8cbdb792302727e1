package invalidation

import (
	"encoding/json"
	"errors"
	"testing"
	"time"

	"github.com/penstock/penstock/internal/postgres"
)

// runStatements runs what is ready by the statement of the queue, as a node does.
func (b *bed) runStatements() []error {
	b.Helper()
	q, err := Open(b.ctx, b.pool, b.q.Name)
	b.must(err)
	b.q = q
	h := StatementHandler(b.pool, q)
	var errs []error
	for _, l := range b.claim(100) {
		runs := make([]*Run, len(l.Entries))
		for i, e := range l.Entries {
			runs[i] = &Run{Queue: q, Entry: e, Lock: l, Node: here}
		}
		var endings []Ending
		if batch, ok := h.(BatchHandler); ok {
			for i, a := range batch.HandleBatch(b.ctx, runs) {
				endings = append(endings, Judge(runs[i], a.Result, a.Err, time.Millisecond, 0))
				errs = append(errs, a.Err)
			}
		} else {
			for _, r := range runs {
				result, err := h.Handle(b.ctx, r)
				endings = append(endings, Judge(r, result, err, time.Millisecond, 0))
				errs = append(errs, err)
			}
		}
		endings[len(endings)-1].Last = true
		b.settle(endings...)
	}
	return errs
}

func (b *bed) declare(run string) {
	b.Helper()
	b.must(SetStatements(b.ctx, b.pool, b.q.Name, map[string]string{"run": run}, ann))
}

// A payload that cannot be merged, or that the statement refuses, fails its own entry alone.
func TestOfEntriesRunTogetherOnlyTheOddOneFails(t *testing.T) {
	for name, c := range map[string]struct {
		odd string
		sum int // of the effects
	}{
		"no object":           {`5`, 4},
		"refused with others": {`{"n": 2}`, 4},
	} {
		t.Run(name, func(t *testing.T) {
			b := newControlBed(t, Config{Mergeable: true, Merge: "object", Retry: RetryPolicy{MaxAttempts: 1}})
			b.exec(b.pool, `CREATE TABLE public.effect (n int NOT NULL CHECK (n <> 2))`)
			b.declare(`INSERT INTO public.effect VALUES (($1->>'n')::int)`)
			var ids []EntryID
			for _, payload := range []string{`{"n": 1}`, `{"n": 3}`, c.odd} { // the last one's n counts where they are merged
				ids = append(ids, b.pushAll(b.pool, Push{LockKey: "K", Payload: json.RawMessage(payload)})...)
			}
			errs := b.runStatements()
			if len(errs) != 3 || errs[0] != nil || errs[1] != nil || errs[2] == nil {
				t.Fatalf("errors are %v, want one of the last entry", errs)
			}
			b.want(b.count(`SELECT sum(n) FROM public.effect`), c.sum)
			b.want(b.count(`SELECT count(*) FROM penstock.failure WHERE entry_id = $1`, ids[2]), 1)
		})
	}
}

func TestStatementsEffectCommitsWithTheEndOfItsEntry(t *testing.T) {
	b := newControlBed(t, Config{Retry: RetryPolicy{MaxAttempts: 1}})
	b.exec(b.pool, `CREATE TABLE public.effect (n int CHECK (n <> 2))`)
	b.declare(`INSERT INTO public.effect VALUES (($1->>'n')::int) RETURNING n * 10`)
	ids := b.push("", "", "")
	errs := b.runStatements()
	if len(errs) != 3 || errs[0] != nil || errs[1] == nil || errs[2] != nil {
		t.Fatalf("errors are %v, want one of the second", errs)
	}
	b.want(b.count(`SELECT sum(n) FROM public.effect`), 4)
	b.want(b.outcome(ids[0]).Result, json.RawMessage(`10`))
	b.want(b.count(`SELECT count(*) FROM penstock.failure WHERE entry_id = $1`, ids[1]), 1)
}

// Managed servers have a timeout of statements for all roles, and the sessions in which statements run have no settings of
// ours.
func TestStatementHasNoTimeoutButThatOfItsRun(t *testing.T) {
	b := newControlBed(t, Config{})
	b.exec(b.pool, `CREATE TABLE public.bound AS SELECT name, setting FROM pg_settings WHERE false`)
	b.declare(`INSERT INTO public.bound SELECT name, setting FROM pg_settings
	            WHERE name IN ('statement_timeout', 'idle_in_transaction_session_timeout', 'client_connection_check_interval')`)
	id := b.push("")[0]
	b.exec(b.pool, `DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET statement_timeout = ''1h''', current_database()); END $$`)
	pool, err := postgres.Open(b.ctx, postgres.Config{DSN: b.pool.Config().ConnString(), Pooled: true, MaxConns: 1})
	b.must(err)
	defer pool.Close()
	q, err := Open(b.ctx, b.pool, b.q.Name)
	b.must(err)
	lock := b.claimOne()
	r := &Run{Queue: q, Entry: lock.Entries[0], Lock: lock, Node: here}
	_, err = StatementHandler(pool, q).Handle(b.ctx, r)
	b.settle(last(Judge(r, nil, err, time.Millisecond, 0)))
	b.want(b.outcome(id).Outcome, "done")
	var bounds string
	b.must(b.pool.QueryRow(b.ctx, `SELECT string_agg(setting, ' ' ORDER BY name) FROM public.bound`).Scan(&bounds))
	b.want(bounds, "10000 60000 0")
}

func TestOutcomeOfALongStatementIsDatedByItsEnd(t *testing.T) {
	b := newControlBed(t, Config{})
	b.declare(`SELECT pg_sleep(0.2)`)
	id := b.push("")[0]
	b.runStatements()
	if ended := b.outcome(id); ended.At.Sub(ended.Accepted) < 200*time.Millisecond {
		t.Errorf("ended %v after it was accepted, want that its run of 200 ms counts", ended.At.Sub(ended.Accepted))
	}
}

func TestStatementOfAnEntryThatSomebodyElseHasChangesNothing(t *testing.T) {
	b := newControlBed(t, Config{})
	b.exec(b.pool, `CREATE TABLE public.effect (n int)`)
	b.declare(`INSERT INTO public.effect VALUES (1)`)
	b.push("")
	lock := b.claimOne()
	q, err := Open(b.ctx, b.pool, b.q.Name)
	b.must(err)
	_, err = b.q.Recover(b.ctx, []LockRef{{QueueID: q.ID, Key: lock.Key, Token: lock.Token}}, nil, false)
	b.must(err)
	_, err = StatementHandler(b.pool, q).Handle(b.ctx, &Run{Queue: q, Entry: lock.Entries[0], Lock: lock, Node: here})
	if !errors.Is(err, ErrLockLost) {
		t.Errorf("run under a dead token: %v, want ErrLockLost", err)
	}
	b.want(b.count(`SELECT count(*) FROM public.effect`), 0)
}

func TestStatementWithoutADatabaseSpendsNoAttemptAndKeepsItsPlace(t *testing.T) {
	b := newControlBed(t, Config{Retry: RetryPolicy{MaxAttempts: 1}})
	b.declare(`SELECT 1`)
	ids := b.push("k", "k")
	q, err := Open(b.ctx, b.pool, b.q.Name)
	b.must(err)
	gone, err := postgres.Open(b.ctx, postgres.Config{DSN: "postgres://127.0.0.1:1/nothing?connect_timeout=1", MaxConns: 1})
	b.must(err)
	defer gone.Close()
	lock := b.claimOne()
	r := &Run{Queue: q, Entry: lock.Entries[0], Lock: lock, Node: here}
	_, err = StatementHandler(gone, q).Handle(b.ctx, r)
	b.settle(last(Judge(r, nil, err, time.Millisecond, 0)))
	b.want(b.count(`SELECT count(*) FROM penstock.entry WHERE attempt = 0 AND status = 'pending'`), 2)
	b.want(b.count(`SELECT count(*) FROM penstock.throttle WHERE queue_wide AND until > at`), 1)
	b.exec(b.pool, `DELETE FROM penstock.throttle`)
	b.want(b.claimOne().Entries[0].ID, ids[0])
}

func TestEndingThatFindsTheDiskFullIsNotAnErrorOfTheStatement(t *testing.T) {
	b := newControlBed(t, Config{Retry: RetryPolicy{MaxAttempts: 1}})
	b.exec(b.pool, `CREATE FUNCTION public.full() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'could not extend file' USING ERRCODE = '53100'; END $$`)
	b.exec(b.pool, `CREATE TRIGGER full_disk BEFORE INSERT ON penstock.result FOR EACH ROW WHEN (NEW.outcome = 'done') EXECUTE FUNCTION public.full()`)
	b.declare(`SELECT 1`)
	id := b.push("")[0]
	if errs := b.runStatements(); len(errs) != 1 || errs[0] == nil {
		t.Fatalf("errors are %v, want one", errs)
	}
	b.want(b.count(`SELECT count(*) FROM penstock.entry WHERE id = $1 AND attempt = 0`, id), 1)
}

func TestStatementOfAMergeableQueueRunsOnceForWhatHasGathered(t *testing.T) {
	b := newControlBed(t, Config{Mergeable: true, Merge: "last"})
	b.exec(b.pool, `CREATE TABLE public.effect (payload jsonb)`)
	b.declare(`INSERT INTO public.effect VALUES ($1)`)
	b.pushPayloads(`{"target": 1, "n": 1}`, `{"target": 1, "n": 2}`, `{"target": 1, "n": 3}`)
	b.want(len(b.runStatements()), 3)
	b.want(b.count(`SELECT count(*) FROM public.effect WHERE payload->>'n' = '3'`), 1)
	b.want(b.count(`SELECT count(*) FROM public.effect`), 1)
	b.want(b.count(`SELECT count(*) FROM penstock.result WHERE outcome = 'done'`), 3)
}

func TestStatementThatPushesIsPartOfALoop(t *testing.T) {
	b := newControlBed(t, Config{})
	b.declare(`SELECT penstock.push('work', $1)`)
	b.push("")
	for range 30 {
		b.runStatements()
	}
	b.want(b.count(`SELECT count(*) FROM penstock.failure WHERE class = 'loop'`), 1)
	b.want(b.count(`SELECT count(*) FROM penstock.entry`), 0)
}

// A callback that is pushed with the end of an entry at the greatest depth would be one too deep.
func TestEndThatWouldGoTooDeepIsAFailureAtOnce(t *testing.T) {
	b := newControlBed(t, Config{})
	b.declare(`SELECT 1`)
	p := withCallback()
	p.Payload = json.RawMessage(`{}`)
	id := b.pushAll(b.pool, p)[0]
	b.exec(b.pool, `UPDATE penstock.entry SET depth = penstock.depth_max() WHERE id = $1`, id)
	b.runStatements()
	b.want(b.count(`SELECT count(*) FROM penstock.failure WHERE class = 'loop' AND entry_id = $1`, id), 1)
	b.want(b.count(`SELECT count(*) FROM penstock.entry_work`), 0)
	b.wantCalls("failed")
}

func TestStatementsThatCannotRunAreRefused(t *testing.T) {
	b := newControlBed(t, Config{})
	b.exec(b.pool, `CREATE TABLE public.effect (n int PRIMARY KEY); INSERT INTO public.effect VALUES (7)`)
	for name, statements := range map[string]map[string]string{
		"a wrong name": {"map": `SELECT 1`}, "no SQL": {"run": `SELEKT 1`}, "no such table": {"run": `SELECT * FROM nowhere`},
		"two statements": {"run": `SELECT 1; SELECT 2`}, "a second one that changes something": {"run": `SELECT 1; DELETE FROM public.effect`},
		"one that breaks out":   {"run": `SELECT 1) TO STDOUT; DELETE FROM public.effect; COPY (SELECT 1`},
		"one that ends a quote": {"run": `SELECT 1'; DELETE FROM public.effect; SELECT '1`}, "nothing": {"run": ` ; `},
		"what is no query": {"run": `DROP TABLE public.effect`}, "a session's setting": {"run": `SET work_mem = '1GB'`},
	} {
		if err := SetStatements(b.ctx, b.pool, "work", statements, ann); !errors.Is(err, ErrInvalid) {
			t.Errorf("%s: %v, want ErrInvalid", name, err)
		}
	}
	for _, fine := range []string{
		"SELECT 1; \n", `DELETE FROM public.effect WHERE n > ($1->>'n')::int RETURNING n`, "SELECT ';' -- and ) a comment",
		`WITH gone AS (DELETE FROM public.effect RETURNING n) INSERT INTO public.effect SELECT n + 1 FROM gone`,
		`MERGE INTO public.effect e USING (SELECT ($1->>'n')::int AS n) s ON e.n = s.n WHEN MATCHED THEN DELETE`,
	} {
		b.declare(fine)
	}
	b.want(b.count(`SELECT sum(n) FROM public.effect`), 7) // a check runs nothing
	b.must(SetStatements(b.ctx, b.pool, "work", nil, ann))
	q, err := Open(b.ctx, b.pool, "work")
	b.must(err)
	b.want(len(q.Statements), 0)
}
