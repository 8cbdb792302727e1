package invalidation

import (
	"encoding/json"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

// calls are the callbacks that wait to be delivered, oldest first: outcome and what else they say.
func (b *bed) calls() []map[string]any {
	b.Helper()
	rows, err := b.pool.Query(b.ctx, `SELECT payload->'data' FROM penstock.entry_webhook ORDER BY id`)
	if err != nil {
		b.Fatal(err)
	}
	calls, err := pgx.CollectRows(rows, pgx.RowTo[map[string]any])
	if err != nil {
		b.Fatal(err)
	}
	return calls
}

func (b *bed) wantCalls(outcomes ...string) {
	b.Helper()
	calls := b.calls()
	var got []string
	for _, c := range calls {
		got = append(got, fmt.Sprint(c["outcome"]))
	}
	if len(got) != len(outcomes) {
		b.Fatalf("callbacks %v, want %v", got, outcomes)
	}
	for i := range got {
		if got[i] != outcomes[i] {
			b.Fatalf("callbacks %v, want %v", got, outcomes)
		}
	}
}

func withCallback() Push {
	return Push{Callback: json.RawMessage(`{"url": "https://client.example/done", "context": 7}`)}
}

func TestEveryEndingOfAnEntryWithACallbackIsReportedOnce(t *testing.T) {
	b := newBed(t, Config{})
	b.pushAll(b.pool, withCallback(), withCallback(), withCallback(), withCallback(), withCallback(), Push{})
	locks := b.claim(6)
	id := func(i int) EntryID { return locks[i].Entries[0].ID }
	endings := []Ending{
		last(Done(locks[0], id(0), json.RawMessage(`{"n": 1}`), 0)),
		last(Fail(locks[1], id(1), Failure{Class: "input", Error: "no"}, 0)),
		last(Expire(locks[2], id(2), "late")),
		last(Cancel(locks[3], id(3), "unwanted")),
		last(Retry(locks[4], id(4), Failure{Error: "again"}, time.Hour, 0)),
		last(Done(locks[5], id(5), nil, 0)),
	}
	b.settle(endings...)
	if again := b.settleOn(b.pool, endings...); again != 0 {
		t.Fatalf("%d endings were accepted twice", again)
	}
	b.wantCalls("done", "failed", "expired", "cancelled")
	calls := b.calls()
	if fmt.Sprint(calls[0]["result"]) != "map[n:1]" || calls[0]["context"] != 7.0 || calls[1]["error"] != "no" {
		t.Errorf("callbacks say %v", calls)
	}
	if n := b.count(`SELECT count(*) FROM penstock.entry_webhook WHERE flow = 'client.example'`); n != 4 {
		t.Errorf("%d callbacks stand in the lane of their receiver, want 4", n)
	}
}

func TestFencedEndingCallsNobodyBack(t *testing.T) {
	b := newBed(t, Config{})
	b.pushAll(b.pool, withCallback())
	lost := b.claimOne()
	b.settle(releaseAll(lost)...)
	b.claimOne()
	if n := b.settleOn(b.pool, doneAll(lost)...); n != 0 {
		t.Fatal("a lost lock finished its entry")
	}
	b.wantCalls()
}

func TestCancelOfAWaitingEntryIsReported(t *testing.T) {
	b := newBed(t, Config{})
	ids := b.pushAll(b.pool, withCallback())
	if _, err := cancelEntry(b.ctx, b.pool, ids[0], By{}); err != nil {
		t.Fatal(err)
	}
	b.wantCalls("cancelled")
}

func TestLargeResultIsNotSentAlong(t *testing.T) {
	b := newBed(t, Config{})
	b.pushAll(b.pool, withCallback())
	lock := b.claimOne()
	noise, err := json.Marshal(b.noise(100_000))
	if err != nil {
		t.Fatal(err)
	}
	b.settle(last(Done(lock, lock.Entries[0].ID, noise, 0)))
	b.wantCalls("done")
	if call := b.calls()[0]; call["result"] != nil || call["result_omitted"] != true {
		t.Errorf("callback says result %T, omitted %v", call["result"], call["result_omitted"])
	}
}

// noise is a text that does not compress.
func (b *bed) noise(bytes int) string {
	var text string
	err := b.pool.QueryRow(b.ctx, `SELECT string_agg(md5(n::text), '') FROM generate_series(1, $1::int / 32) n`, bytes).Scan(&text)
	if err != nil {
		b.Fatal(err)
	}
	return text
}

func TestNotesAreKeptWithResultsAndErrors(t *testing.T) {
	b := newBed(t, Config{})
	b.push("", "", "")
	locks := b.claim(3)
	for i, l := range locks[:2] {
		run := Run{Queue: b.q, Entry: l.Entries[0], Lock: l}
		run.Note(json.RawMessage(`{"slot": 4}`))
		var err error
		if i == 1 {
			err = WithClass("oom", ErrInvalid)
		}
		b.settle(last(Judge(&run, nil, err, time.Second, 0)))
	}
	b.settle(doneAll(locks[2])...)
	if n := b.count(`SELECT count(*) FROM penstock.result WHERE meta->>'slot' = '4'`); n != 1 {
		t.Errorf("%d results have the note, want 1", n)
	}
	if n := b.count(`SELECT count(*) FROM penstock.entry_work WHERE history->0->'meta'->>'slot' = '4'`); n != 1 {
		t.Errorf("%d histories have the note, want 1", n)
	}
}

func TestPoisonIsReported(t *testing.T) {
	b := newBed(t, Config{CrashLimit: 1})
	b.pushAll(b.pool, withCallback())
	b.claimOne()
	b.exec(b.pool, `UPDATE penstock.node SET beat_at = now() - interval '2 hours' WHERE id = $1`, here)
	locks, err := HeldLocks(b.ctx, b.pool)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := b.q.Recover(b.ctx, refs(locks), nil, true); err != nil {
		t.Fatal(err)
	}
	b.wantCalls("failed")
	if class := b.calls()[0]["class"]; class != "poison" {
		t.Errorf("callback says class %v", class)
	}
}

// What could not be said to the receiver must not keep the entry from its end, nor the others that end with it.
func TestEndingIsRecordedWhateverItsCallbackIs(t *testing.T) {
	b := newBed(t, Config{})
	wide := fmt.Sprintf(`{"url": "http://%s/"}`, strings.Repeat("日", 128))
	large := fmt.Sprintf(`{"url": "http://client.example/", "context": %q}`, strings.Repeat("x", 2<<20))
	b.pushAll(b.pool, Push{Callback: json.RawMessage(wide)}, Push{Callback: json.RawMessage(wide)})
	// A push refuses such a context; an entry that was accepted before has it.
	b.exec(b.pool, `UPDATE penstock.entry SET callback = $1 WHERE id = (SELECT max(id) FROM penstock.entry WHERE queue_id = $2)`, large, b.q.ID)
	b.settle(doneAll(b.claim(2)...)...)
	b.wantCalls("done", "done")
	if calls := b.calls(); calls[1]["context_omitted"] != true {
		t.Errorf("callback with a context of 2 MiB says %.200v", calls[1])
	}
	for _, sql := range []string{
		`SELECT penstock.drop_queue('webhook', true)`, `SELECT penstock.alter_queue('webhook', '{"capacity": 1}')`,
		`SELECT penstock.alter_queue('webhook', '{"kind": "task"}')`, `SELECT penstock.alter_queue('webhook', '{"payload_limit": 10}')`,
	} {
		if _, err := b.pool.Exec(b.ctx, sql); err == nil || !strings.Contains(err.Error(), "could not end") {
			t.Errorf("%s: %v, want it refused", sql, err)
		}
	}
	b.exec(b.pool, `SELECT penstock.alter_queue('webhook', '{"retry": {"max_attempts": 3}, "failure_retention": "3 days"}')`)
}
