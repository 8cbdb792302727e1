package sim

import (
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
)

// reply is what a statement answers.
type reply struct {
	rows [][]any
	tag  string
}

// statement is one statement of the product: what tells its text from others, a name for the steps
// that a failing seed prints, and what it does to the tables.
type statement struct {
	name, sign string
	do         func(t *tables, now time.Time, args arguments) (reply, error)
}

// statements are those of pkg/tasknode and of the lock recovery of pkg/recovery. TestStoreAgreesWithPostgres compares
// what they answer and change with Postgres, but for those that check the session, list queues, lanes and nodes, read
// the clock, and remove nodes; and no other transaction has locked an entry there.
var statements = []statement{
	{"check session", "current_setting('default_transaction_isolation')", checkSession},
	{"list queues", "FROM penstock.queue\n WHERE $1::text IS NULL OR application = $1", listQueues},
	{"list pauses", "FROM penstock.pause\n WHERE scope IN ('flow', 'model', 'application')", listNothing},
	{"list weights", "FROM penstock.flow_weight", listNothing},
	{"applications", "SELECT name, application, kind = 'webhook'", applications},
	{"register", "INSERT INTO penstock.node AS n (id, name", register},
	{"beat", "SET beat_at = clock_timestamp(), beat = beat + 1", beat},
	{"remove nodes", "DELETE FROM penstock.node n\n WHERE n.id = ANY", removeNodes},
	{"remove node", "DELETE FROM penstock.node n\n WHERE n.id = $1", removeNode},
	{"list lanes", "WITH RECURSIVE lane AS", listLanes},
	{"claim, lock first", "lock_group AS (", claimLockFirst},
	{"claim, one lane", "bool_and(r.entry_id IS NOT NULL) AS solo", claimOneLane},
	{"claim, delete first", "SELECT set_config('lock_timeout', '100ms', true)", claimDeleteFirst},
	{"read groups", "LIMIT least($4::int, l.entry_count)", readGroups},
	{"reclaim", "AND claim_id = $3 OFFSET 0", reclaim},
	{"await standby", "penstock.await_standby()", listNothing}, // it has none
	{"first unlocked", "ORDER BY pos LIMIT 1 FOR UPDATE SKIP LOCKED", firstUnlocked},
	{"sweep", "pos BETWEEN $4::bigint AND $5::bigint", sweep},
	{"finish solo", "unnest($2::bigint[], $3::bigint[], $4::jsonb[]", finishSolo},
	{"find held rows", "SELECT DISTINCT lock_key, token FROM asked ORDER BY lock_key", findHeld},
	{"hold locks", "penstock.need_read_committed()", holdLocks},
	{"done", "unnest($10::bigint[], $4::bigint[]", done},
	{"retry", "NOT k.spent OR k.attempt IS NULL", retry},
	{"fail", "count(penstock.add_failure(entry, least(attempt", fail},
	{"unlock", "WHEN 'back' THEN nextval('penstock.entry_id_seq')", unlock},
	{"read locks", "extract(epoch FROM clock_timestamp() - claimed_at)", readLocks},
	{"read nodes", "crashed_entries <> '{}', kind = 'gateway'", readNodes},
	{"read clock", "pg_postmaster_start_time()", readClock},
	{"hold for recovery", "FOR UPDATE OF l SKIP LOCKED", holdForRecovery},
	{"hold entries for recovery", "FROM covered WHERE (id IN (SELECT id FROM entries)) IS NOT TRUE", holdNoEntries},
	{"mark what may have run", "SET may_have_run = true", markMayHaveRun},
	{"count crashes", "WITH struck AS", countCrashes},
	{"take crashes back", "penstock.take_back_crashes($1)", takeBack},
	{"promote", "WHERE status = 'initial' AND due_at <=", promote},
}

// known are the statements that were met, by text.
var known sync.Map

func statementOf(sql string) *statement {
	met, _ := known.Load(sql)
	if s, ok := met.(*statement); ok {
		return s
	}
	s := find(sql)
	known.Store(sql, s)
	return s
}

func find(sql string) *statement {
	for i := range statements {
		if strings.Contains(sql, statements[i].sign) {
			return &statements[i]
		}
	}
	return &statement{name: "unknown", do: func(*tables, time.Time, arguments) (reply, error) {
		return reply{}, fmt.Errorf("the simulated store does not know the statement: %s", sql)
	}}
}

func seconds(d time.Duration) float64 { return d.Seconds() }

func affected(verb string, n int) reply { return reply{tag: fmt.Sprintf("%s %d", verb, n)} }

func checkSession(*tables, time.Time, arguments) (reply, error) {
	return reply{rows: [][]any{{"read committed", "", []string{}}}}, nil
}

// quantum is how many entries of a key a claim takes at most.
const quantum = 3

// listNothing answers without rows: no flow is paused, or has a weight.
func listNothing(*tables, time.Time, arguments) (reply, error) { return reply{}, nil }

// applications answers with the queues of the store, whichever are asked for: each is the one of a handler.
func applications(t *tables, _ time.Time, _ arguments) (reply, error) {
	var r reply
	for _, q := range t.queues {
		r.rows = append(r.rows, []any{q.name, "default", false})
	}
	return r, nil
}

func listQueues(t *tables, _ time.Time, _ arguments) (reply, error) {
	var r reply
	for _, q := range t.queues {
		r.rows = append(r.rows, []any{
			q.id,
			q.name,
			"task",
			"default",
			int16(0),
			int16(5),
			"fifo",
			"",
			false,
			"",
			int32(0),
			int32(0),
			int32(0),
			int32(1),
			false,
			int32(1),
			int32(0),
			int64(0), 0.0, "wait", time.Minute,
			jsonText(`{"base": 0.1, "cap": 0.5, "max_attempts": 50}`),
			int32(1000),
			time.Duration(0), time.Duration(0), time.Duration(0),
			"continue",
			int32(quantum),
			10 * time.Second,
			int32(1 << 20),
			24 * time.Hour,
			24 * time.Hour,
			"",
			"end",
			0.0,
			0.0,
			nil,
			nil,
			"",
			"",
			nil,
			"",
			"",
			[]int32{},
			jsonText(nil),
			int32(0),
			jsonText(nil),
			jsonText(nil),
		})
	}
	return r, nil
}

func register(t *tables, now time.Time, a arguments) (reply, error) {
	id := a.number(0)
	if n := t.nodes[id]; n != nil {
		n.threads = int32(a.number(4))
		if n.beats == 0 {
			n.beatAt = now
			t.note(event{at: now, what: "beat", node: id})
		}
		return affected("INSERT 0", 1), nil
	}
	lease, _ := a[3].(time.Duration)
	name, _ := a[1].(string)
	t.nodes[id] = &node{
		id: id, number: t.nextNode(), name: name, lease: lease, threads: int32(a.number(4)), beatAt: now,
	}
	t.note(event{at: now, what: "beat", node: id})
	return affected("INSERT 0", 1), nil
}

func beat(t *tables, now time.Time, a arguments) (reply, error) {
	n := t.nodes[a.number(0)]
	if n == nil {
		return reply{}, nil
	}
	lapsed := n.beatAt.Add(n.lease).Before(now)
	n.beatAt, n.tokens, n.running, n.runningEntries = now, a.numbers(1), a.numbers(2), a.numbers(4)
	n.beats++
	t.note(event{at: now, what: "beat", node: n.id})
	return reply{rows: [][]any{{false, "", false, int64(1), jsonText(`[]`), lapsed}}}, nil
}

func (t *tables) holdsLocks(node int64) bool {
	for _, l := range t.locks {
		if l.node == node {
			return true
		}
	}
	return false
}

func removeNode(t *tables, _ time.Time, a arguments) (reply, error) {
	id := a.number(0)
	if t.nodes[id] == nil || t.holdsLocks(id) {
		return affected("DELETE", 0), nil
	}
	delete(t.nodes, id)
	return affected("DELETE", 1), nil
}

func removeNodes(t *tables, now time.Time, a arguments) (reply, error) {
	kept, _ := a[1].(time.Duration)
	n := 0
	for _, id := range a.numbers(0) {
		if one := t.nodes[id]; one != nil && one.beatAt.Add(one.lease+kept).Before(now) && !t.holdsLocks(id) {
			delete(t.nodes, id)
			n++
		}
	}
	return affected("DELETE", n), nil
}

func listLanes(t *tables, _ time.Time, a arguments) (reply, error) {
	var r reply
	for _, q := range a.ints(0) {
		for _, row := range t.ready {
			if row.queue == q {
				r.rows = append(r.rows, []any{q, int16(0), "", row.pos})
				break
			}
		}
	}
	return r, nil
}

// laneReport is the row of a claim on its lane. There is one lane in each queue.
func (t *tables) laneReport(
	a arguments, from int64, now time.Time, head []readyRow, taken int, places []pgtype.TID,
) []any {
	var last int64
	for _, h := range head {
		last = h.pos
	}
	var delayedFor any
	if len(head) == 0 {
		var first time.Time
		for _, row := range t.ready {
			if row.queue == int32(a.number(0)) && row.pos >= from && !row.notBefore.IsZero() &&
				(first.IsZero() || row.notBefore.Before(first)) {
				first = row.notBefore
			}
		}
		if !first.IsZero() {
			delayedFor = seconds(first.Sub(now))
		}
	}
	limit := int32(a.number(4))
	row := append(append([]any{nil, last}, make([]any, 14)...), "", places)
	return append(row, true, int64(len(head)), int64(len(head)-taken), nil, delayedFor, limit, limit, false)
}

// head are the ready rows that a claim scans, from a position on.
func (t *tables) head(a arguments, from int64, now time.Time) (head []readyRow) {
	for _, row := range t.ready {
		if len(head) < int(a.number(4)) && row.queue == int32(a.number(0)) && row.pos >= from &&
			!row.notBefore.After(now) {
			head = append(head, row)
		}
	}
	return head
}

func (t *tables) removeReady(queue int32, positions []int64) {
	t.ready = slices.DeleteFunc(t.ready, func(r readyRow) bool {
		return r.queue == queue && slices.Contains(positions, r.pos)
	})
}

func (t *tables) grant(k lockKey, a arguments, now time.Time, pos, last, count int64) *lock {
	l := &lock{
		lockKey: k,
		token:   t.nextToken(),
		node:    a.number(5),
		claim:   int32(a.number(6)),
		pos:     pos,
		last:    last,
		count:   count,
		at:      now,
		row:     t.nextRow(),
	}
	t.locks[k] = l
	t.note(event{at: now, what: "granted", queue: k.queue, key: k.key, token: l.token, node: l.node, entry: last})
	return l
}

func (l *lock) claimed(e *entry) []any {
	if e == nil {
		row := []any{l.token, l.pos, l.last, l.key}
		return append(append(append(row, make([]any, 12)...), ""), make([]any, 9)...)
	}
	row := append([]any{l.token, l.pos, e.id, nil}, e.columns()...)
	return append(append(row, ""), make([]any, 9)...)
}

// columns are those of an entry from attempt to its row.
func (e *entry) columns() []any {
	return []any{
		int32(e.attempt), int32(e.crashes), e.mayHaveRun, 0.0, nil, nil, nil, jsonText(`{}`), 0.0, nil, nil,
		place(e.row),
	}
}

func place(row int64) pgtype.TID {
	return pgtype.TID{BlockNumber: uint32(row), OffsetNumber: 1, Valid: true}
}

func (t *tables) claimAnswer(
	a arguments,
	now time.Time,
	head []readyRow,
	taken int,
	rows [][]any,
	places []pgtype.TID,
) reply {
	return reply{rows: append(rows, t.laneReport(a, a.numbers(3)[0], now, head, taken, places))}
}

func claimDeleteFirst(t *tables, now time.Time, a arguments) (reply, error) {
	head := t.head(a, a.numbers(3)[0], now)
	rows, places, taken, err := t.claimSolo(a, head, now)
	if err != nil {
		return reply{}, err
	}
	return t.claimAnswer(a, now, head, taken, rows, places), nil
}

// claimSolo deletes the ready rows of solo entries and inserts lock records for those that are there.
func (t *tables) claimSolo(a arguments, head []readyRow, now time.Time) (
	rows [][]any, places []pgtype.TID, taken int, err error,
) {
	q := int32(a.number(0))
	var positions []int64
	for _, h := range head {
		if h.entry == 0 {
			continue
		}
		if t.locks[lockKey{q, soloKey(h.entry)}] != nil {
			return nil, nil, 0, &pgconn.PgError{Code: "23505", Message: "lock exists"}
		}
		positions = append(positions, h.pos)
	}
	for _, h := range head {
		if e := t.entries[h.entry]; h.entry != 0 && e != nil {
			l := t.grant(lockKey{q, soloKey(e.id)}, a, now, h.pos, e.id, 1)
			rows, places = append(rows, l.claimed(e)), append(places, place(l.row))
		}
	}
	t.removeReady(q, positions)
	return rows, places, len(positions), nil
}

// claimOneLane claims only where all ready rows that it scans are of solo entries.
func claimOneLane(t *tables, now time.Time, a arguments) (reply, error) {
	head := t.head(a, a.number(3), now)
	keyed := func(h readyRow) bool { return h.entry == 0 }
	if len(head) == 0 || slices.ContainsFunc(head, keyed) {
		return reply{}, nil
	}
	rows, places, taken, err := t.claimSolo(a, head, now)
	if err != nil {
		return reply{}, err
	}
	return reply{rows: append(rows, t.laneReport(a, a.number(3), now, head, taken, places))}, nil
}

func claimLockFirst(t *tables, now time.Time, a arguments) (reply, error) {
	q := int32(a.number(0))
	head := t.head(a, a.numbers(3)[0], now)
	var rows [][]any
	var places []pgtype.TID
	var positions []int64
	for _, h := range head {
		k := lockKey{q, h.key}
		if h.entry != 0 {
			k.key = soloKey(h.entry)
		}
		if t.locks[k] != nil {
			continue
		}
		if e := t.entries[h.entry]; h.entry != 0 {
			if e == nil {
				continue
			}
			l := t.grant(k, a, now, h.pos, e.id, 1)
			rows, places = append(rows, l.claimed(e)), append(places, place(l.row))
		} else {
			covered := t.claimable(k)
			covered = covered[:min(len(covered), int(a.number(7)))]
			var last int64
			if len(covered) > 0 {
				last = covered[len(covered)-1].id
			}
			rows = append(rows, t.grant(k, a, now, h.pos, last, int64(len(covered))).claimed(nil))
		}
		positions = append(positions, h.pos)
	}
	t.removeReady(q, positions)
	return t.claimAnswer(a, now, head, len(positions), rows, places), nil
}

func readGroups(t *tables, _ time.Time, a arguments) (reply, error) {
	var r reply
	tokens := a.numbers(2)
	for i, key := range a.texts(1) {
		l := t.locks[lockKey{int32(a.number(0)), key}]
		if l == nil || l.token != tokens[i] {
			continue
		}
		n := 0
		for _, e := range t.claimable(l.lockKey) {
			if e.id <= l.last && n < int(min(a.number(3), l.count)) {
				r.rows = append(r.rows, append(append([]any{l.token, e.id}, e.columns()...), int32(l.count), false))
				n++
			}
		}
		if n == 0 {
			r.rows = append(r.rows, append(append([]any{l.token}, make([]any, 13)...), int32(l.count), false))
		}
	}
	return r, nil
}

func reclaim(t *tables, _ time.Time, a arguments) (reply, error) {
	var r reply
	for _, l := range t.inOrder() {
		if l.queue != int32(a.number(0)) || l.node != a.number(1) || l.claim != int32(a.number(2)) {
			continue
		}
		row := []any{l.token, l.pos, nil, l.key}
		if e := t.entries[l.last]; l.solo() && e != nil {
			row[2] = e.id
			row = append(row, e.columns()...)
		} else {
			row = append(row, make([]any, 12)...)
		}
		r.rows = append(r.rows, append(row, "", place(l.row), int16(0)))
	}
	return r, nil
}

// inOrder are the locks by token.
func (t *tables) inOrder() []*lock {
	list := make([]*lock, 0, len(t.locks))
	for _, l := range t.locks {
		list = append(list, l)
	}
	slices.SortFunc(list, func(a, b *lock) int { return int(a.token - b.token) })
	return list
}

// firstUnlocked finds the first ready row: transactions of the store leave none locked.
func firstUnlocked(t *tables, now time.Time, a arguments) (reply, error) {
	for _, row := range t.ready {
		if row.queue == int32(a.number(0)) && row.pos >= a.number(3) && !row.notBefore.After(now) {
			return reply{rows: [][]any{{row.pos}}}, nil
		}
	}
	return reply{}, nil
}

func sweep(t *tables, _ time.Time, a arguments) (reply, error) {
	q, n := int32(a.number(0)), 0
	t.ready = slices.DeleteFunc(t.ready, func(r readyRow) bool {
		if r.queue != q || r.pos < a.number(3) || r.pos > a.number(4) {
			return false
		}
		key := r.key
		if r.entry != 0 {
			key = soloKey(r.entry)
		}
		dead := t.locks[lockKey{q, key}] != nil || r.entry != 0 && t.entries[r.entry] == nil
		if dead {
			n++
		}
		return dead
	})
	return affected("DELETE", n), nil
}
