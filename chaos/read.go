package main

import (
	"context"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/chaos/judge"
)

// sample reads, all the while, what the end of a run no longer shows: locks of the limited queue,
// sizes of hot tables.
func (s *site) sample(ctx context.Context) {
	const locksSQL = `
SELECT count(*) FROM penstock.lock l JOIN penstock.queue q ON q.id = l.queue_id WHERE q.name = 'limited'`
	for n := 0; ctx.Err() == nil; n++ {
		one, cancel := context.WithTimeout(ctx, time.Second)
		var locks int
		if s.db.pool.QueryRow(one, locksSQL).Scan(&locks) == nil {
			s.mu.Lock()
			s.samples = append(
				s.samples,
				judge.Sample{Queue: "limited", Locks: locks, Max: limitedLocks, At: time.Now()},
			)
			s.mu.Unlock()
		}
		if n%50 == 0 {
			s.sampleTables(one)
		}
		cancel()
		select {
		case <-ctx.Done():
		case <-time.After(40 * time.Millisecond):
		}
	}
}

// Bounds of hot tables with their indexes. The load keeps a few hundred entries in the queues.
const (
	tableBytesMax = 64 << 20
	tableDeadMax  = 200_000
)

func (s *site) sampleTables(ctx context.Context) {
	const sql = `
SELECT relname::text, pg_total_relation_size(relid), n_dead_tup
  FROM pg_stat_user_tables
 WHERE schemaname = 'penstock' AND relname IN ('ready', 'lock', 'node', 'leader', 'slot', 'limit_use')`
	rows, err := s.db.pool.Query(ctx, sql)
	if err != nil {
		return
	}
	var t judge.Table
	_, _ = pgx.ForEachRow(rows, []any{&t.Name, &t.Bytes, &t.Dead}, func() error {
		s.mu.Lock()
		defer s.mu.Unlock()
		seen := s.tables[t.Name]
		if seen == nil {
			seen = &judge.Table{Name: t.Name, BytesMax: tableBytesMax, DeadMax: tableDeadMax}
			s.tables[t.Name] = seen
		}
		seen.Bytes, seen.Dead = max(seen.Bytes, t.Bytes), max(seen.Dead, t.Dead)
		return nil
	})
}

// drained is what became of the work that was left, and of slots whose call may still run.
type drained struct {
	left     []string      // work that has not ended
	took     time.Duration // until all work had ended
	last     string        // what ended last
	released time.Duration // until the locks were gone that were held when the faults ended
	doubtful []string      // slots that no call can use still
	began    time.Time
}

// workSQL lists what has not ended. Schedules go on: of their locks those count that were taken before $1.
const workSQL = `
SELECT q.name || ': entry ' || e.id || ', ' || e.status || ', attempt ' || e.attempt
       || coalesce(', key ' || e.lock_key, '')
  FROM penstock.entry e JOIN penstock.queue q ON q.id = e.queue_id
 WHERE q.kind <> 'cron'
   AND NOT (q.kind = 'webhook' AND e.attempt > 0) -- a delivery that was refused waits for minutes
UNION ALL
SELECT 'lock of ' || l.lock_key || ' of ' || q.name || ', token ' || l.token || ', '
       || age(clock_timestamp(), l.claimed_at) || ' old, on '
       || coalesce(n.name || ', which lists it: ' || (l.token = ANY (n.tokens)), 'an unknown node')
  FROM penstock.lock l JOIN penstock.queue q ON q.id = l.queue_id LEFT JOIN penstock.node n ON n.id = l.node_id
 WHERE q.kind <> 'cron' OR l.claimed_at < $1::timestamptz
UNION ALL
SELECT 'batch ' || id || ' is ' || status FROM penstock.batch WHERE ended_at IS NULL`

// tell adds to the history what the drain was.
func (d drained) tell(h *judge.History, rare bool) {
	h.Drained, h.Last, h.Doubtful, h.FaultsOver = d.took, d.last, d.doubtful, d.began
	if rare { // recovery frees lock by lock there
		h.Released = d.released
	}
}

// drain waits until no work is left and no slot is held, or the time is up. What was left when is beside the logs.
func (s *site) drain(ctx context.Context, name string) (d drained) {
	d.began = time.Now()
	from := s.list(ctx, `SELECT clock_timestamp()::text`)[0]
	deadline, working := d.began.Add(2*s.cfg.drainMax), true
	var seen strings.Builder
	defer func() { _ = os.WriteFile(filepath.Join(s.cfg.logs, name), []byte(seen.String()), 0o600) }()
	for before := []string{""}; ; time.Sleep(100 * time.Millisecond) {
		d.left = s.list(ctx, workSQL, from)
		d.doubtful = s.list(ctx, doubtfulSQL, len(d.left) == 0)
		if all := slices.Concat(d.doubtful, d.left); !slices.Equal(all, before) {
			some := all[:min(10, len(all))]
			fmt.Fprintf(&seen, "%v after the faults %d, as %q\n", round(time.Since(d.began)), len(all), some)
			before = all
		}
		if working {
			d.took = time.Since(d.began)
		}
		if len(s.list(ctx, `SELECT lock_key FROM penstock.lock WHERE claimed_at < $1::timestamptz LIMIT 1`, from)) > 0 {
			d.released = time.Since(d.began)
		}
		if working = len(d.left) > 0; working {
			d.last = d.left[0]
		}
		if !working && len(d.doubtful) == 0 || time.Now().After(deadline) {
			return d
		}
	}
}

// list reads a column of text. A database that does not answer is one row.
func (s *site) list(ctx context.Context, sql string, args ...any) []string {
	rows, err := s.db.pool.Query(ctx, sql, args...)
	if err != nil {
		return []string{"the database does not answer: " + err.Error()}
	}
	list, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return []string{"the database does not answer: " + err.Error()}
	}
	return list
}

// tolerance is how late the harness may have seen something: the end of a connection takes a moment
// to be noticed, and on a busy machine the harness is not always run when it should be. More than a
// third of a lease would leave the judges nothing to find.
func (s *site) tolerance() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	return min(seenLate+s.lateness, s.cfg.lease/3)
}

// seenLate is how late the end of a connection is seen by a harness that is run when it should be.
const seenLate = 400 * time.Millisecond

// reportLateness says that the harness was run later than the judges tolerate: findings about times may be its fault
// then. It is no finding of its own.
func (s *site) reportLateness(out io.Writer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if most := s.cfg.lease/3 - seenLate; s.lateness > most {
		fmt.Fprintf(out, "PROBLEM the machine was too slow to judge times: the harness was late by up to %v, of which "+
			"%v are tolerated: findings about times may be its fault\n", round(s.lateness), round(most))
	}
}

// slowCommit is how long a commit takes at most without a disturbance. A pass of a leader's duty has dozens of
// statements, and each takes four programs that the machine has to run.
const slowCommit = 100 * time.Millisecond

// watchServer measures how long commits take that meet neither the product nor a fault at a connection.
// It goes on until the site is closed, for entries come in line after the faults as well.
func (s *site) watchServer(ctx context.Context) {
	for !s.isClosing() {
		began := time.Now()
		one, cancel := context.WithTimeout(ctx, 10*time.Second)
		_ = s.db.commit(one) // an error takes its time as well
		cancel()
		if took := time.Since(began); took > slowCommit {
			s.mu.Lock()
			s.slow = append(s.slow, judge.Disturbance{What: "slow", From: began, To: began.Add(took)})
			s.mu.Unlock()
		}
		time.Sleep(slowCommit / 2)
	}
}

// watchItself measures how late timers of the harness fire.
func (s *site) watchItself(ctx context.Context) {
	const nap = 5 * time.Millisecond
	for ctx.Err() == nil {
		began := time.Now()
		time.Sleep(nap)
		s.mu.Lock()
		s.lateness = max(s.lateness, time.Since(began)-nap)
		s.mu.Unlock()
	}
}

// history reads the three recorders.
func (s *site) history(ctx context.Context) (*judge.History, error) {
	ticks := s.cfg.timetable()
	h := &judge.History{
		Lease: s.cfg.lease, Tolerance: s.tolerance(), RunMax: runMax, CronStep: ticks.step, DrainMax: s.cfg.drainMax,
		RetryBase: retryBase,
		DoubtMax:  doubtMax, CatchUpMax: catchUpMax, CallbackCrashes: callbackCrashes,
		Jobs: ticks.jobs, Ticking: tickQueue, Served: models, Lanes: []string{"solo", "work"},
		ClockJumped: s.cfg.clock, FreedOneByOne: s.cfg.rare, LocksMax: map[string]int{"limited": limitedLocks},
		Rates:   map[string]judge.Rate{ratedQueue: {Burst: ratedBurst, PerSecond: ratedRate}},
		Effects: map[int64]int{}, Items: map[judge.Item]int{}, Ticks: map[judge.Tick]int{}, Rows: map[int64]bool{},
		Samples: s.samples,
	}
	h.CronUntil = s.paused
	if h.Gateways = s.cfg.gateways; h.Gateways > 0 {
		h.Served, h.GatewayLease = append(slices.Clone(models), onlineQueue), gatewayLease
	}
	h.Slots = slotsOfInstances()
	for _, t := range s.tables {
		h.Tables = append(h.Tables, *t)
	}
	s.load.mu.Lock()
	for _, p := range s.load.pushes {
		if p.Called.IsZero() {
			continue
		}
		if s.cfg.clock {
			p.Due = time.Time{} // the server's clock was not the clients'
		}
		h.Pushes = append(h.Pushes, *p)
	}
	h.Requests, h.Batches = slices.Clone(s.load.requests), slices.Clone(s.load.batches)
	s.load.mu.Unlock()
	s.recorder.mu.Lock()
	for _, c := range s.recorder.calls {
		one := *c
		if one.Closed.IsZero() {
			one.Closed = time.Now()
		}
		h.SlotCalls = append(h.SlotCalls, one)
		if one.Token != 0 || one.Via == "" {
			h.Calls = append(h.Calls, one)
		}
	}
	h.Deliveries, h.Received, h.CallbackWaits = slices.Clone(s.recorder.deliveries), time.Now(), callbackWaits
	s.recorder.mu.Unlock()
	s.policy.mu.Lock()
	h.Beats = slices.Clone(s.policy.beats)
	h.Hindrances, h.Away = slices.Clone(s.policy.final), slices.Clone(s.policy.unheard)
	s.policy.mu.Unlock()
	s.mu.Lock()
	h.Disturbances = append(slices.Clone(s.disturbs), s.policy.heldUp(time.Now())...)
	h.Refusals, h.LeaderErrors = append(s.policy.refusals(), s.slow...), s.policy.errorsAtLeaders()
	s.mu.Unlock()
	if s.standby != nil && !s.standby.sync {
		h.Forked = s.standby.forked
	}
	for _, p := range s.all() {
		p.mu.Lock()
		h.Deaths, h.Stops = append(h.Deaths, p.deaths...), append(h.Stops, p.stops...)
		h.Hindrances, h.Away = append(h.Hindrances, p.drains...), append(h.Away, p.away...)
		p.mu.Unlock()
	}
	return h, s.readDatabase(ctx, h)
}

// event is a row of judge.event.
type event struct {
	Seq                          int64
	At                           time.Time
	What, Queue                  string
	Entry, Token, Last, Node, Op int64
	Attempt, Crashes             int
	Key, Outcome, Nonce, Class   string
	Due                          *time.Time
	Transaction                  int64
	Began                        time.Time // the transaction
	Under, Holder, Noted         int64
}

func (s *site) readDatabase(ctx context.Context, h *judge.History) error {
	if err := s.readSchedules(ctx, h); err != nil {
		return err
	}
	events, err := s.readEvents(ctx)
	if err != nil {
		return err
	}
	h.Doubts = doubtsOf(events)
	processes, gone, keys, freed := map[int64]string{}, map[int64]event{}, map[int64]string{}, map[int64]event{}
	for _, e := range events {
		switch e.What {
		case "node":
			processes[e.Node] = e.Key
			if !s.cfg.clock {
				h.Beats = append(h.Beats, judge.Beat{Process: e.Key, At: e.At, Registered: true})
			}
		case "free":
			freed[e.Token] = e
		case "changed":
			h.Changes = append(h.Changes, judge.Change{What: e.Class, Entry: e.Entry, Key: e.Key, Token: e.Token})
		case "term":
			h.Terms = append(h.Terms, judge.Term{
				Number: e.Token, At: e.At, Lease: time.Duration(e.Last) * time.Millisecond,
				Resigned: e.Class == "resigned",
			})
		case "gone":
			gone[e.Entry] = e
		case "entry":
			keys[e.Entry] = e.Key
			h.Insertions = append(
				h.Insertions,
				judge.Insertion{Seq: e.Seq, Entry: e.Entry, Op: e.Op, Queue: e.Queue},
			)
		}
	}
	for _, e := range events {
		if p, changed := s.place(&e); changed {
			h.Places = append(h.Places, p)
		}
		if e.What == "later" || e.What == "end" && e.Outcome == "failed" {
			h.Setbacks = append(h.Setbacks, judge.Setback{
				Seq: e.Seq, Entry: e.Entry, Queue: e.Queue, Class: e.Class,
				Token: e.Under, Holder: e.Holder, Node: e.Noted,
			})
		}
		switch e.What {
		case "grant":
			h.Grants = append(h.Grants, judge.Grant{
				Seq: e.Seq, Queue: e.Queue, Key: e.Key, Token: e.Token, Last: e.Last, Node: e.Node,
				Process: processes[e.Node], At: e.At, Freed: freed[e.Token].At, FreedSeq: freed[e.Token].Seq,
				Transaction: e.Transaction, FreeBegan: freed[e.Token].Began,
			})
		case "end":
			if s.cfg.clock {
				e.At = time.Time{}
			}
			h.Endings = append(h.Endings, judge.Ending{
				Seq: e.Seq, At: e.At, Entry: e.Entry, Queue: e.Queue, Key: keys[e.Entry], Outcome: e.Outcome,
				Token: e.Token,
				Nonce: e.Nonce,
				Attempt: max(
					e.Attempt,
					gone[e.Entry].Attempt,
				), Crashes: max(e.Crashes, gone[e.Entry].Crashes), Class: e.Class,
			})
		}
	}
	return s.readEffects(ctx, h)
}

func (s *site) readEvents(ctx context.Context) ([]event, error) {
	const sql = `
SELECT e.seq, e.at, e.what, coalesce(q.name, ''), coalesce(e.entry_id, 0), coalesce(e.token, 0),
       coalesce(e.last, 0), coalesce(e.node, 0), coalesce(e.op, 0), coalesce(e.attempt, 0), coalesce(e.crashes, 0),
       coalesce(e.key, ''), coalesce(e.outcome, ''), coalesce(e.nonce, ''), coalesce(e.class, ''),
       e.due, e.tx::text::bigint, e.began, coalesce(e.under, 0), coalesce(e.holder, 0), coalesce(e.noted, 0)
  FROM judge.event e LEFT JOIN penstock.queue q ON q.id = e.queue_id ORDER BY e.seq`
	rows, err := s.db.pool.Query(ctx, sql)
	if err != nil {
		return nil, err
	}
	events, err := pgx.CollectRows(rows, pgx.RowToStructByPos[event])
	if err != nil {
		return nil, fmt.Errorf("read the recorder of the database: %w", err)
	}
	return events, nil
}

// place is where a solo entry is since an event, if it changed that. Where the server's clock jumped no time is known.
func (s *site) place(e *event) (p judge.Place, changed bool) {
	p = judge.Place{Seq: e.Seq, Queue: e.Queue, Entry: e.Entry, At: e.At}
	switch {
	case e.What == "ready":
		p.Position = e.Last
		if e.Due != nil {
			p.At = later(p.At, *e.Due) // it was handed back, to be claimed again from then on
		}
	case (e.What == "later" || e.What == "entry") && e.Key == "" && e.Due != nil:
		p.Due = *e.Due
	default:
		return p, false
	}
	if s.cfg.clock {
		p.At, p.Due = time.Time{}, time.Time{}
	}
	return p, true
}

// readSchedules comes first: an entry of a schedule that ends afterwards was running, and its end may be in the events.
func (s *site) readSchedules(ctx context.Context, h *judge.History) error {
	var f judge.Firing
	const firingsSQL = `
SELECT j.name, f.nominal_at, f.fired_at, f.entry_id,
       EXISTS (SELECT FROM penstock.entry e WHERE e.queue_id = j.queue_id AND e.id = f.entry_id)
  FROM penstock.cron_firing f JOIN penstock.cron_job j ON j.id = f.job_id`
	err := s.each(ctx, firingsSQL, []any{&f.Job, &f.Nominal, &f.Fired, &f.Entry, &f.Running},
		func() { h.Firings = append(h.Firings, f) })
	if err != nil {
		return err
	}
	const waitingSQL = `SELECT name FROM penstock.queue WHERE kind IN ('cron', 'webhook')`
	var queue string
	if err := s.each(ctx, waitingSQL, []any{&queue}, func() { h.Waiting = append(h.Waiting, queue) }); err != nil {
		return err
	}
	var tick judge.Tick
	var n int
	const ticksSQL = `
SELECT job, (extract(epoch FROM nominal) * 1000000)::bigint, count(*) FROM judge.tick GROUP BY job, nominal`
	return s.each(ctx, ticksSQL, []any{&tick.Job, &tick.Nominal, &n}, func() { h.Ticks[tick] = n })
}

func (s *site) each(ctx context.Context, sql string, into []any, do func()) error {
	rows, err := s.db.pool.Query(ctx, sql)
	if err != nil {
		return err
	}
	_, err = pgx.ForEachRow(rows, into, func() error { do(); return nil })
	return err
}

// deadlocks are the lines in the logs of the programs that tell of one.
func (s *site) deadlocks() (lines []string, err error) {
	logs, err := filepath.Glob(filepath.Join(s.cfg.logs, "[lng]*.log"))
	if err != nil {
		return nil, err
	}
	lines = append(s.db.met, s.db.deadlocks()...)
	for _, name := range logs {
		text, err := os.ReadFile(name)
		if err != nil {
			return nil, err
		}
		for line := range strings.Lines(string(text)) {
			if strings.Contains(line, "deadlock detected (SQLSTATE 40P01)") {
				lines = append(lines, filepath.Base(name)+": "+strings.TrimSpace(line))
			}
		}
	}
	return lines, nil
}
