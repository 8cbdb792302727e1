package sim

import (
	"cmp"
	"maps"
	"slices"
	"strconv"
	"time"
)

// tables is the state of the database, as far as the statements of task nodes and of recovery read and
// write it. The columns are those of migrations/00001_baseline.sql.
type tables struct {
	queues  []queue
	entries map[int64]*entry
	ready   []readyRow
	locks   map[lockKey]*lock
	nodes   map[int64]*node
	term    int64 // of the newest leader
	events  []event

	recovering []int64             // tokens of locks that recovery ends
	heldUntil  map[int64]time.Time // locks whose record a transaction of another program has locked; not rolled back
	sequences
}

// sequences are not rolled back.
type sequences struct{ id, token, row, node int64 }

type queue struct {
	id   int32
	name string
}

type entry struct {
	id               int64
	queue            int32
	key              string // empty: solo
	initial          bool
	due              time.Time
	attempt, crashes int
	mayHaveRun       bool
	row              int64 // the place of the row; it changes with each update
}

type readyRow struct {
	queue     int32
	pos       int64
	entry     int64 // 0: of a key
	key       string
	notBefore time.Time
}

type lockKey struct {
	queue int32
	key   string
}

type lock struct {
	lockKey
	token, node, last, pos int64
	claim                  int32
	count                  int64
	at                     time.Time
	row                    int64
}

type node struct {
	id              int64 // drawn at random by its process
	number          int64 // in the order of registration
	name            string
	lease           time.Duration
	threads         int32
	beats           int64
	beatAt          time.Time
	tokens, running []int64
	runningEntries  []int64
	crashed         []int64 // entries
}

// event is something that the judge goes by. It is part of the state: what is rolled back left none.
type event struct {
	at    time.Time
	what  string // accepted, granted, freed, beat, retried, ended
	entry int64
	queue int32
	key   string
	token int64
	node  int64
	how   string
}

func newTables(queues ...string) *tables {
	t := &tables{
		entries: map[int64]*entry{}, locks: map[lockKey]*lock{}, nodes: map[int64]*node{}, term: 1,
		heldUntil: map[int64]time.Time{},
	}
	for i, name := range queues {
		t.queues = append(t.queues, queue{int32(i + 1), name})
	}
	return t
}

// clone copies the state, for the end of a transaction that does not commit.
func (t *tables) clone() *tables {
	c := *t
	c.entries, c.locks, c.nodes = maps.Clone(t.entries), maps.Clone(t.locks), maps.Clone(t.nodes)
	for id, e := range c.entries {
		copied := *e
		c.entries[id] = &copied
	}
	for key, l := range c.locks {
		copied := *l
		c.locks[key] = &copied
	}
	for id, n := range c.nodes {
		copied := *n
		c.nodes[id] = &copied
	}
	c.ready, c.recovering = slices.Clone(t.ready), slices.Clip(t.recovering)
	c.events = slices.Clip(t.events)
	return &c
}

func (s *sequences) nextID() int64    { s.id++; return s.id }
func (s *sequences) nextToken() int64 { s.token++; return s.token }
func (s *sequences) nextNode() int64  { s.node++; return s.node }
func (s *sequences) nextRow() int64   { s.row++; return s.row }

func (t *tables) note(e event) { t.events = append(t.events, e) }

// addReady inserts a ready row; the order is that of the primary key.
func (t *tables) addReady(r readyRow) {
	if slices.ContainsFunc(t.ready, func(o readyRow) bool { return o.queue == r.queue && o.pos == r.pos }) {
		return // ON CONFLICT DO NOTHING
	}
	t.ready = append(t.ready, r)
	slices.SortFunc(t.ready, func(a, b readyRow) int {
		return cmp.Or(cmp.Compare(a.queue, b.queue), cmp.Compare(a.pos, b.pos))
	})
}

// claimable are the pending entries of a key, oldest first.
func (t *tables) claimable(k lockKey) []*entry {
	var list []*entry
	for _, e := range t.entries {
		if e.queue == k.queue && e.key == k.key && !e.initial {
			list = append(list, e)
		}
	}
	slices.SortFunc(list, func(a, b *entry) int { return cmp.Compare(a.id, b.id) })
	return list
}

// push accepts an entry, as penstock.push_many does for one without options but a lock key.
func (t *tables) push(queue int32, key string, now time.Time) int64 {
	e := &entry{id: t.nextID(), queue: queue, key: key, row: t.nextRow()}
	t.entries[e.id] = e
	t.note(event{at: now, what: "accepted", entry: e.id, queue: queue, key: key})
	switch {
	case key == "":
		t.addReady(readyRow{queue: queue, pos: e.id, entry: e.id})
	case !slices.ContainsFunc(t.ready, func(r readyRow) bool { return r.queue == queue && r.key == key }):
		t.addReady(readyRow{queue: queue, pos: e.id, key: key})
	}
	return e.id
}

func soloKey(id int64) string { return "#" + strconv.FormatInt(id, 10) }

func (l *lock) solo() bool { return l.key[0] == '#' }

// end removes an entry with its outcome.
func (t *tables) end(id, token int64, how string, now time.Time) {
	e := t.entries[id]
	delete(t.entries, id)
	t.note(event{at: now, what: "ended", entry: id, queue: e.queue, key: e.key, token: token, how: how})
}

// isHeld says that a transaction of another program has locked a lock record.
func (t *tables) isHeld(l *lock, now time.Time) bool { return t.heldUntil[l.token].After(now) }

// broken lists what is inconsistent, as penstock.check_invariants does.
func (t *tables) broken() (found []string) {
	for id, e := range t.entries {
		if e.initial {
			continue
		}
		key := e.key
		if key == "" {
			key = soloKey(id)
		}
		inLine := slices.ContainsFunc(t.ready, func(r readyRow) bool {
			return r.queue == e.queue && (e.key == "" && r.entry == id || e.key != "" && r.key == e.key)
		})
		if t.locks[lockKey{e.queue, key}] == nil && !inLine {
			found = append(
				found,
				"pending entry "+key+" ("+strconv.FormatInt(id, 10)+") has neither a ready row nor a lock",
			)
		}
	}
	slices.Sort(found)
	return found
}
