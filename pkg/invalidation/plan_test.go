package invalidation

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/pgtest"
)

// plan is a node of EXPLAIN's answer.
type plan struct {
	Type      string  `json:"Node Type"`
	Relation  string  `json:"Relation Name"`
	Index     string  `json:"Index Name"`
	CTE       string  `json:"CTE Name"`
	Rows      float64 `json:"Actual Rows"`
	Loops     float64 `json:"Actual Loops"`
	Removed   float64 `json:"Rows Removed by Filter"`
	Rechecked float64 `json:"Rows Removed by Index Recheck"`
	Hit       int     `json:"Shared Hit Blocks"`
	Read      int     `json:"Shared Read Blocks"`
	Plans     []plan
}

func (p *plan) buffers() int { return p.Hit + p.Read }

func (p *plan) walk(see func(*plan)) {
	see(p)
	for i := range p.Plans {
		p.Plans[i].walk(see)
	}
}

// statement is a hot one with arguments, written as SQL.
type statement struct{ sql, args string }

// explainer is a connection with the settings of the pool, on which statements are prepared once, as a node's are.
type explainer struct {
	b        *bed
	conn     *pgx.Conn
	prepared map[string]bool
}

func (b *bed) explainer() *explainer {
	b.Helper()
	conn, err := pgx.ConnectConfig(b.ctx, b.pool.Config().ConnConfig)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { _ = conn.Close(context.Background()) })
	return &explainer{b, conn, map[string]bool{}}
}

// explain runs a statement by its generic plan, as the session does, and takes back what it did.
func (x *explainer) explain(name string, s statement) *plan {
	x.b.Helper()
	tx, err := x.conn.Begin(x.b.ctx)
	if err != nil {
		x.b.Fatal(err)
	}
	defer tx.Rollback(x.b.ctx) // what it did is not wanted
	name = strings.ReplaceAll(name, " ", "_")
	if !x.prepared[name] {
		x.b.exec(tx, `PREPARE `+name+` AS `+s.sql)
		x.prepared[name] = true
	}
	var text []byte
	err = tx.QueryRow(x.b.ctx, `EXPLAIN (ANALYZE, BUFFERS, TIMING OFF, FORMAT JSON) EXECUTE `+name+`(`+s.args+`)`).Scan(&text)
	if err != nil {
		x.b.Fatalf("explain %s: %v", name, err)
	}
	var answer []struct{ Plan plan }
	if err := json.Unmarshal(text, &answer); err != nil {
		x.b.Fatal(err)
	}
	return &answer[0].Plan
}

// wantLean fails if the plan scans a table, or sorts or walks over more rows than the statement was asked to touch.
func (b *bed) wantLean(what string, p *plan, touched float64) {
	b.Helper()
	p.walk(func(n *plan) {
		seen := (n.Rows + n.Removed + n.Rechecked) * max(1, n.Loops)
		switch {
		case n.Type == "Seq Scan":
			b.Errorf("%s scans %s", what, n.Relation)
		case strings.Contains(n.Type, "Sort") && n.Rows*max(1, n.Loops) > touched:
			b.Errorf("%s sorts %.0f rows", what, n.Rows*n.Loops)
		case n.Relation != "" && seen > touched:
			b.Errorf("%s: %s of %s by %s walks over %.0f rows, more than %.0f", what, n.Type, n.Relation, n.Index, seen, touched)
		}
	})
}

// Whether a queue is open is read as part of the statement that asks, not by a call for each queue.
func TestTheStopsOfAQueueAreInlined(t *testing.T) {
	b := newBed(t, Config{})
	p := b.explainer().explain("open", statement{`
SELECT q.id FROM penstock.queue q WHERE q.id = $1 AND NOT EXISTS (SELECT FROM penstock.queue_stops(q))`, fmt.Sprint(b.q.ID)})
	p.walk(func(n *plan) {
		if n.Type == "Function Scan" {
			t.Error("queue_stops is called for each queue")
		}
	})
}

// The outcome of an entry whose queue is known is looked up in that queue alone.
func TestTheOutcomeOfAnEntryOfAQueueReadsThatQueue(t *testing.T) {
	b := newBed(t, Config{})
	b.exec(b.pool, `SELECT penstock.create_queue('other' || n) FROM generate_series(1, 3) n`)
	id := b.push("")[0]
	b.settle(last(Done(b.claimOne(), id, nil, 0)))
	e, err := OutcomeIn(b.ctx, b.pool, "work", id)
	b.must(err)
	b.want(e.Outcome, "done")
	if _, err := OutcomeIn(b.ctx, b.pool, "other1", id); !errors.Is(err, ErrEntryNotFound) {
		t.Errorf("the outcome in a queue that is not the entry's: %v, want ErrEntryNotFound", err)
	}
	b.explainer().explain("outcome", statement{outcomeInSQL, fmt.Sprintf(`%d, 'work'`, id)}).walk(func(n *plan) {
		if n.Loops > 1 {
			t.Errorf("%s of %s runs %.0f times", n.Type, n.Relation, n.Loops)
		}
	})
}

// The queue of these tests has solo entries in lane 1 and groups of ten in lane 2.
var (
	soloLane  = Lane{Priority: 1}
	groupLane = Lane{Priority: 2}
)

// fill adds n entries with their ready rows, nine in ten of them solo, and leaves the statistics as they are.
func (b *bed) fill(n int) {
	b.Helper()
	b.exec(b.pool, `WITH e AS (
	    INSERT INTO penstock.entry_work (id, queue_id, status, priority, lock_key, payload)
	    SELECT nextval('penstock.entry_id_seq'), $1, 'pending', CASE WHEN i % 100 < 10 THEN 2 ELSE 1 END,
	           CASE WHEN i % 100 < 10 THEN 'k' || i / 100 || '-' || $2::int END, '{}'
	      FROM generate_series(0, $2 - 1) i
	    RETURNING id, priority, lock_key
	), s AS (
	    INSERT INTO penstock.ready (queue_id, priority, flow, pos, entry_id)
	    SELECT $1, priority, '', id, id FROM e WHERE lock_key IS NULL
	)
	INSERT INTO penstock.ready (queue_id, priority, flow, pos, lock_key)
	SELECT $1, 2, '', min(id), lock_key FROM e WHERE lock_key IS NOT NULL GROUP BY lock_key`, b.q.ID, n)
}

// freeze keeps statistics from being renewed behind the test's back: what they say now, they go on saying.
func (b *bed) freeze() {
	b.Helper()
	for _, table := range []string{"entry_work", "ready", "lock", "result_default", "failure_default"} {
		b.exec(b.pool, `ALTER TABLE penstock.`+table+` SET (autovacuum_enabled = off)`)
		b.exec(b.pool, `ANALYZE penstock.`+table)
	}
}

// hot are the statements that run all day, with arguments for what is locked just now.
func (b *bed) hot(solo, groups []*Lock, from, to int64) map[string]statement {
	q := b.q.sql
	columns := func(locks []*Lock) (keys, tokens, ids string, n int) {
		var k, t, e []string
		for _, l := range locks {
			for _, one := range l.Entries {
				k, t, e = append(k, "'"+l.Key+"'"), append(t, fmt.Sprint(l.Token)), append(e, fmt.Sprint(one.ID))
			}
		}
		array := func(of []string) string { return "ARRAY[" + strings.Join(of, ",") + "]" }
		return array(k) + "::text[]", array(t) + "::bigint[]", array(e) + "::bigint[]", len(k)
	}
	fill := func(value string, n int) string { return fmt.Sprintf("array_fill(%s, ARRAY[%d])", value, n) }
	keys, tokens, ids, n := columns(groups)
	soloKeys, soloTokens, soloIDs, m := columns(solo)
	first := make([]*Lock, len(groups)) // each lock once
	for i, l := range groups {
		first[i] = &Lock{Key: l.Key, Token: l.Token, Entries: l.Entries[:1]}
	}
	lockKeys, lockTokens, _, _ := columns(first)
	var rows, entryRows, groupRows []string
	for _, l := range solo {
		rows = append(rows, fmt.Sprintf("'(%d,%d)'", l.tid.BlockNumber, l.tid.OffsetNumber))
		entryRows = append(entryRows, fmt.Sprintf("'(%d,%d)'", l.Entries[0].tid.BlockNumber, l.Entries[0].tid.OffsetNumber))
	}
	for _, l := range groups {
		for _, e := range l.Entries {
			groupRows = append(groupRows, fmt.Sprintf("'(%d,%d)'", e.tid.BlockNumber, e.tid.OffsetNumber))
		}
	}
	array := func(of []string) string { return "ARRAY[" + strings.Join(of, ",") + "]::tid[]" }
	one := func(sql, format string, args ...any) statement { return statement{sql, fmt.Sprintf(format, args...)} }
	id, node := b.q.ID, int64(here)
	failure := `'{"error": "x", "class": "y"}'::jsonb`
	return map[string]statement{
		"one lane":              one(q.claim.oneLane, `%d, 1::smallint, '', 0, 100, %d, 1`, id, node),
		"delete first":          one(q.claim.deleteFirst, `%d, 1::smallint, '{""}', '{0}', 100, %d, 1`, id, node),
		"delete first of lanes": one(q.claim.deleteFirst, `%d, 1::smallint, '{"", a, b}', '{0, 0, 0}', 100, %d, 1`, id, node),
		"lock first solo":       {q.claim.lockFirst, b.claimArgs(0)},
		"lock first groups":     one(q.claim.lockFirst, `%d, 2::smallint, '{""}', '{0}', 10, %d, 1, 100, '{f}'`, id, node),
		"lock first of lanes":   one(q.claim.lockFirst, `%d, 2::smallint, '{a, "", b}', '{0, 0, 0}', 10, %d, 1, 100, '{f, t, f}'`, id, node),
		"claimGroups":           one(q.claimGroups, `%d, %s, %s, 100`, id, keys, tokens),
		"reclaim":               one(q.reclaim, `%d, %d, 1`, id, node),
		"sweep solo":            one(q.sweep, `%d, 1::smallint, '', %d, %d`, id, from, to),
		"finishSolo": one(q.finishSolo, `%d, %s, %s, '{}', %s, true, %d, '{}', %s, %s, '250ms'`, id, soloIDs, soloTokens, fill("1::bigint", m), node,
			array(rows), array(entryRows)),
		"hold":      one(holdSQL, `%d, %s, %s, '250ms'`, id, keys, tokens),
		"busy":      one(q.busy, `%d, %s, %s, %s`, id, keys, tokens, ids),
		"done":      one(q.done, `%d, %s, %s, %s, '{}', %s, true, %d, '{}', %s, '{}'`, id, keys, tokens, ids, fill("1::bigint", n), node, tokens),
		"doneByTID": one(q.done, `%d, %s, %s, %s, '{}', %s, true, %d, '{}', %s, %s`, id, keys, tokens, ids, fill("1::bigint", n), node, tokens, array(groupRows)),
		"retry": one(q.retry, `%d, %s, %s, %s, %s, %s, %s, %d, %s, %s`, id, keys, tokens, ids, fill("5::bigint", n), fill(failure, n),
			fill("true", n), node, fill("1::bigint", n), fill("0::int", n)),
		"fail": one(q.fail, `%d, %s, %s, %s, %s, %s, %d, %s`, id, keys, tokens, ids, fill(failure, n), fill("'f'::text", n), node,
			fill("1::bigint", n)),
		"started":       one(q.started, `%d, %s, %s, %s`, id, keys, tokens, ids),
		"remove":        one(q.remove, `%d, %s, %s, %s, %s, %s, %d`, id, keys, tokens, ids, fill("'expired'::text", n), fill("'r'::text", n), node),
		"unlock groups": one(q.unlock, `%d, %s, %s, %s, 100, %s`, id, keys, tokens, fill("'front'::text", n), fill("0::bigint", n)),
		"unlock solo":   one(q.unlock, `%d, %s, %s, %s, 100, %s`, id, soloKeys, soloTokens, fill("'front'::text", m), fill("0::bigint", m)),
		"call back":     one(q.callBack, `%d, %s, %s, %s, %s, %s`, id, keys, tokens, ids, fill("'done'::text", n), fill("'{}'::jsonb", n)),
		"mark groups":   one(q.mayHaveRun, `%d, %s, %s`, id, lockKeys, lockTokens),
		"mark solo":     one(q.mayHaveRun, `%d, %s, %s`, id, soloKeys, soloTokens),
		"hold groups":   one(q.recoverEntries, `%d, %s, %s`, id, lockKeys, lockTokens),
		"hold solo":     one(q.recoverEntries, `%d, %s, %s`, id, soloKeys, soloTokens),
		"crash":         one(q.crash, `%d, %s, %s, 3`, id, keys, tokens),
		"promote":       one(q.promote, `%d, 100`, id),
		"push one":      one(q.plainPush, `%d, '{"{}"}', 76`, id),
		"push plain":    one(q.plainPush, `%d, %s, 76`, id, fill("'{}'::jsonb", 50)),
		"push":          one(pushSQL, `'work', %s`+strings.Repeat(", '{}'", 14), fill("'{}'::jsonb", 50)),
		"push groups": one(pushSQL, `'work', %s, %s`+strings.Repeat(", '{}'", 13), fill("'{}'::jsonb", 50),
			"string_to_array('a b c d e k1-3000 k2-3000', ' ')"),
		"lanes": one(lanesSQL, `ARRAY[%d], 100, '{32767}', '{""}'`, id),
	}
}

// claimArgs are the arguments of a claim of a hundred from the solo lane.
func (b *bed) claimArgs(from int64) string {
	return fmt.Sprintf(`%d, 1::smallint, '{""}', '{%d}', 100, %d, 1, 100, '{f}'`, b.q.ID, from, int64(here))
}

// Every hot statement finds its rows through an index and touches no more of them as the backlog grows, whatever
// the statistics say: they say here that everything is empty. A connection that planned its statements when it was
// goes on with these plans when there are many entries: a million with PENSTOCK_LONG=1.
func TestUnracedHotStatementsNeverScanTheBacklog(t *testing.T) {
	b := newBed(t, Config{})
	b.freeze()
	early := b.explainer()
	b.buffersAt("empty", 0, 0, early)
	b.exec(b.pool, `INSERT INTO penstock.entry_work (id, queue_id, status, priority, due_at, payload)
	    SELECT nextval('penstock.entry_id_seq'), $1, 'initial', 1, now() - interval '1 second', '{}' FROM generate_series(1, 1000)`, b.q.ID)
	b.fill(3000)
	small := b.buffersAt("3k", 100, 10, early, b.explainer())
	b.fill(pgtest.Long(200_000, 1_000_000))
	large := b.buffersAt("many", 100, 10, early, b.explainer())
	for _, what := range slices.Sorted(maps.Keys(small)) {
		t.Logf("%-14s 3k: %6d buffers, many: %6d", what, small[what], large[what])
		// A tree of many has one level more than one of a thousand.
		if large[what] > 2*small[what]+50 {
			t.Errorf("%s reads %d buffers at many entries, %d at 3k", what, large[what], small[what])
		}
	}
	b.exec(b.pool, `TRUNCATE penstock.entry_work, penstock.ready, penstock.lock`)
}

// The same for claims of queues under limits: one that counts locks, one with a look at the bucket of each lock key.
func TestUnracedClaimsUnderLimitsNeverScanTheBacklog(t *testing.T) {
	b := newBed(t, Config{})
	many := 1_000_000
	b.under("units", limitOptions{MaxUnits: &many}, map[string]int{"work": 1})
	b.q = b.under("keys", limitOptions{Rate: 1e6, Burst: 1e6, PerKey: true}, map[string]int{"work": 1})["work"]
	b.freeze()
	early := b.explainer()
	limits := fmt.Sprintf(`'{%d,%d}'`, b.q.limits[0], b.q.limits[1])
	hot := map[string]statement{
		"claim under limits": {b.q.sql.claim.lockFirstLimited, b.claimArgs(0) + `, ` + limits + `, 2`},
		"swift under limits": {b.q.sql.claim.deleteFirstLimited, fmt.Sprintf(`%d, 1::smallint, '{""}', '{0}', 100, %d, 1, %s, 2`, b.q.ID, int64(here), limits)},
		"claim keyed":        {b.q.sql.claim.lockFirstKeyed, fmt.Sprintf(`%d, 2::smallint, '{a, ""}', '{0, 0}', 10, %d, 1, 1, '{f, t}', %s, 2`, b.q.ID, int64(here), limits)},
	}
	read := func(entries int) map[string]int {
		b.fill(entries)
		buffers := map[string]int{}
		for what, s := range hot {
			early.explain(what, s)
			p := early.explain(what, s)
			b.wantLean(fmt.Sprintf("%s at %d", what, entries), p, 1200)
			buffers[what] = p.buffers()
		}
		return buffers
	}
	small, large := read(3000), read(100_000)
	for what := range hot {
		t.Logf("%-14s 3k: %6d buffers, 100k: %6d", what, small[what], large[what])
		if large[what] > 2*small[what]+50 {
			t.Errorf("%s reads %d buffers at 100k entries, %d at 3k", what, large[what], small[what])
		}
	}
	b.exec(b.pool, `TRUNCATE penstock.entry_work, penstock.ready, penstock.lock`)
}

// A refund compared each lock with all entries that end before they ran: 53 to 71 ms for 1,000 of both.
func TestUnracedARefundReadsEachEndingOnce(t *testing.T) {
	const n = 100
	b := newBed(t, Config{})
	ids := make([]string, n)
	for i, id := range b.pushAll(b.pool, make([]Push, n)...) {
		ids[i] = fmt.Sprint(id)
	}
	all := strings.Join(ids, ",")
	refund := statement{b.q.sql.refund, fmt.Sprintf(`%[1]d, '{%[2]s}', '{%[2]s}', array_fill(0, '{%[3]d}'), array_fill(false, '{%[3]d}'),
		'{%[2]s}', '{%[2]s}'`, b.q.ID, all, n)}
	read := 0.0
	b.explainer().explain("refund", refund).walk(func(p *plan) {
		if p.Type == "Function Scan" {
			read += p.Loops * (p.Rows + p.Removed)
		}
	})
	if read != 2*n {
		t.Errorf("%v rows of locks and endings are read, want %d", read, 2*n)
	}
}

// buffersAt explains every hot statement on each of the connections, with that many solo entries and groups locked,
// and returns the most buffers that each read.
func (b *bed) buffersAt(when string, solo, groups int, connections ...*explainer) map[string]int {
	b.Helper()
	c := b.claimAs(ClaimRequest{Node: here, Lane: soloLane, Limit: solo})
	g := b.claimAs(ClaimRequest{Node: here, Lane: groupLane, Limit: groups})
	buffers := map[string]int{}
	for i, x := range connections {
		for what, s := range b.hot(c.Locks, g.Locks, c.LowWater, c.LowWater+100) {
			x.explain(what, s) // the first run sets hint bits and meets what earlier claims left dead
			p := x.explain(what, s)
			b.wantLean(fmt.Sprintf("%s at %s (connection %d)", what, when, i+1), p, 1200)
			buffers[what] = max(buffers[what], p.buffers())
		}
	}
	b.settle(append(releaseAll(c.Locks...), releaseAll(g.Locks...)...)...)
	return buffers
}

// Every statement of this package parses against the migrated schema.
func TestEveryStatementFitsTheSchema(t *testing.T) {
	b := newBed(t, Config{})
	conn, err := pgx.ConnectConfig(b.ctx, b.pool.Config().ConnConfig)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(b.ctx)
	q := b.q.sql
	for what, sql := range map[string]string{
		"oneLane": q.claim.oneLane, "deleteFirst": q.claim.deleteFirst, "deleteFirstLimited": q.claim.deleteFirstLimited, "lockFirst": q.claim.lockFirst,
		"lockFirstLimited": q.claim.lockFirstLimited, "lockFirstKeyed": q.claim.lockFirstKeyed, "refund": q.refund, "claimGroups": q.claimGroups, "reclaim": q.reclaim,
		"sweep": q.sweep, "unlocked": unlockedSQL, "lanes": lanesSQL, "finishSolo": q.finishSolo, "hold": holdSQL, "busy": q.busy, "done": q.done,
		"retry": q.retry, "started": q.started, "fail": q.fail, "remove": q.remove, "unlock": q.unlock, "promote": q.promote, "expire": expireSQL,
		"mayHaveRun": q.mayHaveRun, "recoverEntries": q.recoverEntries, "crash": q.crash, "deadLetter": q.deadLetter, "recoverHold": recoverHoldSQL, "heldLocks": heldLocksSQL, "push": pushSQL, "plainPush": q.plainPush,
		"unusedKey": unusedKeySQL, "open": openSQL, "list": listSQL, "register": registerSQL, "beat": beatSQL, "removeNode": removeNodeSQL,
	} {
		if _, err := conn.Prepare(b.ctx, what, sql); err != nil {
			t.Errorf("%s: %v", what, err)
		}
	}
}
