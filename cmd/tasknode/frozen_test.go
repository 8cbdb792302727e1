package main

import (
	"context"
	"encoding/json"
	"log/slog"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock/penstock"
	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// behindProxy is a task node wired as the program is, whose connections all go through a proxy.
type behindProxy struct {
	*testing.T
	proxy *proxy
	pool  *pgxpool.Pool // of the test, past the proxy
	queue *invalidation.Queue
	node  *node
}

func startBehindProxy(t *testing.T, handler invalidation.HandlerFunc, settings ...func(*Config)) *behindProxy {
	t.Helper()
	dsn := pgtest.DSN(t)
	x := &behindProxy{T: t, proxy: newProxy(t, dsn)}
	var err error
	if x.pool, err = postgres.Open(t.Context(), postgres.Config{DSN: dsn}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(x.pool.Close)
	if x.queue, err = invalidation.Create(t.Context(), x.pool, "work", invalidation.Config{}); err != nil {
		t.Fatal(err)
	}
	cfg := defaults()
	cfg.Database.URL = x.proxy.dsn
	cfg.TaskNode.Lease, cfg.TaskNode.Beat, cfg.TaskNode.Threads = 4*time.Second, 800*time.Millisecond, 8
	cfg.TaskNode.Hints, cfg.TaskNode.Governor, cfg.TaskNode.Grace = false, false, time.Second
	for _, set := range settings {
		set(&cfg)
	}
	log := slog.New(slog.NewTextHandler(t.Output(), nil))
	db, err := penstock.Open(t.Context(), cfg.Database.Connect(4))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(db.Close)
	if x.node, err = newNode(cfg, db, nil, log); err != nil {
		t.Fatal(err)
	}
	x.node.task.Handle("work", handler)
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- x.node.run(ctx, listener) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("run node: %v", err)
		}
	})
	return x
}

// longLease is for nodes of which no lease is to lapse, however busy the machine is.
func longLease(c *Config) { c.TaskNode.Lease = time.Minute }

// eventually waits until sql is true.
func (x *behindProxy) eventually(within time.Duration, contract, sql string, args ...any) {
	x.Helper()
	for start := time.Now(); ; time.Sleep(20 * time.Millisecond) {
		var ok bool
		if err := x.pool.QueryRow(x.Context(), sql, args...).Scan(&ok); err != nil {
			x.Fatal(err)
		}
		if ok {
			return
		}
		if time.Since(start) > within {
			x.Fatalf("not within %v: %s", within, contract)
		}
	}
}

func (x *behindProxy) push(entries int) {
	x.Helper()
	pushes := make([]invalidation.Push, entries)
	for i := range pushes {
		pushes[i].Payload = json.RawMessage(`{}`)
	}
	if _, err := x.queue.Push(x.Context(), pushes...); err != nil {
		x.Fatal(err)
	}
}

// A connection that dies without a word must not cost the lease while new ones reach the database.
func TestAFrozenHeartbeatConnectionDoesNotCostTheLease(t *testing.T) {
	var ended atomic.Int64
	goOn := make(chan struct{})
	x := startBehindProxy(t, func(ctx context.Context, _ *invalidation.Run) (json.RawMessage, error) {
		select {
		case <-ctx.Done():
			ended.Add(1)
			return nil, ctx.Err()
		case <-goOn:
			return nil, nil
		}
	}, func(c *Config) { c.TaskNode.Lease = 15 * time.Second }) // a busy machine is away for a second
	x.push(4)
	x.eventually(time.Minute, "four run", `SELECT EXISTS (SELECT FROM penstock.node WHERE cardinality(tokens) = 4)`)
	for range 2 { // the connection that comes in its stead, too
		var beat int64
		if err := x.pool.QueryRow(t.Context(), `SELECT beat FROM penstock.node`).Scan(&beat); err != nil {
			t.Fatal(err)
		}
		if x.proxy.freeze("SET beat_at = clock_timestamp(), beat = beat + 1") == 0 {
			t.Fatal("no connection carried a heartbeat")
		}
		x.eventually(time.Minute, "heartbeats go on", `SELECT beat >= $1 + 3 FROM penstock.node`, beat)
	}
	close(goOn)
	x.eventually(time.Minute, "all done", `SELECT count(*) = 4 FROM penstock.result`)
	if lost := x.node.task.Stats().LeasesLost.Load(); lost > 0 || ended.Load() > 0 {
		t.Errorf("the lease was lost %d times, and %d runs were ended", lost, ended.Load())
	}
}

// All connections of a node die without a word, claims and endings among them. What was on its way is repeated on new ones
// once a lease is over.
func TestANodeOutlivesConnectionsThatAllFreeze(t *testing.T) {
	goOn, running := make(chan struct{}), make(chan struct{}, 100)
	x := startBehindProxy(t, func(context.Context, *invalidation.Run) (json.RawMessage, error) {
		running <- struct{}{}
		<-goOn
		return nil, nil
	})
	x.push(8)
	for range 8 {
		<-running
	}
	x.proxy.freeze("")
	close(goOn)
	x.push(50)
	x.eventually(2*time.Minute, "all done", `SELECT count(*) >= 58 FROM penstock.result`)
	var repeated int
	if err := x.pool.QueryRow(t.Context(), `SELECT count(*) - 58 FROM penstock.result`).Scan(&repeated); err != nil || repeated != 0 {
		t.Errorf("%d results too many, %v", repeated, err)
	}
}
