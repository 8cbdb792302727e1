package recovery

import (
	"context"
	"fmt"
	"maps"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/duty"
	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// Locks is the duty that frees stuck locks.
type Locks struct {
	cfg   Config
	db    postgres.DB
	fence duty.Fence

	suspender Suspender
	sightings Sightings
	begun     Begun
	heard     Heard
	deferred  map[invalidation.Token]deferral
	// Reads answer at once where commits take seconds: what one learns says nothing of the other.
	reads, writes duty.Wait

	answered   time.Time     // the last answer of the database
	unanswered time.Duration // the longest time between two answers since the reading before
	left       bool          // the last pass left stuck locks over that it could have tried

	dead map[invalidation.NodeID]bool // in the last pass; nil before the first

	done duty.Tally[LocksStatus]
}

// LocksStatus has the counters of the duty in this term.
type LocksStatus struct {
	Held         int                  // locks in the last pass
	Stuck        int                  // of these, stuck; if it stays above 0, read the log for the reason
	DeadNodes    int                  // nodes whose lease has lapsed and whose row is kept
	Lapsed       int64                // times a lease lapsed between two passes
	Suspended    string               // why nothing is freed now; empty if recovery is not suspended
	Freed        map[StuckCause]int64 // locks
	DeadLettered int64                // entries on which too many nodes died, as poison
	TakenBack    int64                // crashes of nodes that were heard again
	Unresolved   int64                // failed tries to free a lock; each one was logged
	Removed      int64                // nodes
	ReadAt       time.Time
}

// NewLocks returns the duty for one term. It reads through db and writes through fence.
func NewLocks(db postgres.DB, fence duty.Fence, cfg Config) *Locks {
	cfg = cfg.withDefaults()
	l := &Locks{
		cfg: cfg, db: db, fence: fence,
		suspender: Suspender{Share: cfg.SuspendShare, NodesMin: cfg.SuspendNodesMin},
		begun:     Begun{},
		heard:     Heard{},
		deferred:  map[invalidation.Token]deferral{},
	}
	l.reads.ForLease(leaseDefault)
	l.writes.ForLease(leaseDefault)
	l.done.Add(func(s *LocksStatus) { s.Freed = map[StuckCause]int64{} })
	return l
}

// Run frees stuck locks until ctx ends. While a pass leaves some over the next one follows at once.
func (l *Locks) Run(ctx context.Context) error {
	loop := duty.Loop{
		Name: "locks", Pause: l.cfg.Pause, GiveUp: l.cfg.giveUp, Log: l.cfg.Log, Spaced: true, Random: l.cfg.Random,
	}
	return loop.Run(ctx, func(ctx context.Context) (time.Duration, error) {
		for {
			next, err := l.pass(ctx)
			if err != nil || next > 0 {
				return next, err
			}
		}
	})
}

// Status is safe to call at any time.
func (l *Locks) Status() (found LocksStatus) {
	l.done.Add(func(s *LocksStatus) {
		found = *s
		found.Freed = maps.Clone(s.Freed)
	})
	return found
}

func (l *Locks) pass(ctx context.Context) (time.Duration, error) {
	reading, locks, err := l.read(ctx)
	if err != nil {
		return 0, err
	}
	stuck, sightings := Diagnose(Observation{Locks: locks, Nodes: reading.Nodes}, l.sightings)
	l.sightings = sightings
	l.begun.Mark(stuck, reading.Nodes)
	overdue := l.heard.Overdue(reading.Nodes, reading.At)
	suspended := l.suspender.Judge(reading)
	l.note(ctx, reading, len(locks), len(stuck), suspended)
	if suspended != "" {
		return l.cfg.Pause, nil
	}
	if err := l.lapse(ctx, overdue); err != nil {
		return 0, err
	}
	if err := l.free(ctx, stuck); err != nil {
		return 0, err
	}
	if err := l.takeBack(ctx, reading.Nodes); err != nil {
		return 0, err
	}
	if err := l.removeNodes(ctx, reading.Nodes); err != nil {
		return 0, err
	}
	if l.left {
		return 0, nil
	}
	return l.cfg.Pause, nil
}

// answer records that the database has answered a statement.
func (l *Locks) answer() {
	now := time.Now()
	if !l.answered.IsZero() {
		l.unanswered = max(l.unanswered, now.Sub(l.answered))
	}
	l.answered = now
}

// write runs fn, which writes so many rows, in a transaction of the term, and bounds the wait for its commit.
func (l *Locks) write(ctx context.Context, rows int, fn func(context.Context, pgx.Tx) error) error {
	ctx, end := l.writes.Context(ctx, rows)
	err := l.fence.InTx(ctx, func(tx pgx.Tx) error { return fn(ctx, tx) })
	end(err)
	return err
}

const nodesSQL = `
SELECT id, name, beat, extract(epoch FROM clock_timestamp() - beat_at)::float8, lease, tokens, threads, running,
       crashed_entries <> '{}', kind = 'gateway'
  FROM penstock.node`

const clockSQL = `
SELECT extract(epoch FROM clock_timestamp())::float8,
       extract(epoch FROM clock_timestamp() - pg_postmaster_start_time())::float8`

// read reads the locks first and then the nodes, as Diagnose requires. Both tables are small. The
// clocks come last, so that they show a stall of the database during the reading.
func (l *Locks) read(ctx context.Context) (r Reading, locks []invalidation.HeldLock, err error) {
	ctx, end := l.reads.Context(ctx, 0)
	defer func() { end(err) }()
	locks, err = invalidation.HeldLocks(ctx, l.db)
	if err != nil {
		return r, nil, fmt.Errorf("read locks: %w", err)
	}
	l.answer()
	r.Nodes, err = pgx.CollectRows(postgres.Query(ctx, l.db, nodesSQL), func(row pgx.CollectableRow) (Node, error) {
		var n Node
		var silent float64
		err := row.Scan(&n.ID, &n.Name, &n.Beat, &silent, &n.Lease, &n.Tokens, &n.Threads, &n.Running,
			&n.Blamed, &n.Gateway)
		n.Silent = seconds(silent)
		return n, err
	})
	if err != nil {
		return r, nil, fmt.Errorf("read nodes: %w", err)
	}
	var clock, uptime float64
	if err := l.db.QueryRow(ctx, clockSQL).Scan(&clock, &uptime); err != nil {
		return r, nil, fmt.Errorf("read the database's clock: %w", err)
	}
	l.answer()
	lease := longestLease(r.Nodes)
	l.reads.ForLease(lease)
	l.writes.ForLease(lease)
	r.Unanswered, l.unanswered = l.unanswered, 0
	r.At, r.Clock, r.Uptime = time.Now(), seconds(clock), seconds(uptime)
	return r, locks, nil
}

func seconds(s float64) time.Duration { return time.Duration(s * float64(time.Second)) }

// note stores the results of the pass, and logs when recovery suspends itself or resumes.
func (l *Locks) note(ctx context.Context, r Reading, held, stuck int, suspended string) {
	dead, lapsed := map[invalidation.NodeID]bool{}, int64(0)
	for _, n := range r.Nodes {
		if n.dead() {
			dead[n.ID] = true
			if l.dead != nil && !l.dead[n.ID] {
				lapsed++
			}
		}
	}
	l.dead = dead
	var before string
	l.done.Add(func(s *LocksStatus) {
		before = s.Suspended
		s.Held, s.Stuck, s.DeadNodes = held, stuck, len(dead)
		s.Lapsed += lapsed
		s.Suspended, s.ReadAt = suspended, r.At
	})
	switch {
	case suspended == "" && before != "":
		l.cfg.Log.InfoContext(ctx, "recovery resumed", "stuck", stuck)
	case suspended != "" && before == "":
		l.cfg.Log.WarnContext(ctx, "recovery suspended", "reason", suspended, "stuck", stuck)
	}
}
