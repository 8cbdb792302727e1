package invalidation

import (
	"strings"
	"text/template"
)

// A claim is one statement over lanes of one priority, in two forms: delete first, for lanes of solo entries, and lock
// first, for lanes that have keys. claim.go chooses. A third form, one lane, is delete first written out for the usual
// case. Rendered for queues with and without limits they are eight texts, which stand whole in testdata; a test holds
// that these are the ones that run.
//
// A form is a chain of WITH queries. Each reads those above it; "L" is in lock first alone, "K" in its variant for a
// rate for each lock key:
//
//	headroom      one row: the locks that the limits of the queue leave (penstock.lane_headroom; the proof that no
//	              limit is ever exceeded is in its file). No row: the claim does nothing
//	lane          the lanes in the order in which they are served, and whether this claim has each to itself
//	head          the first ready rows of the lanes, as many as the headroom; a row of nulls for a lane without one
//	mine          those that no other transaction has: deleted (delete first), locked (lock first)
//	solo          the solo entries of mine, each with a new token
//	bucket     K  the keys of head, with the headroom of their token buckets
//	groups     L  the keys of head that are not locked, with the entries that a lock is to cover
//	locked        the lock records of solo entries that were inserted; in lock first lock_solo and lock_group
//	throttled  K  the keys whose buckets are empty, which are put aside until they have units
//	taken      L  the ready rows of mine that were deleted: those whose lock was inserted, or that are throttled
//	charged       under limits: the entries of the locks are charged to the token buckets, and the claim is undone,
//	              with SQLSTATE 40001, if it drew a token that may not go uncounted (penstock.charge_lanes)
//
// Parameters of all: $1 queue, $2 priority, $3 flows of the lanes in the order in which they are served, $4 the
// positions from which each is scanned, $5 how many locks at most, $6 node, $7 claim id.
//
// All answer with the same columns, in rows of two kinds. A row with a token is a lock: of a solo entry with the entry,
// of a group with the lock key alone, since its entries must be read after the claim has committed (claimGroupsSQL):
// the snapshot here may be older than the finish that freed the key. After these comes one row without a token for
// each lane that was reached, with the columns from exclusive on (see laneReport). The row of the first lane also has
// lock_tids, the tids of the lock records of solo entries, in the order of the rows (see finishSoloSQL). No lane is
// reported where there is no headroom row: the limits of the queue are not those that the Queue knows, or another
// claimer holds a limit exclusively.
//
// Claims of a lane exclude each other by a transaction-scoped try-lock: another claimer goes on to the next
// lane instead of waiting. That is for speed alone; a ready row can be deleted but once, and a key has but
// one lock record. A lane is locked when the limit of the claim has been shown to reach it.
//
// The planner has no choice (ADR 4). Sets meet in "IN (...) IS TRUE", which Postgres answers from a hash table;
// internal/postgres says why they do not meet in joins. OFFSET 0, and a scalar subquery that IS NULL in place of NOT
// EXISTS, keep a look-up by key what it is.
//
// Comments in the templates are not part of the texts that are sent.

// claimOptions are the variants of the statements of a claim.
type claimOptions struct {
	Limited bool // the queue is under limits; two parameters more, see Queue.deleteFirst and Queue.lockFirst
	Keyed   bool // of Limited: one of them is a rate for each lock key
	// Weighed, of Limited: entries may have weights. There is one lane, and the claim locks first.
	Weighed bool
}

// oneLaneTemplate is the claim that is usual: of one lane of a queue without limits, in which no key and no pusher
// is in the way. It is the claim that deletes first with everything left out that tells why nothing was claimed, and
// half as dear, which is what a lone entry waits for (ADR 37). Parameters $1 to $7, with a flow and a position for the
// arrays.
//
// It reports on the lane where it claimed, or another claimer is in the lane; where one left it since the snapshot,
// rows that were scanned are gone, and the lane has more behind them. Where it reports nothing it has claimed nothing,
// and delete first claims, or reports the reason.
const oneLaneTemplate = `
WITH lane AS MATERIALIZED (
    SELECT set_config('lock_timeout', '100ms', true),
           pg_try_advisory_xact_lock(
               hashtextextended('penstock lane ' || $1::int || ' ' || $2::smallint || ' ' || $3::text, 0)) AS exclusive
     WHERE NOT EXISTS (SELECT FROM penstock.limit_use WHERE queue_id = $1)
       AND NOT EXISTS (SELECT FROM penstock.throttles($1, $3))
), head AS MATERIALIZED (
    SELECT array_agg(r.row) AS rows, bool_and(r.entry_id IS NOT NULL) AS solo, count(*) AS scanned,
           max(r.pos) AS position
      FROM lane
     CROSS JOIN LATERAL (
           SELECT ctid AS row, pos, entry_id
             FROM penstock.ready
            WHERE lane.exclusive AND queue_id = $1 AND priority = $2 AND flow = $3 AND pos >= $4::bigint
              AND penstock.ready_now(not_before)
            ORDER BY pos
            LIMIT $5::int) r
), mine AS MATERIALIZED (
{{- /* All of them or, where one is a key, none. */}}
    DELETE FROM penstock.ready
     WHERE ctid = ANY ((SELECT rows FROM head WHERE solo)::tid[])
    RETURNING pos, entry_id
), solo AS MATERIALIZED (
    SELECT nextval('penstock.token_seq') AS token, m.pos, e.id, e.attempt, e.crashes, e.may_have_run, e.cost, e.weight,
           e.created_at, e.start_by, e.finish_by, e.name, e.trace, e.callback, e.payload, e.row
      FROM mine m
     CROSS JOIN LATERAL (
           SELECT ctid AS row, * FROM penstock.entry_X WHERE queue_id = $1 AND id = m.entry_id OFFSET 0) e
), locked AS (
    {{template "lock solo" "$3"}}
    RETURNING ctid AS row
)
{{template "answer solo" "$3 AS flow"}}
UNION ALL
SELECT {{template "no lock" "head.position"}}, $3,
       (SELECT array_agg(row) FROM locked), lane.exclusive, head.scanned, 0, NULL, NULL, $5, $5, false
  FROM lane, head
 WHERE head.solo OR NOT lane.exclusive`

// deleteFirstTemplate is the claim of lanes that have no keys and where no pusher has a ready row locked, as
// is usual. It deletes the ready rows without locking them first, which saves a WAL record each. Where it
// would have to wait it gives up after the lock_timeout that it sets, and ClaimLanes takes the other form; so
// it does where it met keys. Parameters of the limited variant: $8 limits, $9 rate kind.
const deleteFirstTemplate = `
WITH headroom AS MATERIALIZED (
{{- if .Limited}}
    SELECT set_config('lock_timeout', '100ms', true), least($5::int, r.locks) AS locks, r.wait, r.uncounted_to
      FROM penstock.lane_headroom($1, $2, CASE WHEN cardinality($3::text[]) = 1 THEN ($3::text[])[1] END, $5,
           NULL, $8::int[], $9::int) r
     WHERE r.ok
{{- else}}
    SELECT set_config('lock_timeout', '100ms', true), $5::int AS locks, NULL::float8 AS wait
     WHERE NOT EXISTS (SELECT FROM penstock.limit_use WHERE queue_id = $1)
{{- end}}
), lane AS MATERIALIZED (
    SELECT l.ord, l.flow, l.position, b.wait, headroom.locks,
           pg_try_advisory_xact_lock(
               hashtextextended('penstock lane ' || $1::int || ' ' || $2::smallint || ' ' || l.flow, 0)) AS exclusive
      FROM headroom
     CROSS JOIN LATERAL unnest($3::text[], $4::bigint[]) WITH ORDINALITY l(flow, position, ord)
     CROSS JOIN LATERAL {{template "throttled"}} b
), head AS MATERIALIZED (
    SELECT a.ord, a.flow, a.position, a.exclusive, a.wait, a.locks, r.row, r.pos, r.entry_id
      FROM lane a
      LEFT JOIN LATERAL (
           SELECT ready.ctid AS row, pos, entry_id
             FROM penstock.ready
            WHERE a.exclusive AND a.wait IS NULL AND queue_id = $1 AND priority = $2 AND flow = a.flow
              AND pos >= a.position AND penstock.ready_now(not_before)
            ORDER BY pos
            LIMIT a.locks) r ON true
     LIMIT (SELECT greatest(1, locks) FROM headroom) {{- /* a lane is reported even where there is no headroom */}}
), mine AS MATERIALIZED (
{{- /* Those of keys stay: they are reported as skipped. */}}
    DELETE FROM penstock.ready
     WHERE ctid = ANY (ARRAY(SELECT row FROM head WHERE entry_id IS NOT NULL))
    RETURNING pos, entry_id, flow
), solo AS MATERIALIZED (
    SELECT nextval('penstock.token_seq') AS token, m.pos, m.flow, e.id, e.attempt, e.crashes,
           e.may_have_run, e.cost, e.weight, e.created_at, e.start_by, e.finish_by, e.name, e.trace, e.callback,
           e.payload, e.row
      FROM mine m
     CROSS JOIN LATERAL (SELECT ctid AS row, * FROM penstock.entry_X WHERE queue_id = $1 AND id = m.entry_id OFFSET 0) e
), locked AS (
{{- /* A solo entry never has a ready row and a lock record at once: no ON CONFLICT, which would look twice. */}}
    {{template "lock solo" "flow"}}
    RETURNING ctid AS row
)
{{- if .Limited}}, charged AS MATERIALIZED (
{{- /* Not called where it would do nothing. */}}
    SELECT CASE WHEN $9::int > 0 OR max(s.token) > (SELECT uncounted_to FROM headroom) THEN
           penstock.charge_lanes($1, $9, array_agg(s.flow), array_agg(s.taken), NULL, NULL, max(s.token),
               (SELECT uncounted_to FROM headroom)) END AS done
      FROM (SELECT flow, count(*) AS taken, max(token) AS token FROM solo GROUP BY flow) s
)
{{- end}}
{{template "answer solo" "flow"}}
UNION ALL
SELECT {{template "no lock" "h.position"}}, h.flow,
       CASE WHEN h.ord = 1 THEN (SELECT array_agg(row) FROM locked) END, h.exclusive, h.scanned, h.skipped,
{{- if .Limited}}
{{- /* uncounted_to is 0 where a queue-wide limit has no headroom. */}}
       greatest(h.wait, headroom.wait), {{template "delayed"}},
       CASE WHEN h.wait IS NULL THEN h.locks ELSE 0 END, headroom.locks, headroom.uncounted_to = 0
  FROM headroom CROSS JOIN (
{{- else}}
       h.wait, {{template "delayed"}}, CASE WHEN h.wait IS NULL THEN h.locks ELSE 0 END, h.locks, false
  FROM (
{{- end}}
       SELECT ord, flow, min(position) AS start, bool_and(exclusive) AS exclusive, max(wait) AS wait,
              max(locks) AS locks, coalesce(max(pos), 0) AS position, count(pos) AS scanned,
              count(pos) - count(entry_id) AS skipped
         FROM head GROUP BY ord, flow) h
{{- if .Limited}}
 WHERE (SELECT count(done) FROM charged) IS NOT NULL {{- /* always; charged would not run if it were not read */}}
{{- end}}`

// lockFirstTemplate is the claim of lanes that have keys, or where a pusher has a ready row locked. It locks
// the ready rows before it deletes any, and passes by those that another transaction has locked. Parameters besides
// those of all claims: $8 the queue's quantum in entries, $9 for each lane whether to ignore row locks; of
// the limited variants: $10 limits, $11 rate kind.
const lockFirstTemplate = `
WITH headroom AS MATERIALIZED (
{{- if .Limited}}
    SELECT least($5::int, r.locks) AS locks, r.entries, r.wait, r.uncounted_to, f.headrooms, f.waits
      FROM penstock.lane_headroom($1, $2, CASE WHEN cardinality($3::text[]) = 1 THEN ($3::text[])[1] END, $5,
           {{if .Weighed}}{{template "weights"}}{{else}}NULL{{end}}, $10::int[], $11::int) r
      LEFT JOIN LATERAL (
           SELECT headrooms, waits
             FROM penstock.flow_headroom($1, $3)
            WHERE $11::int > 0 AND cardinality($3::text[]) > 1 AND r.ok) f ON true
     WHERE r.ok
{{- else}}
    SELECT $5::int AS locks
     WHERE NOT EXISTS (SELECT FROM penstock.limit_use WHERE queue_id = $1)
{{- end}}
), lane AS MATERIALIZED (
    SELECT l.ord, l.flow, l.position, l.ignore_row_locks,
{{- if .Limited}}
{{- /* A quantum that all locks may have together: rates count entries, headroom.locks counts locks. */}}
           greatest(b.wait, CASE WHEN c.locks < 1 THEN headroom.waits[l.ord] END) AS wait, c.locks,
           greatest(1, least($8::int, headroom.entries / greatest(1, headroom.locks),
               headroom.headrooms[l.ord] / greatest(1, c.locks))) AS quantum,
{{- else}}
           b.wait, headroom.locks, $8::int AS quantum,
{{- end}}
           pg_try_advisory_xact_lock(
               hashtextextended('penstock lane ' || $1::int || ' ' || $2::smallint || ' ' || l.flow, 0)) AS exclusive
      FROM headroom
     CROSS JOIN LATERAL unnest($3::text[], $4::bigint[], $9::boolean[]) WITH ORDINALITY
         l(flow, position, ignore_row_locks, ord)
     CROSS JOIN LATERAL {{template "throttled"}} b
{{- if .Limited}}
     CROSS JOIN LATERAL (SELECT least(headroom.locks, headroom.headrooms[l.ord]) AS locks) c
{{- end}}
), head AS MATERIALIZED (
    SELECT a.ord, a.flow, a.position, a.ignore_row_locks, a.exclusive, a.wait, a.locks, a.quantum, r.row, r.pos,
           r.lock_key
      FROM lane a
      LEFT JOIN LATERAL (
           SELECT ready.ctid AS row, pos, lock_key
             FROM penstock.ready
            WHERE a.exclusive AND a.wait IS NULL AND queue_id = $1 AND priority = $2 AND flow = a.flow
              AND pos >= a.position AND penstock.ready_now(not_before)
            ORDER BY pos
            LIMIT a.locks) r ON true
     LIMIT (SELECT greatest(1, locks) FROM headroom) {{- /* a lane is reported even where there is no headroom */}}
), mine AS MATERIALIZED (
    SELECT ctid AS row, pos, entry_id, flow
      FROM penstock.ready
     WHERE ctid = ANY (ARRAY(SELECT row FROM head))
       FOR UPDATE SKIP LOCKED
), solo AS MATERIALIZED (
    SELECT
{{- if .Weighed}} {{template "tokens" "coalesce(e.weight, 1)"}}
{{- else}} nextval('penstock.token_seq')
{{- end}} AS token, m.pos, m.flow, e.id, e.attempt, e.crashes, e.may_have_run,
           e.cost, e.weight, e.created_at, e.start_by, e.finish_by, e.name, e.trace, e.callback, e.payload, e.row
      FROM mine m
     CROSS JOIN LATERAL (SELECT ctid AS row, * FROM penstock.entry_X WHERE queue_id = $1 AND id = m.entry_id OFFSET 0) e
)
{{- if .Keyed}}, bucket AS MATERIALIZED (
{{- /* One call for all keys; the columns of head come back by position. */}}
    SELECT k.pos, k.lock_key COLLATE "C" AS lock_key, k.headroom, k.wait, h.flows[a.at] AS flow,
           h.ignored[a.at] AS ignore_row_locks, h.quantums[a.at] AS quantum
      FROM (SELECT array_agg(lock_key) AS keys, array_agg(pos) AS positions, array_agg(flow) AS flows,
                   array_agg(ignore_row_locks) AS ignored, array_agg(quantum) AS quantums
              FROM head WHERE lock_key IS NOT NULL) h
     CROSS JOIN LATERAL penstock.key_headroom($1, h.keys, h.positions) k
     CROSS JOIN LATERAL (SELECT array_position(h.positions, k.pos) AS at) a
)
{{- end}}, groups AS MATERIALIZED (
{{- /* A key in several lanes is claimed from the earliest of its ready rows; two have the same position only if they
       are of one key. A key whose ready row a pusher has locked (penstock.push_many) is claimed without the row where
       the lane ignores row locks. */}}
    SELECT DISTINCT ON (h.lock_key) h.lock_key, h.pos, h.flow, c.entries, c.last_id, c.cost, c.weight
      FROM {{if .Keyed}}bucket{{else}}head{{end}} h
     CROSS JOIN LATERAL (
           SELECT count(*) AS entries, max(id) AS last_id, sum(coalesce(cost, 1)) AS cost,
                  coalesce(max(weight), 1) AS weight
             FROM (SELECT id, cost, weight FROM penstock.entry_X
                    WHERE lock_key = h.lock_key AND penstock.claimable(status, priority)
                    ORDER BY id LIMIT {{if .Keyed}}least(h.headroom, h.quantum){{else}}h.quantum{{end}}) q) c
     WHERE {{if .Keyed}}h.wait <= 0{{else}}h.lock_key IS NOT NULL{{end}}
       AND (SELECT l.token FROM penstock.lock l WHERE l.queue_id = $1 AND l.lock_key = h.lock_key) IS NULL
       AND (h.pos IN (SELECT pos FROM mine) OR (h.ignore_row_locks AND c.entries > 0))
     ORDER BY h.lock_key, h.pos
), lock_solo AS (
    {{template "lock solo" "flow"}}
    ON CONFLICT DO NOTHING
    RETURNING token, pos, ctid AS row, flow
), lock_group AS (
{{- /* Under a try-lock of the key: so the insert never waits, and the token is larger than that of any earlier lock of
       the key. */}}
    INSERT INTO penstock.lock (queue_id, lock_key, token, node_id, claim_id, pos, last_entry_id, entry_count, cost,
           weight, priority, flow, claimed_at)
    SELECT $1, lock_key,
{{- if .Weighed}} {{template "tokens" "weight"}}
{{- else}} nextval('penstock.token_seq')
{{- end}}, $6, $7, pos,
           coalesce(last_id, 0), entries, coalesce(cost, 1), weight, $2, flow, clock_timestamp()
      FROM groups
     WHERE pg_try_advisory_xact_lock_shared(hashtextextended('penstock keys ' || $1, 0))
       AND pg_try_advisory_xact_lock(hashtextextended('penstock key ' || $1 || ' ' || lock_key, 0))
    ON CONFLICT DO NOTHING
    RETURNING token, pos, lock_key, last_entry_id, flow, entry_count
)
{{- if .Keyed}}, throttled AS MATERIALIZED (
    SELECT b.pos
      FROM bucket b
     WHERE b.wait > 0 AND (b.pos IN (SELECT pos FROM mine)) IS TRUE
       AND (SELECT l.token FROM penstock.lock l WHERE l.queue_id = $1 AND l.lock_key = b.lock_key) IS NULL
       AND penstock.throttle_key($1, b.lock_key, b.wait)
)
{{- end}}, taken AS (
    DELETE FROM penstock.ready
     WHERE ctid = ANY (ARRAY(SELECT row FROM mine
                              WHERE (pos IN (SELECT pos FROM lock_solo UNION ALL SELECT pos FROM lock_group
                                    {{- if .Keyed}} UNION ALL SELECT pos FROM throttled{{end}})) IS TRUE))
    RETURNING pos
)
{{- if .Limited}}, used AS MATERIALIZED (
    SELECT array_agg(flow) AS flows, array_agg(n) AS taken
      FROM (SELECT flow, sum(n)::bigint AS n
              FROM (SELECT flow, 1 AS n FROM lock_solo UNION ALL SELECT flow, entry_count FROM lock_group) l
             GROUP BY flow) f
), charged AS MATERIALIZED (
{{- /* Not called where it would do nothing. */}}
    SELECT CASE WHEN $11::int > 0 OR l.token > (SELECT uncounted_to FROM headroom) THEN
           penstock.charge_lanes($1, $11, (SELECT flows FROM used), (SELECT taken FROM used),
{{- if .Keyed}}
               (SELECT array_agg(lock_key) FROM lock_group),
               (SELECT array_agg(entry_count::bigint) FROM lock_group),
{{- else}}
               NULL, NULL,
{{- end}}
               l.token, (SELECT uncounted_to FROM headroom)) END AS done
      FROM (SELECT greatest((SELECT max(token) FROM lock_solo), (SELECT max(token) FROM lock_group)) AS token) l
)
{{- end}}
{{template "answer solo" "flow"}}
 WHERE (token IN (SELECT token FROM lock_solo)) IS TRUE
UNION ALL
SELECT token, pos, last_entry_id, lock_key, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
       flow, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL
  FROM lock_group
UNION ALL
SELECT {{template "no lock" "h.position"}}, h.flow,
       CASE WHEN h.ord = 1 THEN (SELECT array_agg(row) FROM lock_solo) END, h.exclusive, h.scanned, h.scanned - h.taken,
{{- if .Limited}}
{{- /* uncounted_to is 0 where a queue-wide limit has no headroom. */}}
       greatest(h.wait, headroom.wait), {{template "delayed"}},
       CASE WHEN h.wait IS NULL THEN h.locks ELSE 0 END, headroom.locks, headroom.uncounted_to = 0
  FROM headroom CROSS JOIN (
{{- else}}
       h.wait, {{template "delayed"}}, CASE WHEN h.wait IS NULL THEN h.locks ELSE 0 END, h.locks, false
  FROM (
{{- end}}
       SELECT ord, flow, min(position) AS start, bool_and(exclusive) AS exclusive, max(wait) AS wait,
              max(locks) AS locks, coalesce(max(pos), 0) AS position, count(pos) AS scanned,
              count(*) FILTER (WHERE (pos IN (SELECT pos FROM taken)) IS TRUE) AS taken
         FROM head GROUP BY ord, flow) h
{{- if .Limited}}
 WHERE (SELECT count(done) FROM charged) IS NOT NULL {{- /* always; charged would not run if it were not read */}}
{{- end}}`

// lockSoloTemplate inserts the lock records of the solo entries of a lane; its argument is the flow.
const lockSoloTemplate = `{{define "lock solo" -}}
    INSERT INTO penstock.lock (queue_id, lock_key, token, node_id, claim_id, pos, last_entry_id, entry_count, cost,
           weight, priority, flow, claimed_at)
    SELECT $1, '#' || id, token, $6::bigint, $7::int, pos, id, 1, coalesce(cost, 1), coalesce(weight, 1),
           $2, {{.}}, clock_timestamp()
      FROM solo
{{- end}}`

// answerTemplate has the columns of the answer, with their names and types: of the locks of solo entries, whose columns
// from lock_tids on are null. "no lock" is what a report on a lane has before its flow: the position alone.
const answerTemplate = `{{define "answer solo" -}}
SELECT token, pos AS position, id AS entry_id, NULL::text AS lock_key, attempt, crashes, may_have_run,
       coalesce(cost, 0) AS cost, name, trace, callback, payload,
       date_part('epoch', statement_timestamp() - created_at) AS waited,
       date_part('epoch', start_by - clock_timestamp()) AS start_in,
       date_part('epoch', finish_by - clock_timestamp()) AS finish_in, row AS entry_tid, {{.}},
       NULL::tid[] AS lock_tids, NULL::boolean AS exclusive, NULL::bigint AS scanned, NULL::bigint AS skipped,
       NULL::float8 AS wait, NULL::float8 AS delayed_for, NULL::int AS headroom, NULL::int AS shared,
       NULL::boolean AS queue_wide
  FROM solo
{{- end}}{{define "no lock" -}}
    NULL, {{.}}, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL
{{- end}}`

// drawTemplate is the token of a lock of a weight, its argument: the last of as many as it weighs (ADR 39).
const drawTemplate = `{{define "tokens" -}}
    (SELECT max(nextval('penstock.token_seq')) FROM generate_series(1, {{.}}))
{{- end}}`

// throttledTemplate is for how long queue $1 or the flow of a lane is throttled (s), null if it is not.
const throttledTemplate = `{{define "throttled"}}(
           SELECT nullif(greatest(0, extract(epoch FROM max(until) - clock_timestamp())), 0)::float8 AS wait
             FROM penstock.throttles($1, l.flow)){{end}}`

// delayedTemplate is for how long the rows of a lane in which nothing was found are delayed (s): the least of
// the first hundred, null if there is none.
const delayedTemplate = `{{define "delayed"}}CASE WHEN h.scanned = 0 AND h.exclusive THEN (
           SELECT date_part('epoch', min(not_before) - clock_timestamp())
             FROM (SELECT not_before FROM penstock.ready
                    WHERE queue_id = $1 AND priority = $2 AND flow = h.flow AND pos >= h.start
                    ORDER BY pos LIMIT 100) d) END{{end}}`

// weightsTemplate is the weights of the ready rows that a claim of one lane may take, in their order. That of a key
// is the largest of the entries that the lock would cover, which run one after another; a key that is locked has 0:
// its row is not claimed. All is read in the snapshot of the claim, so that the rows are those that it takes.
const weightsTemplate = `{{define "weights"}}ARRAY(
           SELECT coalesce(CASE
                  WHEN r.entry_id IS NOT NULL THEN (
                       SELECT coalesce(e.weight, 1) FROM penstock.entry_X e WHERE e.queue_id = $1 AND e.id = r.entry_id)
                  WHEN (SELECT l.token FROM penstock.lock l
                         WHERE l.queue_id = $1 AND l.lock_key = r.lock_key) IS NULL THEN (
                       SELECT coalesce(max(q.weight), 1)
                         FROM (SELECT weight FROM penstock.entry_X
                                WHERE lock_key = r.lock_key AND penstock.claimable(status, priority)
                                ORDER BY id LIMIT $8::int) q) END, 0)::int
             FROM (SELECT pos, entry_id, lock_key
                     FROM penstock.ready
                    WHERE queue_id = $1 AND priority = $2 AND flow = ($3::text[])[1] AND pos >= ($4::bigint[])[1]
                      AND penstock.ready_now(not_before)
                    ORDER BY pos
                    LIMIT $5::int) r
            ORDER BY r.pos){{end}}`

const claimParts = lockSoloTemplate + answerTemplate + drawTemplate + throttledTemplate + delayedTemplate +
	weightsTemplate

var (
	oneLane     = template.Must(template.New("claim, one lane").Parse(claimParts + oneLaneTemplate))
	deleteFirst = template.Must(template.New("claim, delete first").Parse(claimParts + deleteFirstTemplate))
	lockFirst   = template.Must(template.New("claim, lock first").Parse(claimParts + lockFirstTemplate))
)

// claimSQL renders one of the statements of a claim.
func claimSQL(t *template.Template, o claimOptions) string {
	var sql strings.Builder
	if err := t.Execute(&sql, o); err != nil {
		panic(err) // a template that does not fit its options fails in every test
	}
	return sql.String()
}

// claimStatements are the eight texts that a claim may send, for a queue whose table is named penstock.entry_X.
type claimStatements struct {
	deleteFirst, deleteFirstLimited             string
	lockFirst, lockFirstLimited, lockFirstKeyed string
	weighed, weighedKeyed                       string
	oneLane                                     string
}

var claimTexts = claimStatements{
	oneLane:            claimSQL(oneLane, claimOptions{}),
	deleteFirst:        claimSQL(deleteFirst, claimOptions{}),
	deleteFirstLimited: claimSQL(deleteFirst, claimOptions{Limited: true}),
	lockFirst:          claimSQL(lockFirst, claimOptions{}),
	lockFirstLimited:   claimSQL(lockFirst, claimOptions{Limited: true}),
	lockFirstKeyed:     claimSQL(lockFirst, claimOptions{Limited: true, Keyed: true}),
	weighed:            claimSQL(lockFirst, claimOptions{Limited: true, Weighed: true}),
	weighedKeyed:       claimSQL(lockFirst, claimOptions{Limited: true, Weighed: true, Keyed: true}),
}
