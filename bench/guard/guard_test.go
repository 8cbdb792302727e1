// Package guard fails when an entry comes to cost more than it did: WAL, buffers, statements, commits and allocations,
// never time. One connection and one goroutine do the work wherever the path allows, and nothing vacuums meanwhile,
// so that the same code gives the same figures on any machine.
package guard

import (
	"cmp"
	"context"
	"fmt"
	"reflect"
	"runtime"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock/penstock/bench/meter"
	"github.com/penstock/penstock/internal/devpostgres"
	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/migrations"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/tasknode"
)

// cost is what one entry took.
type cost struct{ WAL, Buffers, Statements, Commits, Allocs float64 }

// over names the figures of c that exceed those of bound times margin.
func (c cost) over(bound cost, margin float64) (names []string) {
	got, most := reflect.ValueOf(c), reflect.ValueOf(bound)
	for i := range got.NumField() {
		if got.Field(i).Float() > most.Field(i).Float()*margin {
			names = append(names, got.Type().Field(i).Name)
		}
	}
	return names
}

func (c cost) String() string {
	return fmt.Sprintf("WAL %7.1f B  buffers %6.2f  statements %7.4f  commits %7.4f  allocs %6.1f", c.WAL, c.Buffers, c.Statements, c.Commits, c.Allocs)
}

func TestEntriesCostNoMoreThanTheyDid(t *testing.T) {
	b := newBed(t)
	took := map[string]cost{}
	for _, path := range []struct {
		name    string
		entries int
		run     func(n int)
		unknown bool // the queue was opened just now: what claims have learned of its lanes is forgotten
	}{
		{name: "push single", entries: 1000, run: b.pushSingle},
		{name: "push bulk", entries: 9000, run: func(n int) { b.pushBulk(n, 0) }},
		{name: "solo drain", entries: 10_000, run: func(n int) { b.drain(solo, n) }},
		{name: "push groups", entries: 10_000, run: func(n int) { b.pushBulk(n, 50) }},
		// A lane in which a claim met keys is claimed from by another statement for 10 s, of which any part may be over.
		{name: "groups of 50", entries: 10_000, run: func(n int) { b.drain(grouped, n) }, unknown: true},
	} {
		if path.unknown {
			b.openQueue()
		}
		took[path.name] = b.measure(path.entries, path.run)
	}
	b.pushBulk(10_000, 0)
	took["node drain"] = b.measure(10_000, func(n int) { b.serve(tasknode.Config{}, func() { b.await(n) }) })
	// Polls, heartbeats, exchanges of usage and scans of a lane from its head come with time and not with entries. Those
	// that cannot be put off fall into some of the short stretches, and a quarter of these has none: there an entry has
	// four statements (two of its push, a claim, an ending) in three transactions, at whatever speed.
	b.vacuum()
	b.serve(tasknode.Config{Poll: time.Hour, Beat: 10 * time.Minute, Lease: time.Hour}, func() {
		b.pushLone(10)
		took["lone pick-up"] = b.measureQuartile(21, 5, b.pushLone)
	})

	for _, bound := range bounds {
		margin := bound.margin
		if margin == 0 {
			margin = usualMargin
		}
		got := took[bound.path]
		t.Logf("%-13s %s", bound.path, got)
		if names := got.over(bound.cost, margin); len(names) > 0 {
			t.Errorf("%s: an entry costs more %v than it did\n got %s\nmost %s\n   x %.2f", bound.path, names, got, bound.cost, margin)
		}
	}
	for _, life := range []struct {
		push, drain string
		most        float64
	}{{"push bulk", "solo drain", soloLifeWALMax}, {"push groups", "groups of 50", groupLifeWALMax}} {
		if wal := took[life.push].WAL + took[life.drain].WAL; wal > life.most {
			t.Errorf("%s and %s write %.0f B of WAL for an entry, more than the promised %.0f", life.push, life.drain, wal, life.most)
		}
	}
}

func TestACostAboveItsBoundIsNamed(t *testing.T) {
	bound := cost{WAL: 100, Buffers: 10, Statements: 1, Commits: 1, Allocs: 5}
	if names := bound.over(bound, 1); len(names) != 0 {
		t.Errorf("what costs as much as its bound is said to exceed it: %v", names)
	}
	dear := bound
	dear.WAL, dear.Commits = 111, 2
	if names := dear.over(bound, 1.1); len(names) != 2 || names[0] != "WAL" || names[1] != "Commits" {
		t.Errorf("111 B of WAL for 100 and 2 commits for 1 are named %v", names)
	}
}

func TestTheQuartileIsThatOfEachFigure(t *testing.T) {
	q := lowerQuartile([]cost{{WAL: 1, Allocs: 9}, {WAL: 2, Allocs: 1}, {WAL: 50, Allocs: 2}, {WAL: 60, Allocs: 3}})
	if q.WAL != 2 || q.Allocs != 2 {
		t.Errorf("lower quartile of 1, 2, 50, 60 and 9, 1, 2, 3 is %v and %v", q.WAL, q.Allocs)
	}
}

// bed is a private server with a queue on it, whose costs are counted.
type bed struct {
	*testing.T
	ctx        context.Context
	meter      *meter.Meter
	statements atomic.Int64
	pool       *pgxpool.Pool // one connection
	queue      *invalidation.Queue
	claims     int32
	node       *tasknode.Node
	nodePools  []*pgxpool.Pool
}

func newBed(t *testing.T) *bed {
	t.Helper()
	b := &bed{T: t, ctx: t.Context()}
	server, err := devpostgres.Start(b.ctx, devpostgres.Config{Fast: true, Settings: map[string]string{
		"autovacuum": "off", "full_page_writes": "off", "wal_compression": "off", "checkpoint_timeout": "1h",
	}})
	b.must(err)
	t.Cleanup(func() { _ = server.Stop(context.Background()) })
	admin, err := pgx.ConnectConfig(b.ctx, server.Config())
	b.must(err)
	t.Cleanup(func() { _ = admin.Close(context.Background()) })
	_, err = admin.Exec(b.ctx, `CREATE DATABASE bench`)
	b.must(err)
	b.meter, err = meter.New(b.ctx, admin)
	b.must(err)
	b.pool = b.open(server.Config(), 1)
	_, err = migrations.Up(b.ctx, b.pool.Config().ConnConfig)
	b.must(err)
	// With this limit the first lock of a group covers quantum_count as well: later ones go by the sizes that were read.
	const limit = 40_000
	config := invalidation.Config{ResultRetention: -time.Second, PayloadLimit: limit}
	b.queue, err = invalidation.Create(b.ctx, b.pool, "bench", config)
	b.must(err)
	b.pushSingle(1000)
	b.drain(solo, 1000)
	b.pushBulk(1000, 50)
	b.drain(grouped, 1000)
	return b
}

// openQueue opens the queue anew.
func (b *bed) openQueue() {
	var err error
	b.queue, err = invalidation.Open(b.ctx, b.pool, "bench")
	b.must(err)
}

func (b *bed) must(err error) {
	b.Helper()
	if err != nil {
		b.Fatal(err)
	}
}

// open returns a pool on the bench database whose statements are counted.
func (b *bed) open(server *pgx.ConnConfig, conns int32) *pgxpool.Pool {
	dsn := fmt.Sprintf("host=%s port=%d user=%s dbname=bench", server.Host, server.Port, server.User)
	plain, err := postgres.Open(b.ctx, postgres.Config{DSN: dsn, MaxConns: conns})
	b.must(err)
	defer plain.Close()
	config := plain.Config()
	config.ConnConfig.Tracer = counter{&b.statements}
	pool, err := pgxpool.NewWithConfig(b.ctx, config)
	b.must(err)
	b.Cleanup(pool.Close)
	return pool
}

// measure runs n entries through a path and returns what each cost.
func (b *bed) measure(n int, run func(n int)) cost {
	b.Helper()
	before, _ := b.read()
	statements, allocs := b.statements.Load(), mallocs()
	run(n)
	allocs, statements = mallocs()-allocs, b.statements.Load()-statements
	after, own := b.read()
	spent := after.Since(before)
	each := func(v float64) float64 { return v / float64(n) }
	return cost{
		WAL: each(float64(spent.WALBytes)), Buffers: each(float64(spent.Buffers)), Statements: each(float64(statements)),
		Commits: each(float64(spent.Commits - own)), Allocs: each(float64(allocs)),
	}
}

// measureQuartile measures a path in stretches of n entries, and returns the lower quartile of each figure.
func (b *bed) measureQuartile(stretches, n int, run func(n int)) cost {
	b.Helper()
	costs := make([]cost, stretches)
	for i := range costs {
		costs[i] = b.measure(n, run)
	}
	return lowerQuartile(costs)
}

// lowerQuartile is the value of each figure that a quarter of the costs do not exceed.
func lowerQuartile(costs []cost) (q cost) {
	for i := range reflect.TypeFor[cost]().NumField() {
		slices.SortFunc(costs, func(x, y cost) int {
			return cmp.Compare(reflect.ValueOf(x).Field(i).Float(), reflect.ValueOf(y).Field(i).Float())
		})
		reflect.ValueOf(&q).Elem().Field(i).Set(reflect.ValueOf(costs[len(costs)/4]).Field(i))
	}
	return q
}

// read takes the server's counters when every connection has reported its own. own is how many commits that took.
func (b *bed) read() (r meter.Reading, own int64) {
	own, err := meter.Flush(b.ctx, append(b.nodePools, b.pool)...)
	b.must(err)
	r, err = b.meter.Read(b.ctx, "bench")
	b.must(err)
	return r, own
}

// vacuum removes the rows that the paths before have deleted. A node scans a lane from its head about once a second,
// over dead rows as well: how many buffers that costs an entry would depend on how long the entry takes.
func (b *bed) vacuum() {
	_, err := b.pool.Exec(b.ctx, `VACUUM`)
	b.must(err)
}

func mallocs() uint64 {
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	return m.Mallocs
}

// counter counts the statements that go to the server.
type counter struct{ n *atomic.Int64 }

func (c counter) TraceQueryStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceQueryStartData) context.Context {
	c.n.Add(1)
	return ctx
}
func (counter) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

func (counter) TraceBatchStart(ctx context.Context, _ *pgx.Conn, _ pgx.TraceBatchStartData) context.Context {
	return ctx
}
func (c counter) TraceBatchQuery(context.Context, *pgx.Conn, pgx.TraceBatchQueryData) { c.n.Add(1) }
func (counter) TraceBatchEnd(context.Context, *pgx.Conn, pgx.TraceBatchEndData)       {}
