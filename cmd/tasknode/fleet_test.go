package main

import (
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/sync/errgroup"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/fairness"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/tasknode"
)

// fleet is a few task nodes in one process, each wired as the program is: connections of its own, hints, and the ranker
// that shares usage with the others.
type fleet struct {
	testing.TB
	dsn    string
	pool   *pgxpool.Pool
	hinter *invalidation.Hinter
	watch  func(tasknode.Ranker) tasknode.Ranker // goes between nodes and their rankers, nil for nothing
}

func newFleet(t testing.TB) *fleet {
	t.Helper()
	f := &fleet{TB: t, dsn: pgtest.DSN(t)}
	f.pool = f.open(4)
	f.hinter = invalidation.NewHinter(f.pool, 0)
	f.beside(f.hinter.Run)
	return f
}

func (f *fleet) open(conns int32) *pgxpool.Pool {
	f.Helper()
	pool, err := postgres.Open(context.Background(), postgres.Config{DSN: f.dsn, MaxConns: conns})
	if err != nil {
		f.Fatal(err)
	}
	f.Cleanup(pool.Close)
	return pool
}

// beside runs duties until the test ends.
func (f *fleet) beside(duties ...func(context.Context) error) {
	ctx, cancel := context.WithCancel(context.Background())
	group, ctx := errgroup.WithContext(ctx)
	for _, duty := range duties {
		group.Go(func() error { return duty(ctx) })
	}
	f.Cleanup(func() {
		cancel()
		if err := group.Wait(); err != nil {
			f.Errorf("duty: %v", err)
		}
	})
}

func (f *fleet) queue(c invalidation.Config) *invalidation.Queue {
	f.Helper()
	q, err := invalidation.Create(f.Context(), f.pool, "work", c)
	if err != nil {
		f.Fatal(err)
	}
	return q.Hinting(f.hinter)
}

// start runs nodes with one handler for all queues of kind task until the test ends.
func (f *fleet) start(nodes, threads int, handle invalidation.HandlerFunc) {
	f.Helper()
	f.startWithSlots(nodes, threads, 0, handle)
}

// startWithSlots is start with nodes that run so many entries at once at most; 0: as many as they have threads.
func (f *fleet) startWithSlots(nodes, threads, slots int, handle invalidation.HandlerFunc) {
	f.Helper()
	log := slog.New(slog.NewTextHandler(f.Output(), &slog.HandlerOptions{Level: slog.LevelWarn}))
	for i := range nodes {
		claims, beats := f.open(4), f.open(1)
		ranker := fairness.NewRanker(fairness.RankerConfig{Log: log}, claims)
		var gates []tasknode.Gate
		if slots > 0 {
			gates = []tasknode.Gate{&slotGate{free: slots}}
		}
		ranks := tasknode.Ranker(ranker)
		if f.watch != nil {
			ranks = f.watch(ranker)
		}
		node := tasknode.New(tasknode.Config{Name: fmt.Sprint("node-", i), Threads: threads, Ranker: ranks, Log: log, Gates: gates}, claims, beats)
		node.HandleKind(invalidation.KindTask, handle)
		listener := invalidation.NewListener(invalidation.ListenConfig{Conn: beats.Config().ConnConfig.Copy(), Wake: node.Wake, Log: log})
		f.beside(node.Run, ranker.Run, listener.Run)
	}
}

// slotGate lets so many entries run at once.
type slotGate struct {
	mu   sync.Mutex
	free int
}

// Take implements tasknode.Gate.
func (g *slotGate) Take(_ string, want int) (int, func(n int)) {
	g.mu.Lock()
	defer g.mu.Unlock()
	allow := min(want, g.free)
	g.free -= allow
	return allow, func(n int) {
		g.mu.Lock()
		g.free += n
		g.mu.Unlock()
	}
}

func (f *fleet) push(q *invalidation.Queue, pushes ...invalidation.Push) {
	f.Helper()
	for part := range slices.Chunk(pushes, 5000) {
		if _, err := q.Push(f.Context(), part...); err != nil {
			f.Fatal(err)
		}
	}
}

// waits collects how long things took.
type waits struct {
	mu   sync.Mutex
	took []time.Duration
}

func (w *waits) add(d time.Duration) {
	w.mu.Lock()
	w.took = append(w.took, d)
	w.mu.Unlock()
}

// at is the q-quantile, 0 of none.
func (w *waits) at(q float64) time.Duration {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.took) == 0 {
		return 0
	}
	slices.Sort(w.took)
	return w.took[min(len(w.took)-1, int(q*float64(len(w.took))))]
}

func (w *waits) String() string {
	return fmt.Sprintf("p50 %.1f ms, p95 %.1f ms, p99 %.1f ms", ms(w.at(0.5)), ms(w.at(0.95)), ms(w.at(0.99)))
}

func ms(d time.Duration) float64 { return float64(d) / float64(time.Millisecond) }
