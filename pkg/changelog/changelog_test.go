package changelog

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// bed is a database with a table to watch, `account`, and a change_log queue, `changes`.
type bed struct {
	testing.TB
	ctx    context.Context
	pool   *pgxpool.Pool
	claims int32
}

const here invalidation.NodeID = 7001

func newBed(t testing.TB) *bed {
	t.Helper()
	pool := pgtest.New(t) // with sessions as applications have them, whose tables are in public
	b := &bed{TB: t, ctx: t.Context(), pool: pool}
	b.exec(`CREATE TABLE account (id int PRIMARY KEY, balance int NOT NULL DEFAULT 0, owner text, note json)`)
	b.exec(`SELECT penstock.create_queue('changes', '{"kind": "change_log", "grouping": "object"}')`)
	return b
}

func (b *bed) exec(sql string, args ...any) {
	b.Helper()
	if _, err := b.pool.Exec(b.ctx, sql, args...); err != nil {
		b.Fatal(err)
	}
}

func (b *bed) watch(columns ...string) {
	b.Helper()
	if err := Watch(b.ctx, b.pool, "account", "changes", columns, nil, invalidation.By{Actor: "ada", Reason: "test"}); err != nil {
		b.Fatal(err)
	}
}

func (b *bed) count(sql string) (n int) {
	b.Helper()
	if err := b.pool.QueryRow(b.ctx, sql).Scan(&n); err != nil {
		b.Fatal(err)
	}
	return n
}

// changes lists the changes recorded since the last call, in order.
func (b *bed) changes() []string {
	b.Helper()
	rows, err := b.pool.Query(b.ctx, `SELECT payload - 'table' FROM penstock.entry_changes ORDER BY id`)
	if err != nil {
		b.Fatal(err)
	}
	list, err := pgx.CollectRows(rows, pgx.RowTo[json.RawMessage])
	if err != nil {
		b.Fatal(err)
	}
	var changes []string
	for _, c := range list {
		var change Change
		if err := json.Unmarshal(c, &change); err != nil {
			b.Fatal(err)
		}
		changes = append(changes, fmt.Sprintf("%s.%s: %s -> %s", change.Object, change.Field, change.From, change.To))
	}
	b.exec(`DELETE FROM penstock.ready`)
	b.exec(`DELETE FROM penstock.entry_changes`)
	return changes
}

func (b *bed) wantChanges(want ...string) {
	b.Helper()
	if got := b.changes(); !slices.Equal(got, want) {
		b.Errorf("changes:\n%s\nwant:\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
	}
}

// run runs everything that is ready in a queue, and returns how many entries it ran and the last error.
func (b *bed) run(queue string, h invalidation.Handler) (ran int, last error) {
	b.Helper()
	q, err := invalidation.Open(b.ctx, b.pool, queue)
	if err != nil {
		b.Fatal(err)
	}
	b.claims++
	c, err := q.Claim(b.ctx, invalidation.ClaimRequest{Node: here, ClaimID: b.claims, Lane: invalidation.Lane{Priority: 1}, Limit: 100})
	if err != nil {
		b.Fatal(err)
	}
	for _, l := range c.Locks {
		for i, e := range l.Entries {
			r := &invalidation.Run{Queue: q, Entry: e, Lock: l, Node: here}
			result, err := h.Handle(b.ctx, r)
			last = errors.Join(last, err)
			ending := invalidation.Judge(r, result, err, time.Millisecond, 0)
			ending.Last = i == len(l.Entries)-1
			if _, err := q.Settle(b.ctx, here, []invalidation.Ending{ending}); err != nil {
				b.Fatal(err)
			}
			ran++
		}
	}
	return ran, last
}

func TestChangesOfATableBecomeEntriesInTheSameTransaction(t *testing.T) {
	b := newBed(t)
	b.watch("balance", "owner")
	b.exec(`INSERT INTO account (id, balance, owner) VALUES (1, 10, 'ada'), (2, 20, NULL)`)
	b.wantChanges(`1.: null -> {"owner": "ada", "balance": 10}`, `2.: null -> {"owner": null, "balance": 20}`)
	b.exec(`UPDATE account SET balance = balance + 1, owner = 'bob' WHERE id = 1`)
	b.wantChanges(`1.balance: 10 -> 11`, `1.owner: "ada" -> "bob"`)
	b.exec(`UPDATE account SET owner = 'bob', note = '{"a": 1}'`)
	b.wantChanges(`2.owner: null -> "bob"`) // what stayed as it was, or is not watched, is no change
	b.exec(`UPDATE account SET id = 3 WHERE id = 2`)
	b.wantChanges(`2.: {"owner": "bob", "balance": 20} -> null`, `3.: null -> {"owner": "bob", "balance": 20}`)
	b.exec(`DELETE FROM account WHERE id = 3`)
	b.wantChanges(`3.: {"owner": "bob", "balance": 20} -> null`)
	b.exec(`INSERT INTO account (id, balance) VALUES (1, 5), (4, 5) ON CONFLICT (id) DO UPDATE SET balance = excluded.balance`)
	if got := b.changes(); len(got) != 2 || !slices.Contains(got, `1.balance: 11 -> 5`) || !slices.Contains(got, `4.: null -> {"owner": null, "balance": 5}`) {
		t.Errorf("upsert recorded %q", got)
	}
	b.exec(`TRUNCATE account`)
	b.wantChanges(`null.: null -> null`)

	tx, err := b.pool.Begin(b.ctx)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(b.ctx, `INSERT INTO account VALUES (9)`); err != nil {
		t.Fatal(err)
	}
	if err := tx.Rollback(b.ctx); err != nil {
		t.Fatal(err)
	}
	b.wantChanges()
}

func TestWatchOfAllColumnsIncludesTypesWithoutEquality(t *testing.T) {
	b := newBed(t)
	b.watch()
	b.exec(`INSERT INTO account (id, note) VALUES (1, '{"a": 1}')`)
	b.changes()
	b.exec(`UPDATE account SET note = '{"a":1}'`)
	b.wantChanges()
	b.exec(`UPDATE account SET note = '{"a": 2}'`)
	b.wantChanges(`1.note: {"a": 1} -> {"a": 2}`)
	b.exec(`UPDATE account SET owner = repeat('x', 300000)`) // must not refuse the writer
	if got := b.changes(); len(got) != 1 || !strings.Contains(got[0], "omitted") {
		t.Errorf("a large value recorded %.200q", got)
	}
}

func TestKeyOfSeveralColumns(t *testing.T) {
	b := newBed(t)
	b.exec(`CREATE TABLE line ("order" int, no int, "unit Price" numeric, PRIMARY KEY (no, "order"))`)
	if err := Watch(b.ctx, b.pool, "line", "changes", nil, nil, invalidation.By{}); err != nil {
		t.Fatal(err)
	}
	b.exec(`INSERT INTO line VALUES (1, 2, 3.50)`)
	b.exec(`UPDATE line SET "unit Price" = 4`)
	b.wantChanges(`{"no": 2, "order": 1}.: null -> {"unit Price": 3.50}`, `{"no": 2, "order": 1}.unit Price: 3.50 -> 4`)
}

// A trigger that fails makes every write to the watched table fail: no name or type of a column may
// break it.
func TestWatchHoldsUpWhateverColumnsAreCalledAndWhatTypesKeysHave(t *testing.T) {
	b := newBed(t)
	b.exec(`CREATE EXTENSION ltree`)
	b.exec(`CREATE TABLE "50%s" (path ltree, "k%d" json, here bool, "a%s" int, "x$body$; SELECT 1" int, "q\'uo""te" int, PRIMARY KEY (path))`)
	if err := Watch(b.ctx, b.pool, `"50%s"`, "changes", nil, []string{"path", "k%d"}, invalidation.By{}); err != nil {
		t.Fatal(err)
	}
	b.exec(`INSERT INTO "50%s" VALUES ('a.b', '1', true, 1, 1, 1)`)
	b.changes()
	b.exec(`UPDATE "50%s" SET "a%s" = 2, "x$body$; SELECT 1" = 3, "q\'uo""te" = 4, here = false`)
	key := `{"k%d": 1, "path": "a.b"}.`
	b.wantChanges(key+`here: true -> false`, key+`a%s: 1 -> 2`, key+`x$body$; SELECT 1: 1 -> 3`, key+`q\'uo"te: 1 -> 4`)
	b.exec(`DELETE FROM "50%s"`)
	if got := b.changes(); len(got) != 1 {
		t.Errorf("a row that went recorded %q", got)
	}
}

func TestChangesOfOneObjectAreOneGroupInOrder(t *testing.T) {
	b := newBed(t)
	b.watch("balance")
	b.exec(`INSERT INTO account VALUES (1, 0), (2, 0)`)
	b.changes()
	for i := range 5 {
		b.exec(`UPDATE account SET balance = $1 WHERE id = 1`, i+1)
	}
	var seen []string
	ran, err := b.run("changes", Handler(b.pool, func(_ context.Context, c Change) ([]Push, error) {
		seen = append(seen, string(c.To))
		return nil, nil
	}))
	if ran != 5 || err != nil || !slices.Equal(seen, []string{"1", "2", "3", "4", "5"}) {
		t.Errorf("ran %d, %v, in order %v", ran, err, seen)
	}
}

func TestUnwatchLeavesNothingBehind(t *testing.T) {
	b := newBed(t)
	traces := func() int {
		return b.count(`SELECT (SELECT count(*) FROM pg_trigger WHERE NOT tgisinternal AND tgname LIKE 'penstock%')
		                     + (SELECT count(*) FROM pg_proc WHERE proname LIKE 'watch\_%\_%' AND proname ~ '[0-9]')
		                     + (SELECT count(*) FROM penstock.watch)`)
	}
	before := traces()
	b.watch("balance")
	b.watch("balance", "owner") // replaces the first
	if traces() != before+4+4+1 {
		t.Errorf("%d traces of a watch, want 9", traces()-before)
	}
	if err := invalidation.Drop(b.ctx, b.pool, "changes", true, invalidation.By{}); !errors.Is(err, invalidation.ErrState) {
		t.Errorf("drop of a queue that is written to by triggers: %v", err)
	}
	if n, err := Unwatch(b.ctx, b.pool, "account", invalidation.By{}); n != 1 || err != nil {
		t.Fatalf("ended %d, %v", n, err)
	}
	if traces() != before {
		t.Errorf("%d traces left", traces()-before)
	}
	b.exec(`INSERT INTO account VALUES (1)`)
	b.wantChanges()

	b.watch("balance")
	b.exec(`DROP TABLE account`)
	b.exec(`CREATE TABLE other (id int PRIMARY KEY)`)
	if n, err := Unwatch(b.ctx, b.pool, "other", invalidation.By{}); n != 0 || err != nil {
		t.Fatalf("ended %d, %v", n, err)
	}
	if traces() != before {
		t.Errorf("%d traces left of a table that was dropped", traces()-before)
	}
}

func TestWatchRefusesWhatCannotWork(t *testing.T) {
	b := newBed(t)
	b.exec(`CREATE TABLE keyless (a int)`)
	b.exec(`SELECT penstock.create_queue('plain')`)
	for _, c := range []struct{ table, queue, column, want string }{
		{"keyless", "changes", "a", "primary key"},
		{"account", "plain", "balance", "kind"},
		{"account", "changes", "colour", "colour"},
		{"penstock.entry", "changes", "payload", "own"},
	} {
		err := Watch(b.ctx, b.pool, c.table, c.queue, []string{c.column}, nil, invalidation.By{})
		if err == nil || !strings.Contains(err.Error(), c.want) {
			t.Errorf("%v: %v", c, err)
		}
	}
}

// The cost of a bulk update grows linearly with its rows: with ten times the rows, that of a row may at most triple.
func TestTimedBulkUpdateIsOnePushForTenThousand(t *testing.T) {
	const few, many = 1500, 15_000
	b := newBed(t)
	b.watch("balance")
	b.exec(`UPDATE account SET balance = 0`) // the plan of this session is made here, of no rows
	update := func() time.Duration {
		start := time.Now()
		b.exec(`UPDATE account SET balance = coalesce(balance, 0) + 1`)
		return time.Since(start)
	}
	b.exec(`INSERT INTO account SELECT i FROM generate_series(1, $1::int) i`, few)
	short := min(update(), update(), update())
	b.exec(`INSERT INTO account SELECT i FROM generate_series($1::int, $2) i`, few+1, many)
	long := min(update(), update(), update())
	if n := b.count(`SELECT count(*) FROM penstock.entry_changes WHERE payload->>'field' = 'balance'`); n != 3*few+3*many {
		t.Errorf("%d changes, want %d", n, 3*few+3*many)
	}
	t.Logf("%d rows in %v, %d rows in %v", few, short.Round(time.Millisecond), many, long.Round(time.Millisecond))
	if long > 3*many/few*short {
		t.Errorf("%d rows took %v, %d rows %v: not linear", few, short, many, long)
	}
}

func TestLoopEndsAndIsNamed(t *testing.T) {
	b := newBed(t)
	b.watch("balance")
	b.exec(`SELECT penstock.create_queue('calc')`)
	impact := Handler(b.pool, func(_ context.Context, c Change) ([]Push, error) {
		return []Push{{Queue: "calc", Push: invalidation.Push{Payload: json.RawMessage(`{}`)}}}, nil
	})
	// This handler writes to a watched table, without end.
	calc := invalidation.HandlerFunc(func(ctx context.Context, r *invalidation.Run) (json.RawMessage, error) {
		return nil, postgres.InTx(ctx, b.pool, func(tx pgx.Tx) error {
			if err := Descend(ctx, tx, r); err != nil {
				return err
			}
			_, err := tx.Exec(ctx, `UPDATE account SET balance = balance + 1`)
			return loop(err)
		})
	})
	b.exec(`INSERT INTO account VALUES (1)`)
	total := 0
	for range 100 {
		one, err := b.run("changes", impact)
		two, err2 := b.run("calc", calc)
		total += one + two
		if err = errors.Join(err, err2); err != nil {
			if !errors.Is(err, ErrLoop) || !strings.Contains(err.Error(), `queue "calc"`) || !strings.Contains(err.Error(), `queue "changes"`) {
				t.Errorf("refused with: %v", err)
			}
			break
		}
		if one+two == 0 {
			break
		}
	}
	if total != 17 {
		t.Errorf("ran %d entries, want one for each depth from 0 to 16", total)
	}
	if n := b.count(`SELECT max(balance) FROM account`); n != 8 {
		t.Errorf("the circle went round %d times, want 8 for depth 16", n)
	}
	if n := b.count(`SELECT count(*) FROM penstock.failure WHERE class = 'loop'`); n != 1 {
		t.Errorf("%d failures of class loop, want one", n)
	}
	if n := b.count(`SELECT count(*) FROM penstock.entry`); n != 0 {
		t.Errorf("%d entries left of a loop that ended", n)
	}
}

// batch returns a handler whose changes imply an entry of a new queue `calc` each, and a batch of three.
func (b *bed) batch(impact func(Change) error) (invalidation.BatchHandler, []*invalidation.Run) {
	b.Helper()
	b.exec(`SELECT penstock.create_queue('calc')`)
	h, batched := Handler(b.pool, func(_ context.Context, c Change) ([]Push, error) {
		return []Push{{Queue: "calc", Push: invalidation.Push{Payload: c.To}}}, impact(c)
	}).(invalidation.BatchHandler)
	if !batched {
		b.Fatal("the handler takes no batches")
	}
	q, err := invalidation.Open(b.ctx, b.pool, "changes")
	if err != nil {
		b.Fatal(err)
	}
	var runs []*invalidation.Run
	for i := range 3 {
		runs = append(runs, &invalidation.Run{Queue: q, Entry: invalidation.Entry{ID: invalidation.EntryID(i + 1), Payload: json.RawMessage(fmt.Sprintf(`{"to": %d}`, i+1))}})
	}
	return h, runs
}

func TestAChangeWithoutAnImpactFailsAlone(t *testing.T) {
	b := newBed(t)
	calls := 0
	h, runs := b.batch(func(c Change) error {
		calls++
		if string(c.To) == "2" {
			return errors.New("no two")
		}
		return nil
	})
	answers := h.HandleBatch(b.ctx, runs)
	if answers[0].Err != nil || answers[1].Err == nil || answers[2].Err != nil {
		t.Errorf("answers %v", answers)
	}
	if n := b.count(`SELECT count(*) FROM penstock.entry_calc`); n != 2 || calls != 3 {
		t.Errorf("%d pushed, want 2; %d calls of the impact, want 3", n, calls)
	}
}

// Pushes are tried one by one only where the error may be of one of them: a database that is away is no reason.
func TestBatchIsPushedOneByOneWhereOneIsToBlame(t *testing.T) {
	for name, c := range map[string]struct {
		raise         string
		pushed, tries int // entries, and inserts that were begun
	}{
		"the key of one is contended": {`IF NEW.payload = '2' THEN
		      IF currval('public.tries') = 2 THEN RAISE check_violation; ELSE RAISE lock_not_available; END IF; END IF`, 2, 5},
		"a value is refused":        {`IF NEW.payload = '2' THEN RAISE check_violation; END IF`, 2, 5},
		"the statement is too slow": {`IF NEW.payload = '2' THEN RAISE query_canceled; END IF`, 2, 5},
		"the transaction conflicts": {`RAISE serialization_failure`, 0, 1},
		"the connection is lost":    {`PERFORM pg_terminate_backend(pg_backend_pid()), pg_sleep(60)`, 0, 1},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBed(t)
			h, runs := b.batch(func(Change) error { return nil })
			b.exec(`CREATE SEQUENCE public.tries`)
			b.exec(`CREATE FUNCTION public.meet() RETURNS trigger LANGUAGE plpgsql AS
			        'BEGIN PERFORM nextval(''public.tries''); ` + strings.ReplaceAll(c.raise, `'`, `''`) + `; RETURN NEW; END'`)
			b.exec(`CREATE TRIGGER meet BEFORE INSERT ON penstock.entry_calc FOR EACH ROW EXECUTE FUNCTION public.meet()`)
			failed := 0
			for _, answer := range h.HandleBatch(b.ctx, runs) {
				if answer.Err != nil {
					failed++
				}
			}
			if n := b.count(`SELECT count(*) FROM penstock.entry_calc`); n != c.pushed || failed != len(runs)-c.pushed {
				t.Errorf("%d pushed and %d failed, want %d pushed", n, failed, c.pushed)
			}
			if n := b.count(`SELECT last_value FROM public.tries`); n != c.tries {
				t.Errorf("%d inserts were begun, want %d", n, c.tries)
			}
			b.exec(`DROP TRIGGER meet ON penstock.entry_calc`)
			for _, answer := range h.HandleBatch(b.ctx, runs) {
				if answer.Err != nil {
					t.Errorf("later: %v", answer.Err)
				}
			}
		})
	}
}

// Changes that push to the same queues in another order take their locks in the same one.
func TestPushesOfAChangeGoByTheNamesOfQueues(t *testing.T) {
	b := newBed(t)
	b.exec(`SELECT penstock.create_queue('calc'), penstock.create_queue('notify'), penstock.create_queue('audit_trail')`)
	h := Handler(b.pool, func(_ context.Context, c Change) ([]Push, error) {
		var implied []Push
		for _, queue := range []string{"notify", "calc", "audit_trail"} {
			implied = append(implied, Push{Queue: queue, Push: invalidation.Push{Payload: c.To}})
		}
		return implied, nil
	})
	q, err := invalidation.Open(b.ctx, b.pool, "changes")
	if err != nil {
		t.Fatal(err)
	}
	r := &invalidation.Run{Queue: q, Entry: invalidation.Entry{ID: 1, Payload: json.RawMessage(`{"to": 1}`)}}
	if _, err := h.Handle(b.ctx, r); err != nil {
		t.Fatal(err)
	}
	var order string
	const orderSQL = `SELECT string_agg(q.name, ' ' ORDER BY e.id) FROM penstock.entry e JOIN penstock.queue q ON q.id = e.queue_id`
	if err := b.pool.QueryRow(b.ctx, orderSQL).Scan(&order); err != nil || order != "audit_trail calc notify" {
		t.Errorf("queues are pushed to in the order %q (%v)", order, err)
	}
}

// Calculated fields: the total of an order follows its lines, calculated once for many changes.
func TestCalculatedFieldsGroupedAndCompacted(t *testing.T) {
	b := newBed(t)
	b.exec(`CREATE TABLE orders (id int PRIMARY KEY, total int NOT NULL DEFAULT 0)`)
	b.exec(`CREATE TABLE order_line (id int PRIMARY KEY, order_id int NOT NULL, price int NOT NULL)`)
	b.exec(`SELECT penstock.create_queue('calc_fields', '{"grouping": "target", "mergeable": true, "merge": "last"}')`)
	b.exec(`INSERT INTO orders VALUES (1), (2)`)
	b.exec(`INSERT INTO order_line SELECT i, 1 + i % 2, 10 FROM generate_series(1, 20) i`)
	if err := Watch(b.ctx, b.pool, "order_line", "changes", []string{"order_id", "price"}, nil, invalidation.By{}); err != nil {
		t.Fatal(err)
	}
	b.exec(`UPDATE order_line SET price = 11`)
	b.exec(`UPDATE order_line SET price = 12 WHERE id <= 4`)
	b.exec(`DELETE FROM order_line WHERE id = 20`)

	impact := func(ctx context.Context, c Change) ([]Push, error) {
		target := func(order string) []Push {
			return []Push{{Queue: "calc_fields", Push: invalidation.Push{Payload: json.RawMessage(`{"target": ` + order + `}`)}}}
		}
		if c.Inserted() || c.Deleted() {
			columns, err := c.Columns()
			return target(string(columns["order_id"])), err
		}
		var order string
		err := b.pool.QueryRow(ctx, `SELECT order_id::text FROM order_line WHERE id = $1::text::int`, string(c.Object)).Scan(&order)
		if errors.Is(err, pgx.ErrNoRows) {
			return nil, nil // gone since: that is a change of its own
		}
		return target(order), err
	}
	if ran, err := b.run("changes", Handler(b.pool, impact)); ran != 25 || err != nil {
		t.Fatalf("ran %d changes, %v", ran, err)
	}
	calc, err := invalidation.Open(b.ctx, b.pool, "calc_fields")
	if err != nil {
		t.Fatal(err)
	}
	if replaced, _, err := calc.CompactQueue(b.ctx, 2, 100, ""); err != nil || replaced < 20 {
		t.Fatalf("replaced %d, %v", replaced, err)
	}
	ran, err := b.run("calc_fields", invalidation.HandlerFunc(func(ctx context.Context, r *invalidation.Run) (json.RawMessage, error) {
		_, err := b.pool.Exec(ctx, `UPDATE orders o SET total = (SELECT sum(price) FROM order_line l WHERE l.order_id = o.id)
		                             WHERE id = ($1::jsonb ->> 'target')::int`, r.Entry.Payload)
		return nil, err
	}))
	if ran != 2 || err != nil {
		t.Errorf("calculated %d times, %v; want once for each order", ran, err)
	}
	if n := b.count(`SELECT count(*) FROM orders o WHERE total = (SELECT sum(price) FROM order_line l WHERE l.order_id = o.id)`); n != 2 {
		t.Errorf("%d totals are right, want 2", n)
	}
}

// The SQL of docs/queue-kinds.md works, in its order.
func TestStatementsOfTheDocumentWork(t *testing.T) {
	b := newBed(t)
	b.exec(`SELECT penstock.drop_queue('changes')`)
	b.exec(`SELECT penstock.create_queue(name) FROM unnest('{mail,render,thumbs,orders}'::text[]) name`)
	b.exec(`SELECT penstock.register_model('flux', '{"protocol": "dispatcher"}', 'test')`)
	b.exec(`CREATE TABLE photo (id int PRIMARY KEY, path text, year int, thumbnail text)`)
	b.exec(`CREATE TABLE orders (id int PRIMARY KEY, total int)`)
	b.exec(`CREATE TABLE order_line (id int PRIMARY KEY, order_id int, price int, amount int)`)
	b.exec(`INSERT INTO order_line VALUES (4, 1, 10, 1)`)
	text, err := os.ReadFile("../../docs/queue-kinds.md")
	if err != nil {
		t.Fatal(err)
	}
	blocks := regexp.MustCompile("(?s)```sql\n(.*?)```").FindAllStringSubmatch(string(text), -1)
	if len(blocks) < 6 {
		t.Fatalf("%d blocks of SQL, want 6 at least", len(blocks))
	}
	conn, err := b.pool.Acquire(b.ctx)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Release()
	for _, block := range blocks {
		if _, err := conn.Conn().PgConn().Exec(b.ctx, block[1]).ReadAll(); err != nil {
			t.Errorf("%s\n%v", block[1], err)
		}
	}
	if n := b.count(`SELECT count(*) FROM penstock.entry_changes WHERE payload = '{"table": "public.order_line", "object": 4, "field": "price", "from": 10, "to": 11}'`); n != 1 {
		t.Error("the entry is not the one that the document shows")
	}
}

// BenchmarkUpdate is an update of one row by its key, as pgbench makes them, without and with a watch.
func BenchmarkUpdate(b *testing.B) {
	for _, c := range []struct{ name, watched string }{
		{"unwatched", ""}, {"watched, another column", "owner"}, {"watched, this column", "balance"},
	} {
		b.Run(c.name, func(b *testing.B) {
			bed := newBed(b)
			bed.exec(`INSERT INTO account SELECT i FROM generate_series(1, 10000) i`)
			if c.watched != "" {
				bed.watch(c.watched)
			}
			b.SetParallelism(4)
			b.ResetTimer()
			b.RunParallel(func(pb *testing.PB) {
				for i := 1; pb.Next(); i++ {
					if _, err := bed.pool.Exec(bed.ctx, `UPDATE account SET balance = balance + 1 WHERE id = 1 + (random() * 9999)::int`); err != nil {
						b.Error(err)
						return
					}
				}
			})
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "updates/s")
		})
	}
}

// deadlines notes which statements were sent with a deadline.
type deadlines struct {
	mu sync.Mutex
	of map[string]bool // by the beginning of the statement
}

func (d *deadlines) TraceQueryStart(ctx context.Context, _ *pgx.Conn, data pgx.TraceQueryStartData) context.Context {
	_, bounded := ctx.Deadline()
	d.mu.Lock()
	defer d.mu.Unlock()
	d.of[data.SQL] = bounded
	return ctx
}

func (d *deadlines) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// A change may imply any number of entries: their push takes as long as the server works on it, and every other
// statement of the handler is bounded.
func TestPushesThatAChangeImpliesMayTakeAnyTime(t *testing.T) {
	b := newBed(t)
	b.exec(`SELECT penstock.create_queue('calc')`)
	config := b.pool.Config()
	seen := &deadlines{of: map[string]bool{}}
	config.ConnConfig.Tracer = seen
	pool, err := pgxpool.NewWithConfig(b.ctx, config)
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	h := Handler(pool, func(_ context.Context, c Change) ([]Push, error) {
		return []Push{{Queue: "calc", Push: invalidation.Push{Payload: c.To}}}, nil
	})
	q, err := invalidation.Open(b.ctx, b.pool, "changes")
	if err != nil {
		t.Fatal(err)
	}
	run := &invalidation.Run{Queue: q, Entry: invalidation.Entry{ID: 1, Payload: json.RawMessage(`{"to": 1}`)}}
	if _, err := h.Handle(b.ctx, run); err != nil {
		t.Fatal(err)
	}
	if n := b.count(`SELECT count(*) FROM penstock.entry_calc`); n != 1 {
		t.Fatalf("%d entries pushed, want 1", n)
	}
	pushes := 0
	for sql, bounded := range seen.of {
		switch push := strings.Contains(sql, "INSERT INTO penstock.ready"); {
		case push:
			pushes++
			if bounded {
				t.Errorf("the push has a deadline: %s", sql)
			}
		case sql != "" && !bounded: // an empty statement is a look at the connection
			t.Errorf("a statement has no deadline: %s", sql)
		}
	}
	if pushes != 1 {
		t.Errorf("%d statements push, want one: %v", pushes, seen.of)
	}
}
