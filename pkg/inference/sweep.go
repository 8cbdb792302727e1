package inference

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/duty"
	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/slot"
)

// sweeper deletes rows that are too old, and those that entries have left. It is part of the Prober of each process
// and no duty of the leader: partitions for output are made where runs write to them, also while nobody is elected.
type sweeper struct {
	probeEvery time.Duration
	db         postgres.DB
	registry   *Registry
	log        *slog.Logger
	believed   duty.Clock // judges the database's clock for what is deleted by it

	swept                   time.Time // when what is too old was deleted last
	sweeping, sweepingEnded duty.Failing

	due float64 // the part of a turn that the process has come to; it has one at 1
}

// sweepEvery is how often each process deletes what is too old.
const sweepEvery = time.Minute

func newSweeper(t tuning, db postgres.DB, registry *Registry, log *slog.Logger) *sweeper {
	return &sweeper{
		probeEvery: t.probeEvery, db: db, registry: registry, log: log,
		due: rand.Float64(), // processes that were started together have their first turns apart
	}
}

// pass deletes what is due after a claim of so many probes. It returns runs of entries that have ended, which workers
// are to stop.
func (s *sweeper) pass(ctx context.Context, probes int) []endedRun {
	if time.Since(s.swept) > sweepEvery {
		s.sweep(ctx)
	}
	if s.turn(probes) {
		return s.sweepEnded(ctx)
	}
	return nil
}

// turn is called after each claim of probes, with their number, and says whether it is this process's turn to sweep
// what is left of entries that have ended. The turns of all processes together come once a minute, for each process
// counts its part of the probes; without instances each has one a minute. The first one after a start of all processes
// comes within a minute too: runs that nobody waits for any more go on until then.
func (s *sweeper) turn(probes int) bool {
	passed := s.probeEvery / 5
	part := passed.Minutes()
	if all := len(s.registry.current.Load().instances); all > 0 {
		part = s.probeEvery.Minutes() * float64(probes) / float64(all)
	}
	s.due += part
	turn := s.due >= 1
	if turn {
		s.due = 0
	}
	return turn
}

// sweepEnded drops what is left of entries that have ended. It returns the runs among that, which workers are to stop.
func (s *sweeper) sweepEnded(ctx context.Context) []endedRun {
	runs, err := sweepRuns(ctx, s.db)
	_, failed := s.db.Exec(ctx, sweepHarmSQL)
	s.sweepingEnded.Note(ctx, s.log, slog.LevelError, "sweep what entries have left", errors.Join(err, failed))
	return runs
}

// sweep drops what is too old.
func (s *sweeper) sweep(ctx context.Context) {
	s.swept = time.Now()
	err := errors.Join(slot.SweepDemand(ctx, s.db), s.delete(ctx, sweepUsageSQL), s.delete(ctx, sweepFoldsSQL),
		s.sweepOutput(ctx, outputFor))
	level := slog.LevelError
	if errors.Is(err, duty.ErrClock) { // which waits, and ends by itself
		level = slog.LevelWarn
	}
	s.sweeping.Note(ctx, s.log, level, "sweep", err)
}

const (
	sweepOutputSQL = `SELECT penstock.sweep_output($1)`
	makeOutputSQL  = `SELECT penstock.make_output_partitions()` // which sweep_output does as well
	readClockSQL   = `SELECT clock_timestamp()`

	outputMax = 10_000      // rows that a statement deletes
	outputFor = time.Second // a sweep: probes wait meanwhile
)

// sweepOutput drops output that is not kept, with one statement or, while rows are left, as many as begin within the
// time.
// What it locks may stop all output, so that each statement is a transaction of its own, and the clock is judged before
// it.
func (s *sweeper) sweepOutput(ctx context.Context, most time.Duration) error {
	for began := time.Now(); time.Since(began) < most; {
		var clock time.Time
		if err := s.db.QueryRow(ctx, readClockSQL).Scan(&clock); err != nil {
			return err
		}
		if err := s.believed.Check(clock); err != nil {
			_, failed := s.db.Exec(ctx, makeOutputSQL)
			return errors.Join(err, failed)
		}
		var gone int64
		err := s.db.QueryRow(ctx, sweepOutputSQL, outputMax).Scan(&gone)
		if err != nil || gone < outputMax {
			return err
		}
	}
	return nil
}

// delete runs a statement that deletes what is old by the database's clock.
func (s *sweeper) delete(ctx context.Context, sql string) error {
	return postgres.InTx(ctx, s.db, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, sql); err != nil {
			return err
		}
		return s.believed.CheckTx(ctx, tx)
	})
}
