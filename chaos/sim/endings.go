package sim

import (
	"cmp"
	"maps"
	"slices"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
)

var errChanged = &pgconn.PgError{Code: "40001", Message: "entry changed while it was ended"}

var errHeld = &pgconn.PgError{Code: "55P03", Message: "canceling statement due to lock timeout"}

// patient says that a statement waits for rows for the time that its argument says, and no longer.
func patient(a arguments, i int) bool {
	patience, _ := a[i].(*string)
	return patience != nil
}

func finishSolo(t *tables, now time.Time, a arguments) (reply, error) {
	ids, tokens, lockRows, entryRows := a.numbers(1), a.numbers(2), a.places(8), a.places(9)
	var r reply
	for i, id := range ids {
		l := t.locks[lockKey{int32(a.number(0)), soloKey(id)}]
		if l == nil || l.token != tokens[i] || !slices.Contains(lockRows, l.row) {
			continue
		}
		if patient(a, 10) && t.isHeld(l, now) {
			return reply{}, errHeld
		}
		if e := t.entries[id]; e == nil || !slices.Contains(entryRows, e.row) {
			return reply{}, errChanged
		}
		t.free(l, now)
		t.end(id, l.token, "done", now)
		r.rows = append(r.rows, []any{l.token})
	}
	return r, nil
}

func (t *tables) free(l *lock, now time.Time) {
	delete(t.locks, l.lockKey)
	how := "settled"
	if slices.Contains(t.recovering, l.token) {
		how = "recovered"
	}
	t.note(event{at: now, what: "freed", queue: l.queue, key: l.key, token: l.token, node: l.node, how: how})
}

// held returns the lock of a key if it has the token.
func (t *tables) held(queue int64, key string, token int64) *lock {
	if l := t.locks[lockKey{int32(queue), key}]; l != nil && l.token == token {
		return l
	}
	return nil
}

func holdLocks(t *tables, now time.Time, a arguments) (reply, error) {
	var r reply
	tokens := a.numbers(2)
	for i, key := range a.texts(1) {
		l := t.held(a.number(0), key, tokens[i])
		if l == nil {
			continue
		}
		if patient(a, 3) && t.isHeld(l, now) {
			return reply{}, errHeld
		}
		r.rows = append(r.rows, []any{tokens[i]})
	}
	return r, nil
}

// findHeld names the locks of which another transaction has locked the record.
func findHeld(t *tables, now time.Time, a arguments) (reply, error) {
	var r reply
	tokens := a.numbers(2)
	for i, key := range a.texts(1) {
		if l := t.held(a.number(0), key, tokens[i]); l != nil && t.isHeld(l, now) {
			r.rows = append(r.rows, []any{l.token})
		}
	}
	return r, nil
}

func done(t *tables, now time.Time, a arguments) (reply, error) {
	ours := map[int64]bool{}
	tokens := a.numbers(2)
	for i, key := range a.texts(1) {
		ours[tokens[i]] = t.held(a.number(0), key, tokens[i]) != nil
	}
	under, rows, n := a.numbers(9), a.places(10), 0
	for i, id := range a.numbers(3) {
		if !ours[under[i]] {
			continue
		}
		e := t.entries[id]
		if len(rows) > 0 && (e == nil || e.row != rows[i]) {
			return reply{}, errChanged
		}
		if e != nil {
			t.end(id, under[i], "done", now)
			n++
		}
	}
	return reply{rows: [][]any{{true, int64(n)}}}, nil
}

func retry(t *tables, now time.Time, a arguments) (reply, error) {
	keys, tokens, delays, spent, attempts := a.texts(1), a.numbers(2), a.numbers(4), a.bools(6), a.maybe(9)
	for i, id := range a.numbers(3) {
		e := t.entries[id]
		if e == nil || t.held(a.number(0), keys[i], tokens[i]) == nil ||
			spent[i] && attempts[i] != nil && *attempts[i] != int32(e.attempt) {
			continue
		}
		e.initial, e.due, e.row = true, now.Add(time.Duration(delays[i])*time.Millisecond), t.nextRow()
		if spent[i] {
			e.attempt++
		}
		t.note(event{at: now, what: "retried", entry: id, token: tokens[i]})
	}
	return reply{rows: [][]any{{true}}}, nil
}

func fail(t *tables, now time.Time, a arguments) (reply, error) {
	keys, tokens := a.texts(1), a.numbers(2)
	for i, id := range a.numbers(3) {
		if t.entries[id] != nil && t.held(a.number(0), keys[i], tokens[i]) != nil {
			t.end(id, tokens[i], "failed", now)
		}
	}
	return reply{rows: [][]any{{true}}}, nil
}

func unlock(t *tables, now time.Time, a arguments) (reply, error) {
	keys, tokens, requeues, delays := a.texts(1), a.numbers(2), a.texts(3), a.numbers(5)
	var r reply
	for i, key := range keys {
		l := t.held(a.number(0), key, tokens[i])
		if l == nil {
			continue
		}
		t.free(l, now)
		row := readyRow{queue: l.queue}
		if delays[i] > 0 {
			row.notBefore = now.Add(time.Duration(delays[i]) * time.Millisecond)
		}
		if l.solo() {
			e := t.entries[l.last]
			if e == nil || e.initial {
				continue
			}
			row.pos, row.entry = l.pos, e.id
			t.addReady(row)
			r.rows = append(r.rows, []any{key, int16(0), "", row.pos})
			continue
		}
		left := t.claimable(l.lockKey)
		if len(left) == 0 {
			continue
		}
		switch requeues[i] {
		case "front":
			row.pos = l.pos
		case "back":
			row.pos = t.nextID()
		default:
			row.pos = left[0].id
		}
		row.key = key
		t.addReady(row)
		r.rows = append(r.rows, []any{key, int16(0), "", row.pos})
	}
	return r, nil
}

func readLocks(t *tables, now time.Time, _ arguments) (reply, error) {
	var r reply
	for _, l := range t.inOrder() {
		r.rows = append(
			r.rows,
			[]any{l.queue, l.key, l.token, l.node, seconds(now.Sub(l.at)), int16(0), "", l.claim, l.pos},
		)
	}
	return r, nil
}

func readNodes(t *tables, now time.Time, _ arguments) (reply, error) {
	var r reply
	byStart := slices.SortedFunc(maps.Values(t.nodes), func(a, b *node) int { return cmp.Compare(a.number, b.number) })
	for _, n := range byStart {
		r.rows = append(r.rows, []any{
			n.id,
			n.name,
			n.beats,
			seconds(now.Sub(n.beatAt)),
			n.lease,
			n.tokens,
			n.threads,
			n.running,
			len(n.crashed) > 0,
			false,
		})
	}
	return r, nil
}

var started = time.Date(2000, 1, 1, 0, 0, 0, 0, time.UTC)

func readClock(_ *tables, now time.Time, _ arguments) (reply, error) {
	const uptime = 1e6 // the server is never restarted
	return reply{rows: [][]any{{seconds(now.Sub(started)), uptime}}}, nil
}

func holdForRecovery(t *tables, now time.Time, a arguments) (reply, error) {
	crashed, _ := a[3].(bool)
	tokens := a.numbers(2)
	var r reply
	for i, key := range a.texts(1) {
		l := t.held(a.number(0), key, tokens[i])
		if l == nil || t.isHeld(l, now) {
			continue
		}
		n := t.nodes[l.node]
		holds := n != nil &&
			(crashed && n.beatAt.Add(n.lease).After(now) || !crashed && slices.Contains(n.tokens, l.token))
		if !holds {
			r.rows, t.recovering = append(r.rows, []any{l.token}), append(t.recovering, l.token)
		}
	}
	return r, nil
}

// holdNoEntries finds no entry that another transaction has locked: in the simulation these lock records alone.
func holdNoEntries(*tables, time.Time, arguments) (reply, error) { return reply{}, nil }

// markMayHaveRun marks the entries that locks cover, as invalidation.mayHaveRunSQL does.
func markMayHaveRun(t *tables, _ time.Time, a arguments) (reply, error) {
	tokens := a.numbers(2)
	for i, key := range a.texts(1) {
		l := t.held(a.number(0), key, tokens[i])
		if l == nil {
			continue
		}
		covered := t.claimable(l.lockKey)
		if l.solo() {
			covered = nil
			if e := t.entries[l.last]; e != nil {
				covered = append(covered, e)
			}
		}
		for _, e := range covered {
			if e.id <= l.last && !e.mayHaveRun {
				e.mayHaveRun, e.row = true, t.nextRow()
			}
		}
	}
	return reply{rows: [][]any{{true}}}, nil
}

// ran is the entry of a group that a crash counts for, as invalidation.crashSQL chooses it; nil if none is left.
func (t *tables) ran(l *lock) *entry {
	var from int64
	var heard time.Time
	if n := t.nodes[l.node]; n != nil {
		if i := slices.Index(n.running, l.token); i >= 0 && i < len(n.runningEntries) {
			from, heard = n.runningEntries[i], n.beatAt
		}
	}
	for _, e := range t.claimable(l.lockKey) {
		by := l.at
		if e.id == from {
			by = heard
		}
		if from <= e.id && e.id <= l.last && !e.due.After(by) {
			return e
		}
	}
	return nil
}

func countCrashes(t *tables, _ time.Time, a arguments) (reply, error) {
	tokens := a.numbers(2)
	var r reply
	for i, key := range a.texts(1) {
		l := t.held(a.number(0), key, tokens[i])
		if l == nil {
			continue
		}
		e := t.entries[l.last]
		if !l.solo() {
			e = t.ran(l)
		}
		if e == nil {
			continue
		}
		e.crashes, e.row = e.crashes+1, t.nextRow()
		if int64(e.crashes) >= a.number(3) {
			r.rows = append(r.rows, []any{e.id})
		} else if n := t.nodes[l.node]; n != nil {
			n.crashed = append(slices.Clone(n.crashed), e.id)
		}
	}
	return r, nil
}

func takeBack(t *tables, now time.Time, a arguments) (reply, error) {
	n := t.nodes[a.number(0)]
	taken := map[int64]bool{}
	if n != nil && n.beatAt.Add(n.lease).After(now) {
		for _, id := range n.crashed {
			if e := t.entries[id]; e != nil {
				e.crashes, e.row = max(0, e.crashes-1), t.nextRow()
				taken[id] = true
			}
		}
		n.crashed = nil
	}
	return reply{rows: [][]any{{int64(len(taken))}}}, nil
}

func promote(t *tables, now time.Time, a arguments) (reply, error) {
	var dueNow []*entry
	for _, e := range t.entries {
		if e.queue == int32(a.number(0)) && e.initial && !e.due.After(now) {
			dueNow = append(dueNow, e)
		}
	}
	slices.SortFunc(dueNow, func(a, b *entry) int {
		if c := a.due.Compare(b.due); c != 0 {
			return c
		}
		return int(a.id - b.id)
	})
	dueNow = dueNow[:min(len(dueNow), int(a.number(1)))]
	first := map[string]int64{}
	for _, e := range dueNow {
		pos := t.nextID()
		e.initial, e.row = false, t.nextRow()
		switch {
		case e.key == "":
			t.addReady(readyRow{queue: e.queue, pos: pos, entry: e.id})
		case first[e.key] == 0:
			first[e.key] = pos
			t.addReady(readyRow{queue: e.queue, pos: pos, key: e.key})
		}
	}
	return reply{rows: [][]any{{int32(len(dueNow))}}}, nil
}
