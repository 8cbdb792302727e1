package invalidation

import (
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"
)

// The model is the queue without a database: maps, one thread, no races. Random operations go to both, and after each
// the two must agree on every entry, lock and outcome. What the database may choose, such as which ready row of a key
// it meets first, is held by properties instead.

type modelEntry struct {
	id       EntryID
	key      string
	place    int // in line, for solo entries
	due      int // the tick at which it was promoted, 0 if it never was
	initial  bool
	disabled bool
	attempt  int
	crashes  int
	marked   bool // that it may have run
	wished   bool // that it be cancelled
}

type modelLock struct {
	lock    *Lock
	last    EntryID
	claimed int // the tick of its claim
	done    int // of its entries, settled
}

type model struct {
	entries  map[EntryID]*modelEntry
	locks    map[string]*modelLock
	stale    []*Lock
	outcomes map[EntryID]string
	tokens   map[string]Token
	holders  map[string]EntryID // of unique keys
	tick     int
}

const (
	modelQuantum    = 3
	modelCrashLimit = 2
)

// covered are the entries that a claim of the key would hand out now.
func (m *model) covered(key string) []EntryID {
	var ids []EntryID
	for id, e := range m.entries {
		if e.key == key && !e.initial && !e.disabled {
			ids = append(ids, id)
		}
	}
	slices.Sort(ids)
	return ids[:min(len(ids), modelQuantum)]
}

// claimable are the keys that can be claimed now; solo ones in the order of their places.
func (m *model) claimable() (solo, groups []string) {
	for _, e := range m.entries {
		if m.locks[e.key] != nil || len(m.covered(e.key)) == 0 || slices.Contains(groups, e.key) {
			continue
		}
		if e.key[0] == '#' {
			solo = append(solo, e.key)
		} else {
			groups = append(groups, e.key)
		}
	}
	slices.SortFunc(solo, func(a, b string) int { return m.solo(a).place - m.solo(b).place })
	return solo, groups
}

func (m *model) solo(key string) *modelEntry {
	var id EntryID
	_, _ = fmt.Sscanf(key, "#%d", &id)
	return m.entries[id]
}

// runs is what the schema calls running: a lock covers the entry.
func (m *model) runs(e *modelEntry) bool {
	l := m.locks[e.key]
	return l != nil && !e.initial && e.id <= l.last
}

func (m *model) end(id EntryID, outcome string) {
	delete(m.entries, id)
	m.outcomes[id] = outcome
}

// machine applies operations to both sides.
type machine struct {
	*rapid.T
	b     *bed
	m     *model
	lanes []Lane
}

func (x *machine) must(err error) {
	x.Helper()
	if err != nil {
		x.Fatal(err)
	}
}

func (x *machine) anyEntry() *modelEntry {
	if len(x.m.entries) == 0 {
		x.Skip("no entries")
	}
	return x.m.entries[rapid.SampledFrom(slices.Sorted(maps.Keys(x.m.entries))).Draw(x.T, "entry")]
}

func (x *machine) anyLock() *modelLock {
	if len(x.m.locks) == 0 {
		x.Skip("no locks")
	}
	return x.m.locks[rapid.SampledFrom(slices.Sorted(maps.Keys(x.m.locks))).Draw(x.T, "lock")]
}

// Push pushes a few entries at once: solo, groups, deferred, in two lanes.
func (x *machine) Push() {
	n := rapid.IntRange(1, 4).Draw(x.T, "n")
	pushes := make([]Push, n)
	for i := range pushes {
		p := withPayload(Push{LockKey: rapid.SampledFrom([]string{"", "", "J", "K"}).Draw(x.T, "key")})
		if p.LockKey != "" {
			p.Flow = rapid.SampledFrom([]string{"", "x"}).Draw(x.T, "flow")
		}
		if rapid.IntRange(0, 4).Draw(x.T, "deferred") == 0 {
			p.DueAt = time.Now().Add(time.Hour)
		}
		pushes[i] = p
	}
	pushed, err := x.b.q.Push(x.b.ctx, pushes...)
	x.must(err)
	for i, p := range pushed {
		e := &modelEntry{id: p.ID, key: pushes[i].LockKey, place: x.m.tick, initial: !pushes[i].DueAt.IsZero()}
		if e.key == "" {
			e.key = soloKey(p.ID)
		}
		x.m.tick++
		x.m.entries[p.ID] = e
	}
}

// PushUnique pushes one that may not be queued twice.
func (x *machine) PushUnique() {
	policy := rapid.SampledFrom([]UniquePolicy{WhileActive, WhileQueued}).Draw(x.T, "policy")
	unique := string(policy)
	pushed, err := x.b.q.Push(x.b.ctx, withPayload(Push{UniqueKey: unique, UniquePolicy: policy, Name: unique}))
	x.must(err)
	want, holder := Inserted, x.m.entries[x.m.holders[unique]]
	if holder != nil && (policy == WhileActive || !x.m.runs(holder)) {
		want = Duplicate
	}
	if pushed[0].Verdict != want || (want == Duplicate && pushed[0].ID != holder.id) {
		x.Fatalf("pushed %v; want %s beside %+v", pushed, want, holder)
	}
	if want == Duplicate {
		return
	}
	x.m.holders[unique] = pushed[0].ID
	x.m.entries[pushed[0].ID] = &modelEntry{id: pushed[0].ID, key: soloKey(pushed[0].ID), place: x.m.tick}
	x.m.tick++
}

// Claim claims from a lane: much or little, swiftly or stubbornly.
func (x *machine) Claim() {
	lane := rapid.SampledFrom(x.lanes).Draw(x.T, "lane")
	limit := rapid.SampledFrom([]int{1, 2, 1000}).Draw(x.T, "limit")
	x.claim(lane, limit, rapid.Bool().Draw(x.T, "stubborn"))
}

// ClaimAll claims from every lane, and wants everything that the model says is claimable.
func (x *machine) ClaimAll() {
	solo, groups := x.m.claimable()
	for _, lane := range x.lanes {
		x.claim(lane, 1000, false)
	}
	for _, key := range append(solo, groups...) {
		if x.m.locks[key] == nil {
			x.Fatalf("%s was not claimed", key)
		}
	}
}

func (x *machine) claim(lane Lane, limit int, stubborn bool) {
	x.Helper()
	solo, groups := x.m.claimable()
	c := x.b.claimAs(ClaimRequest{Node: here, Lane: lane, Limit: limit, IgnoreRowLocks: stubborn})
	if len(c.Locks) > limit {
		x.Fatalf("claimed %d locks, asked for %d", len(c.Locks), limit)
	}
	for _, l := range c.Locks {
		if l.Solo() {
			if len(solo) == 0 || l.Key != solo[0] {
				x.Fatalf("claimed %s, want the solo entries in line: %v", l.Key, solo)
			}
			solo = solo[1:]
		} else if !slices.Contains(groups, l.Key) {
			x.Fatalf("claimed %s, which is held or empty", l.Key)
		}
		if got, want := entryIDs(l), x.m.covered(l.Key); !slices.Equal(got, want) {
			x.Fatalf("lock of %s covers %v, want %v", l.Key, got, want)
		}
		for _, e := range l.Entries {
			if w := x.m.entries[e.ID]; e.Attempt != w.attempt || e.Crashes != w.crashes || e.MayHaveRun != w.marked {
				x.Fatalf("entry %d came with %d attempts and %d crashes, may have run: %t; want %+v", e.ID, e.Attempt, e.Crashes, e.MayHaveRun, w)
			}
		}
		if l.Token <= x.m.tokens[l.Key] {
			x.Fatalf("%s got token %d after %d", l.Key, l.Token, x.m.tokens[l.Key])
		}
		x.m.tokens[l.Key] = l.Token
		x.m.locks[l.Key] = &modelLock{lock: l, last: l.Entries[len(l.Entries)-1].ID, claimed: x.m.tick}
		x.m.tick++
	}
}

// Settle ends one or more entries of a lock, in order, some way or other.
func (x *machine) Settle() {
	l := x.anyLock()
	left := l.lock.Entries[l.done:]
	n := rapid.IntRange(1, len(left)).Draw(x.T, "n")
	var endings []Ending
	over := n == len(left)
	for _, e := range left[:n] {
		entry, at := x.m.entries[e.ID], l.lock
		var ending Ending
		switch verb := rapid.SampledFrom([]string{"done", "done", "retry", "fail", "snooze", "expire", "cancel", "release", "yield"}).Draw(x.T, "verb"); verb {
		case "done":
			ending = Done(at, e.ID, nil, 0)
			x.m.end(e.ID, "done")
		case "retry":
			ending = Retry(at, e.ID, Failure{Error: "x"}, time.Hour, 0)
			entry.initial = true
			entry.attempt++
		case "fail":
			ending = Fail(at, e.ID, Failure{Error: "x"}, 0)
			x.m.end(e.ID, "failed")
		case "snooze":
			ending = Postpone(at, e.ID, time.Hour)
			entry.initial = true
		case "expire":
			ending = Expire(at, e.ID, "late")
			x.m.end(e.ID, "expired")
		case "cancel":
			ending = Cancel(at, e.ID, "wish")
			x.m.end(e.ID, "cancelled")
		case "release":
			ending, over = Release(at, e.ID, 0), true
		case "yield":
			ending, over = Yield(at, e.ID), true
		}
		ending.Last = over
		endings = append(endings, ending)
		l.done++
		if over {
			break
		}
	}
	endings[len(endings)-1].Last = over
	// A handler's update and its last ending may come in one settle or in two.
	if len(endings) > 1 && rapid.Bool().Draw(x.T, "apart") {
		x.b.settle(endings[:1]...)
		endings = endings[1:]
	}
	x.b.settle(endings...)
	if over {
		x.unlock(l.lock)
	}
}

func (x *machine) unlock(l *Lock) {
	delete(x.m.locks, l.Key)
	x.m.stale = append(x.m.stale, l)
}

// SettleStale settles under a token that is gone: nothing may change.
func (x *machine) SettleStale() {
	if len(x.m.stale) == 0 {
		x.Skip("no stale locks")
	}
	l := rapid.SampledFrom(x.m.stale).Draw(x.T, "stale")
	if n := x.b.settleOn(x.b.pool, append(doneAll(l), last(Fail(l, l.Entries[0].ID, Failure{}, 0)))...); n != 0 {
		x.Fatalf("a stale settle of %s was accepted", l.Key)
	}
}

// Promote lets one entry come due.
func (x *machine) Promote() {
	e := x.anyEntry()
	if !e.initial {
		x.Skip("not initial")
	}
	x.b.exec(x.b.pool, `UPDATE penstock.entry SET due_at = clock_timestamp() WHERE queue_id = $1 AND id = $2`, x.b.q.ID, e.id)
	n, err := x.b.q.Promote(x.b.ctx, 10)
	x.must(err)
	if n != 1 {
		x.Fatalf("promoted %d, want 1", n)
	}
	e.initial, e.place, e.due = false, x.m.tick, x.m.tick
	x.m.tick++
}

// Cancel cancels an entry wherever it is.
func (x *machine) Cancel() {
	e := x.anyEntry()
	want := cancelDone
	if x.m.runs(e) {
		want = cancelRequested
	}
	got, err := cancelEntry(x.b.ctx, x.b.pool, e.id, ann)
	x.must(err)
	if got != want {
		x.Fatalf("cancel of %+v: %s, want %s", e, got, want)
	}
	if e.wished = got == cancelRequested; !e.wished {
		x.m.end(e.id, "cancelled")
	}
}

// SettleCancels ends what was asked to end and has come back into line.
func (x *machine) SettleCancels() {
	n, err := x.b.q.SettleCancelRequests(x.b.ctx, 1000)
	x.must(err)
	for _, e := range slices.Collect(maps.Values(x.m.entries)) {
		if e.wished && !x.m.runs(e) {
			x.m.end(e.id, "cancelled")
			n--
		}
	}
	if n != 0 {
		x.Fatalf("%d more entries were cancelled than were asked for", n)
	}
}

// Disable and Enable take an entry out of line and put it back.
func (x *machine) Disable() {
	e := x.anyEntry()
	x.must(disableEntry(x.b.ctx, x.b.pool, e.id, ann))
	e.disabled = true
}

func (x *machine) Enable() {
	e := x.anyEntry()
	x.must(enableEntry(x.b.ctx, x.b.pool, e.id, ann))
	e.disabled = false
}

// Recover takes a lock away: its node died, or forgot it.
func (x *machine) Recover() {
	l := x.anyLock()
	died := rapid.Bool().Draw(x.T, "died")
	if died {
		x.b.exec(x.b.pool, `UPDATE penstock.node SET beat_at = clock_timestamp() - interval '1 day' WHERE id = $1`, here)
	}
	r, err := x.b.q.Recover(x.b.ctx, []LockRef{{QueueID: x.b.q.ID, Key: l.lock.Key, Token: l.lock.Token}}, nil, died)
	x.must(err)
	if len(r.Freed) != 1 {
		x.Fatalf("freed %d locks, want 1", len(r.Freed))
	}
	covered := func(id EntryID) bool {
		e := x.m.entries[id]
		return e.key == l.lock.Key && (l.lock.Solo() || !e.initial && !e.disabled && id <= l.last)
	}
	for id, e := range x.m.entries {
		e.marked = e.marked || covered(id)
	}
	x.unlock(l.lock)
	if !died {
		return
	}
	x.b.exec(x.b.pool, `UPDATE penstock.node SET beat_at = clock_timestamp() WHERE id = $1`, here)
	// The crash is counted for what ran: of a group the oldest entry that is left and was due at the claim.
	for _, id := range slices.Sorted(maps.Keys(x.m.entries)) {
		e := x.m.entries[id]
		if !covered(id) || !l.lock.Solo() && e.due > l.claimed {
			continue
		}
		if e.crashes++; e.crashes >= modelCrashLimit {
			x.m.end(id, "failed")
		}
		return
	}
}

// Check compares the two sides. Rapid calls it after every operation.
func (x *machine) Check() {
	var want []string
	for id, e := range x.m.entries {
		want = append(want, fmt.Sprintf("entry %d: key %s, initial %t, disabled %t, attempt %d, crashes %d", id, e.key, e.initial, e.disabled, e.attempt, e.crashes))
	}
	for key, l := range x.m.locks {
		want = append(want, fmt.Sprintf("lock of %s: token %d, up to %d", key, l.lock.Token, l.last))
	}
	for id, outcome := range x.m.outcomes {
		want = append(want, fmt.Sprintf("outcome of %d: %s", id, outcome))
	}
	slices.Sort(want)
	var got []string
	x.must(x.b.pool.QueryRow(x.b.ctx, modelStateSQL).Scan(&got))
	slices.Sort(got)
	if !slices.Equal(got, want) {
		x.Fatalf("the database has\n  %s\nthe model has\n  %s", strings.Join(got, "\n  "), strings.Join(want, "\n  "))
	}
}

const modelStateSQL = `
SELECT coalesce(array_agg(line), '{}') FROM (
    SELECT format('entry %s: key %s, initial %s, disabled %s, attempt %s, crashes %s', id, coalesce(lock_key, '#' || id),
                  CASE status WHEN 'initial' THEN 'true' ELSE 'false' END, CASE WHEN priority < 0 THEN 'true' ELSE 'false' END, attempt, crashes) AS line
      FROM penstock.entry
    UNION ALL SELECT format('lock of %s: token %s, up to %s', lock_key, token, last_entry_id) FROM penstock.lock
    UNION ALL SELECT format('outcome of %s: %s', entry_id, outcome) FROM penstock.result
    UNION ALL SELECT format('outcome of %s: failed', entry_id) FROM penstock.failure
    UNION ALL SELECT 'broken: ' || invariant || ': ' || detail FROM penstock.check_invariants()) s`

func TestLongTheQueueBehavesAsItsModel(t *testing.T) {
	b := newBed(t, Config{QuantumCount: modelQuantum, CrashLimit: modelCrashLimit})
	rapid.Check(t, func(rt *rapid.T) {
		b.exec(b.pool, `TRUNCATE penstock.entry, penstock.ready, penstock.lock, penstock.result, penstock.failure, penstock.uniqueness,
		                penstock.cancel_request, penstock.progress`)
		x := &machine{T: rt, b: b, lanes: []Lane{{1, ""}, {1, "x"}}, m: &model{
			entries: map[EntryID]*modelEntry{}, locks: map[string]*modelLock{}, outcomes: map[EntryID]string{}, tokens: map[string]Token{},
			holders: map[string]EntryID{},
		}}
		op := func(fn func()) func(*rapid.T) { return func(*rapid.T) { fn() } }
		rt.Repeat(map[string]func(*rapid.T){
			"": op(x.Check), "push": op(x.Push), "push more": op(x.Push), "push unique": op(x.PushUnique), "claim": op(x.Claim), "claim all": op(x.ClaimAll),
			"settle": op(x.Settle), "settle more": op(x.Settle), "settle stale": op(x.SettleStale), "promote": op(x.Promote), "cancel": op(x.Cancel),
			"settle cancels": op(x.SettleCancels), "disable": op(x.Disable), "enable": op(x.Enable), "recover": op(x.Recover),
		})
	})
}
