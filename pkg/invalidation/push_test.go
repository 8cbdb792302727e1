package invalidation

import (
	"context"
	"database/sql"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	_ "github.com/jackc/pgx/v5/stdlib"
)

func TestPushIsAllOrNothing(t *testing.T) {
	b := newBed(t, Config{PayloadLimit: 100})
	_, err := b.q.Push(b.ctx, Push{Payload: json.RawMessage(`{}`)}, Push{Payload: json.RawMessage(`"` + strings.Repeat("x", 200) + `"`)})
	if !errors.Is(err, ErrPayloadTooLarge) || !strings.Contains(err.Error(), "payload of entry 2") {
		t.Errorf("error is %v, want ErrPayloadTooLarge that names the entry", err)
	}
	tx := b.begin()
	b.pushOn(tx, "", "K")
	if err := tx.Rollback(b.ctx); err != nil {
		t.Fatal(err)
	}
	if n := b.count(`SELECT (SELECT count(*) FROM penstock.entry) + (SELECT count(*) FROM penstock.ready)`); n != 0 {
		t.Errorf("%d rows are left of pushes that failed", n)
	}
}

func TestPushRefusesByTheNameOfTheField(t *testing.T) {
	b := newBed(t, Config{})
	ten := int16(10)
	hour := time.Now().Add(time.Hour)
	for want, p := range map[string]Push{
		`lock_key begins with "#"`:     {LockKey: "#1"},
		"lock_key is longer":           {LockKey: strings.Repeat("k", 513)},
		"flow is longer":               {Flow: strings.Repeat("f", 257)},
		"priority is not":              {Priority: &ten},
		"name is longer":               {Name: strings.Repeat("n", 257)},
		"unique_policy is not one of":  {UniqueKey: "u", UniquePolicy: "sometimes"},
		"unique_policy is given with":  {UniquePolicy: WhileActive},
		"finish_by is before start_by": {StartBy: hour, FinishBy: hour.Add(-time.Minute)},
		"start_by is before due_at":    {DueAt: hour, StartBy: hour.Add(-time.Minute)},
		"cost is not between 0":        {Cost: -1},
		"cost is not between 0 and 1e": {Cost: 2e38}, // two of them in one lock are no number of the server
		"start_by is in the past":      {StartBy: time.Date(1999, 1, 1, 0, 0, 0, 0, time.UTC), FinishBy: hour},
		"finish_by is in the past":     {FinishBy: time.Now().Add(-2 * time.Minute)},
	} {
		_, err := b.q.Push(b.ctx, withPayload(Push{}), withPayload(p))
		if !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), want) || !strings.Contains(err.Error(), "entry 2") {
			t.Errorf("%s: error is %v", want, err)
		}
	}
	if _, err := pushOn(b.ctx, b.pool, "nowhere", []Push{{Payload: json.RawMessage(`1`)}}); !errors.Is(err, ErrQueueNotFound) {
		t.Errorf("push to no queue: %v", err)
	}
	if _, err := b.q.Push(b.ctx, Push{Payload: json.RawMessage(`{not json`)}); !errors.Is(err, ErrInvalid) {
		t.Errorf("payload that is not JSON: %v, want ErrInvalid", err)
	}
	if _, err := b.q.Push(b.ctx, Push{Payload: json.RawMessage(`"\u0000"`)}); !errors.Is(err, ErrInvalid) {
		t.Errorf("payload that jsonb cannot hold: %v, want ErrInvalid", err)
	}
	if _, err := b.q.Push(b.ctx, Push{Payload: json.RawMessage(`1`), Flow: "a\x00b"}); !errors.Is(err, ErrInvalid) {
		t.Errorf("flow with NUL: %v, want ErrInvalid", err)
	}
	if pushed, err := b.q.Push(b.ctx); err != nil || len(pushed) != 0 {
		t.Errorf("pushing nothing gave %v, %v", pushed, err)
	}
}

// A handle may be older than the queue's settings. A plain push asks the registry for those that concern it.
func TestAPlainPushFollowsWhatTheQueueHasBecome(t *testing.T) {
	for n := 1; n <= 2; n++ {
		t.Run(fmt.Sprint(n), func(t *testing.T) { plainPushFollows(t, n) })
	}
}

func plainPushFollows(t *testing.T, n int) {
	b := newBed(t, Config{})
	alter := func(options map[string]any) {
		if _, err := Alter(b.ctx, b.pool, b.q.Name, options); err != nil {
			t.Fatal(err)
		}
	}
	plain := func(payload string) ([]Pushed, error) {
		return b.q.Push(b.ctx, slices.Repeat([]Push{{Payload: json.RawMessage(payload)}}, n)...)
	}
	alter(map[string]any{"entry_priority": 4})
	if _, err := plain(`{"a": "K"}`); err != nil {
		t.Fatal(err)
	}
	alter(map[string]any{"payload_limit": 100})
	if _, err := plain(`"` + strings.Repeat("x", 200) + `"`); !errors.Is(err, ErrPayloadTooLarge) {
		t.Errorf("payload over a limit that was lowered: %v", err)
	}
	alter(map[string]any{"grouping": "a"})
	if _, err := plain(`{"a": "K"}`); err != nil {
		t.Fatal(err)
	}
	alter(map[string]any{"capacity": 2 * n})
	if _, err := plain(`{"a": "K"}`); !errors.Is(err, ErrQueueFull) {
		t.Errorf("push to a queue that was bounded since: %v", err)
	}
	var found string
	if err := b.pool.QueryRow(b.ctx, `SELECT string_agg(priority || coalesce(lock_key, '-'), ' ' ORDER BY id) FROM penstock.entry`).Scan(&found); err != nil {
		t.Fatal(err)
	}
	if want := map[int]string{1: "4- 4K", 2: "4- 4- 4K 4K"}[n]; found != want {
		t.Errorf("priorities and keys are %q", found)
	}
}

func TestAPlainPushToADroppedQueueIsRefusedAndToOneOfTheSameNameAccepted(t *testing.T) {
	b := newBed(t, Config{})
	b.push("") // the statement is prepared
	if err := Drop(b.ctx, b.pool, b.q.Name, true, By{}); err != nil {
		t.Fatal(err)
	}
	if _, err := b.q.Push(b.ctx, withPayload(Push{})); !errors.Is(err, ErrQueueNotFound) {
		t.Errorf("push to a dropped queue: %v", err)
	}
	tx := b.begin()
	if _, err := b.q.WithTx(tx).Push(b.ctx, withPayload(Push{})); !errors.Is(err, ErrQueueNotFound) {
		t.Errorf("push to a dropped queue inside a transaction: %v", err)
	}
	if err := tx.Rollback(b.ctx); err != nil {
		t.Fatal(err)
	}
	if _, err := Create(b.ctx, b.pool, b.q.Name, Config{}); err != nil {
		t.Fatal(err)
	}
	if pushed, err := b.q.Push(b.ctx, withPayload(Push{})); err != nil || len(pushed) != 1 {
		t.Errorf("push to a queue that took the name: %v, %v", pushed, err)
	}
}

// The four ways in write the same rows.
func TestEveryWayInFollowsTheSameRules(t *testing.T) {
	b := newBed(t, Config{Grouping: "a.key", EntryPriority: 3})
	prio := int16(7)
	at := time.Now().Add(time.Hour).Truncate(time.Second)
	full := Push{
		Payload: json.RawMessage(`{"x": [1, "é", null]}`), LockKey: "K", Flow: "f", Priority: &prio, DueAt: at, StartBy: at.Add(time.Minute),
		FinishBy: at.Add(time.Hour), Cost: 1.5, Name: "job", UniqueKey: "u", UniquePolicy: WhileActive,
		Trace: "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", Callback: json.RawMessage(`{"url": "u"}`),
	}
	grouped := Push{Payload: json.RawMessage(`{"a": {"key": "G"}}`)}
	db, err := sql.Open("pgx", b.pool.Config().ConnString())
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	ways := map[string]func() error{
		"pool": func() error { _, err := b.q.Push(b.ctx, full, grouped); return err },
		"database/sql": func() error {
			tx, err := db.BeginTx(b.ctx, nil)
			if err != nil {
				return err
			}
			pushed, err := PushSQLTx(b.ctx, tx, "work", full, grouped)
			if err == nil && (len(pushed) != 2 || pushed[0].Verdict != Inserted || pushed[0].ID == 0) {
				t.Errorf("database/sql answered %v", pushed)
			}
			return errors.Join(err, tx.Commit())
		},
		"SQL": func() error {
			if _, err := b.pool.Exec(b.ctx, `SELECT penstock.push('work', '{"x": [1, "é", null]}', lock_key => 'K', flow => 'f', priority => 7,
			    due_at => $1::timestamptz, start_by => $1::timestamptz + interval '1 minute', finish_by => $1::timestamptz + interval '1 hour',
			    cost => 1.5, name => 'job', unique_key => 'u', unique_policy => 'while_active',
			    trace => '00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01', callback => '{"url": "u"}')`, at); err != nil {
				return err
			}
			_, err := b.pool.Exec(b.ctx, `SELECT penstock.push('work', '{"a": {"key": "G"}}')`)
			return err
		},
	}
	rows := map[string]string{}
	for name, push := range ways {
		if err := push(); err != nil {
			t.Fatalf("%s: %v", name, err)
		}
		var row string
		if err := b.pool.QueryRow(b.ctx, `SELECT jsonb_agg(to_jsonb(e) - 'id' - 'created_at' ORDER BY id)::text ||
		    (SELECT jsonb_agg(to_jsonb(r) - 'pos')::text FROM penstock.ready r) FROM penstock.entry e`).Scan(&row); err != nil {
			t.Fatal(err)
		}
		rows[name] = row
		b.exec(b.pool, `TRUNCATE penstock.entry, penstock.ready, penstock.uniqueness`)
	}
	for name, row := range rows {
		if row != rows["pool"] {
			t.Errorf("%s wrote\n%s, the pool\n%s", name, row, rows["pool"])
		}
	}
	for _, want := range []string{`"lock_key": "G"`, `"priority": 3`, `"lock_key": "K"`, `"cost": 1.5`, `"status": "initial"`} {
		if !strings.Contains(rows["pool"], want) {
			t.Errorf("no %s in %s", want, rows["pool"])
		}
	}
}

// Deadlines of the queue are for entries without their own, and count from the push or the due time.
func TestEntriesWithoutADeadlineGetThoseOfTheirQueue(t *testing.T) {
	b := newBed(t, Config{StartWithin: time.Hour, FinishWithin: 2 * time.Hour})
	b.want(b.q.Config.StartWithin, time.Hour)
	b.want(b.q.Config.FinishWithin, 2*time.Hour)
	own := time.Now().Add(3 * time.Hour)
	ids := b.pushAll(b.pool, Push{}, Push{Flow: "f"}, Push{DueAt: time.Now().Add(24 * time.Hour)}, Push{StartBy: own}, Push{FinishBy: own})
	alone, err := b.q.Push(b.ctx, Push{Payload: json.RawMessage(`{}`)})
	b.must(err)
	for id, want := range map[EntryID][2]int{
		ids[0]: {60, 120}, ids[1]: {60, 120}, ids[2]: {25 * 60, 26 * 60}, ids[3]: {180, 300}, ids[4]: {60, 180}, alone[0].ID: {60, 120},
	} {
		const minutes = `SELECT round(extract(epoch FROM %s - created_at) / 60) FROM penstock.entry WHERE id = $1`
		b.want(b.count(fmt.Sprintf(minutes, "start_by"), id), want[0])
		b.want(b.count(fmt.Sprintf(minutes, "finish_by"), id), want[1])
	}
	// A handle that was opened before the setting came pushes under it all the same.
	old, err := Alter(b.ctx, b.pool, b.q.Name, map[string]any{"start_within": nil, "finish_within": nil})
	b.must(err)
	_, err = Alter(b.ctx, b.pool, b.q.Name, map[string]any{"start_within": "1 hour"})
	b.must(err)
	pushed, err := old.Push(b.ctx, Push{Payload: json.RawMessage(`{}`)})
	b.must(err)
	b.want(b.count(`SELECT count(*) FROM penstock.entry WHERE id = $1 AND start_by IS NOT NULL`, pushed[0].ID), 1)
	_, err = Alter(b.ctx, b.pool, b.q.Name, map[string]any{"finish_within": "5 minutes"})
	if err == nil || !strings.Contains(err.Error(), "finish_within is less than start_within") {
		t.Errorf("error %v, want that it is less than start_within", err)
	}
}

func TestIdempotencyKeyNamesTheFirstEntry(t *testing.T) {
	b := newBed(t, Config{})
	p := Push{Payload: json.RawMessage(`{"a": 1}`), IdempotencyKey: "i"}
	tx := b.begin()
	first, err := b.q.WithTx(tx).Push(b.ctx, p, p)
	if err != nil || first[0].Verdict != Inserted || first[1] != (Pushed{first[0].ID, Replayed}) {
		t.Fatalf("first push: %v, %v", first, err)
	}
	b.commit(tx)
	same := p
	same.Payload = json.RawMessage(` {"a":1} `)
	again, err := b.q.Push(b.ctx, Push{Payload: json.RawMessage(`2`)}, same)
	if err != nil || again[0].Verdict != Inserted || again[1] != (Pushed{first[0].ID, Replayed}) {
		t.Fatalf("second push: %v, %v", again, err)
	}
	for name, other := range map[string]Push{
		"payload": {Payload: json.RawMessage(`{"a": 2}`), IdempotencyKey: "i"},
		"key":     {Payload: p.Payload, IdempotencyKey: "i", LockKey: "K"},
		"name":    {Payload: p.Payload, IdempotencyKey: "i", Name: "n"},
	} {
		if _, err := b.q.Push(b.ctx, other); !errors.Is(err, ErrIdempotencyConflict) {
			t.Errorf("another %s: %v, want ErrIdempotencyConflict", name, err)
		} else if want := fmt.Sprintf("another body, by entry %d", first[0].ID); !strings.Contains(err.Error(), want) {
			t.Errorf("another %s: %v, want the entry of the key", name, err)
		}
	}
	twice := []Push{{Payload: p.Payload, IdempotencyKey: "two"}, {Payload: json.RawMessage(`2`), IdempotencyKey: "two"}}
	if _, err := b.q.Push(b.ctx, twice...); !errors.Is(err, ErrIdempotencyConflict) || !strings.Contains(err.Error(), "in this push") {
		t.Errorf("two bodies in one push: %v", err)
	}
	elsewhere := p
	elsewhere.Flow = "other"
	if pushed, err := b.q.Push(b.ctx, elsewhere); err != nil || pushed[0].Verdict != Inserted {
		t.Errorf("the same key of another flow: %v, %v", pushed, err)
	}
	// The key outlives the entry.
	b.settle(doneAll(b.claim(9)...)...)
	if pushed, err := b.q.Push(b.ctx, p); err != nil || pushed[0] != (Pushed{first[0].ID, Replayed}) {
		t.Errorf("after the end: %v, %v", pushed, err)
	}
}

func TestOfManyPushesWithOneKeyOneInserts(t *testing.T) {
	for name, p := range map[string]Push{
		"idempotency":            {IdempotencyKey: "i"},
		"while_queued":           {UniqueKey: "u", UniquePolicy: WhileQueued},
		"while_active":           {UniqueKey: "u", UniquePolicy: WhileActive},
		"one_running_one_queued": {UniqueKey: "u", UniquePolicy: OneRunningOneQueued},
	} {
		b := newBed(t, Config{})
		var mu sync.Mutex
		ids := map[EntryID]int{}
		var wg sync.WaitGroup
		for range 16 {
			wg.Go(func() {
				for range 3 {
					pushed, err := b.q.Push(b.ctx, withPayload(p))
					if err != nil {
						t.Error(name, err)
						return
					}
					mu.Lock()
					ids[pushed[0].ID]++
					mu.Unlock()
				}
			})
		}
		wg.Wait()
		if n := b.count(`SELECT count(*) FROM penstock.entry`); n != 1 || len(ids) != 1 {
			t.Errorf("%s: %d entries, %d ids", name, n, len(ids))
		}
	}
}

func TestPushThatRollsBackLeavesItsKeysFree(t *testing.T) {
	for name, p := range map[string]Push{
		"idempotency": {IdempotencyKey: "i"}, "uniqueness": {UniqueKey: "u", UniquePolicy: WhileActive},
	} {
		b := newBed(t, Config{})
		first := b.begin()
		b.pushAll(first, p)
		second := later(b, func() ([]Pushed, error) { return b.q.Push(b.ctx, withPayload(p)) })
		b.awaitBlocked(first)
		if err := first.Rollback(b.ctx); err != nil {
			t.Fatal(err)
		}
		if got := second(); got[0].Verdict != Inserted {
			t.Errorf("%s: the push that waited got %v", name, got)
		}
	}
}

func TestKeyOfADuplicateStandsForTheEntryThatDoesTheWork(t *testing.T) {
	b := newBed(t, Config{})
	push := func(p Push) Pushed {
		pushed, err := b.q.Push(b.ctx, withPayload(p), withPayload(Push{Flow: "another", IdempotencyKey: p.IdempotencyKey}))
		if err != nil {
			t.Fatal(err)
		}
		return pushed[0]
	}
	first := push(Push{UniqueKey: "u", UniquePolicy: WhileActive, IdempotencyKey: "i"})
	for _, want := range []Verdict{Duplicate, Replayed} {
		if got := push(Push{UniqueKey: "u", UniquePolicy: WhileActive, IdempotencyKey: "j", Flow: "f"}); got != (Pushed{first.ID, want}) {
			t.Errorf("%v, want entry %d, %s", got, first.ID, want)
		}
	}
}

func TestUniquePoliciesEndWhereTheySay(t *testing.T) {
	for policy, want := range map[UniquePolicy]struct{ queued, running, ended Verdict }{
		WhileQueued:         {Duplicate, Inserted, Inserted},
		WhileActive:         {Duplicate, Duplicate, Inserted},
		OneRunningOneQueued: {Duplicate, Inserted, Inserted},
	} {
		b := newBed(t, Config{})
		p := Push{Payload: json.RawMessage(`{}`), UniqueKey: "u", UniquePolicy: policy}
		push := func() Verdict {
			pushed, err := b.q.Push(b.ctx, p)
			if err != nil {
				t.Fatal(err)
			}
			return pushed[0].Verdict
		}
		push()
		if got := push(); got != want.queued {
			t.Errorf("%s: %s while queued, want %s", policy, got, want.queued)
		}
		first := b.claimOne()
		if got := push(); got != want.running {
			t.Errorf("%s: %s while running, want %s", policy, got, want.running)
		}
		if policy == OneRunningOneQueued {
			if got := push(); got != Duplicate {
				t.Errorf("%s: %s while one runs and one is queued", policy, got)
			}
			if got := b.claim(9); len(got) != 0 {
				t.Errorf("%s: two run at once", policy)
			}
		}
		b.settle(doneAll(first)...)
		for _, l := range b.claim(9) {
			b.settle(doneAll(l)...)
		}
		if got := push(); got != want.ended {
			t.Errorf("%s: %s after the end, want %s", policy, got, want.ended)
		}
	}
}

// A push that is answered with a queued entry stands for a change that the entry has yet to see: the entry must not
// start before that change is committed, wherever in line it stands.
func TestADuplicateKeepsTheQueuedEntryFromStartingBeforeItCommits(t *testing.T) {
	for name, prepare := range map[string]func(*bed, EntryID){
		"fresh": func(*bed, EntryID) {},
		"retried": func(b *bed, id EntryID) {
			b.settle(last(Retry(b.claimOne(), id, Failure{Error: "x"}, 0, 0)))
			if n, err := b.q.Promote(b.ctx, 1); n != 1 || err != nil {
				b.Fatal(n, err)
			}
		},
		"released": func(b *bed, id EntryID) { b.settle(releaseAll(b.claimOne())...) },
	} {
		b := newBed(t, Config{})
		p := Push{UniqueKey: "u", UniquePolicy: WhileQueued}
		id := b.pushAll(b.pool, p)[0]
		prepare(b, id)
		pusher := b.begin()
		if again := b.pushAll(pusher, p)[0]; again != id {
			t.Fatalf("%s: pushed %d, want the queued entry %d", name, again, id)
		}
		if got := b.claim(1); len(got) != 0 {
			t.Errorf("%s: the entry started while the push was open", name)
			b.settle(doneAll(got...)...)
			continue
		}
		b.commit(pusher)
		b.settle(doneAll(b.claimOne())...)
	}
}

func TestAFullQueueRefusesWithItsNumbers(t *testing.T) {
	b := newBed(t, Config{Capacity: 3})
	b.push("", "", "")
	_, err := b.q.Push(b.ctx, Push{Payload: json.RawMessage(`1`)})
	var full *FullError
	if !errors.Is(err, ErrQueueFull) || !errors.As(err, &full) || full.Depth != 3 || full.Capacity != 3 {
		t.Fatalf("error is %v (%+v), want ErrQueueFull with 3 of 3", err, full)
	}
	b.settle(doneAll(b.claim(2)...)...)
	b.push("", "")
	if _, err := b.q.Push(b.ctx, Push{Payload: json.RawMessage(`1`)}); !errors.Is(err, ErrQueueFull) {
		t.Fatalf("error is %v, want ErrQueueFull again", err)
	}
}

func TestAnOpenPushCountsAgainstTheCapacity(t *testing.T) {
	b := newBed(t, Config{Capacity: 100})
	tx := b.begin()
	b.pushOn(tx, make([]string, 90)...)
	b.count(`SELECT penstock.count_depth($1)`, b.q.ID)
	if _, err := b.q.Push(b.ctx, slices.Repeat([]Push{{Payload: json.RawMessage(`1`)}}, 20)...); !errors.Is(err, ErrQueueFull) {
		t.Errorf("20 beside 90 of an open push: %v", err)
	}
	b.commit(tx)
	b.count(`SELECT penstock.count_depth($1)`, b.q.ID)
	b.push(make([]string, 10)...)
}

func TestPushesThatMeetAtTheCapacityDoNotExceedIt(t *testing.T) {
	b := newBed(t, Config{Capacity: 100})
	var pushers sync.WaitGroup
	for range 12 {
		pushers.Go(func() {
			for range 10 { // each alone, not in a batch with others
				_, err := b.q.WithTx(b.pool).Push(b.ctx, slices.Repeat([]Push{{Payload: json.RawMessage(`1`)}}, 3)...)
				if err != nil && !errors.Is(err, ErrQueueFull) {
					t.Error(err)
				}
			}
		})
	}
	pushers.Wait()
	if n := b.count(`SELECT count(*) FROM penstock.entry`); n > 100 || n < 60 {
		t.Errorf("a queue of 100 accepted %d", n)
	}
}

func TestPushesOfNewFlowsDoNotMeet(t *testing.T) {
	b := newBed(t, Config{Capacity: 100})
	one, two := b.begin(), b.begin()
	b.pushAll(one, Push{Flow: "new"}, Push{LockKey: "K"})
	b.pushAll(two, Push{Flow: "new"}, Push{LockKey: "K"}) // would hang here
	b.commit(two)
	b.commit(one)
	b.push("K")
	var got []EntryID
	for _, l := range b.claim(9) {
		got = append(got, entryIDs(l)...)
	}
	if !slices.IsSorted(got) || len(got) != 3 {
		t.Errorf("claimed %v of K, want three in order", got)
	}
}

func TestAPusherThatIsKilledLeavesNothing(t *testing.T) {
	b := newBed(t, Config{})
	first := b.push("K")
	tx := b.begin()
	b.pushOn(tx, "K", "")
	b.exec(b.pool, `SELECT pg_terminate_backend($1, 5000)`, tx.Conn().PgConn().PID())
	if err := tx.Commit(context.WithoutCancel(b.ctx)); err == nil {
		t.Fatal("the killed transaction committed")
	}
	if got := entryIDs(b.claim(9)...); !slices.Equal(got, first) {
		t.Errorf("claimed %v, want %v", got, first)
	}
}

// The plain push measures no payload: it relies on this bound.
func TestNoPayloadIsStoredInMoreBytesThanItsBound(t *testing.T) {
	b := newBed(t, Config{})
	for _, text := range []string{
		`1`, `[]`, `{}`, `""`, `null`, `[1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1,1]`, `[[[[[[[[[[[[]]]]]]]]]]]]`, `{"":1,"a":[{},{},{}]}`, `[0.1,1e9,-1,1e-9]`,
		`[` + strings.Repeat(`1,`, 5000) + `1]`, strings.Repeat(`[`, 500) + strings.Repeat(`]`, 500), `[` + strings.Repeat(`{"":1},`, 999) + `1]`,
	} {
		bound := storedMax([]Push{{Payload: json.RawMessage(text)}})
		if n := b.count(`SELECT pg_column_size($1::jsonb)`, text); n > bound {
			t.Errorf("%.40s takes %d bytes, more than the bound of %d", text, n, bound)
		}
	}
}

func TestAPushInJSONHasItsPayloadAndTheOptionsThatItUses(t *testing.T) {
	lowest := int16(0)
	for want, push := range map[string]Push{
		`{"payload":null}`:                            {},
		`{"payload":1,"priority":0}`:                  {Payload: json.RawMessage(`1`), Priority: &lowest},
		`{"payload":null,"flow":"a","callback":null}`: {Flow: "a", Callback: json.RawMessage(`null`)},
		`{"payload":{},"due_at":"2026-11-29T00:00:00Z"}`: {
			Payload: json.RawMessage(`{}`), DueAt: time.Date(2026, 11, 29, 0, 0, 0, 0, time.UTC),
		},
	} {
		if got, err := json.Marshal(push); err != nil || string(got) != want {
			t.Errorf("%+v is %s (%v), want %s", push, got, err, want)
		}
	}
}
