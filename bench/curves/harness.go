// Package curves measures how Penstock's throughput and latency change with what surrounds the work: how much waits,
// in which states, under how many keys and flows, on how many nodes, behind a held snapshot, through a pooler.
//
// Nodes run in processes of their own (node.go), on one private durable Postgres; each axis gets a new database.
package curves

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"os"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock/penstock/bench/meter"
	"github.com/penstock/penstock/internal/devpostgres"
	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/migrations"
	"github.com/penstock/penstock/pkg/invalidation"
)

// Harness measures axes. Start fills in Server, Program and Log. Of the other fields, Entries and PointTime are
// needed.
type Harness struct {
	Server    *pgx.ConnConfig // its superuser, any database
	Program   []string        // starts a node's process; its configuration is added as the last argument
	Entries   int             // drained at each point
	PointTime time.Duration   // of one drain: it ends before Entries are done
	Short     bool            // fewer and smaller points
	HeldFor   time.Duration   // over which axis held is stretched, at 1,000 entries a second; 0: as fast as it goes
	Profile   string          // folder for profiles of the nodes in axis node
	Log       *slog.Logger

	admin *pgx.Conn
	meter *meter.Meter
}

// ServerSettings are durable. No checkpoint comes by itself, so that its full-page images do not blur the WAL
// of an entry.
var ServerSettings = map[string]string{
	"fsync": "on", "synchronous_commit": "on", "full_page_writes": "on",
	"shared_buffers": "1GB", "max_wal_size": "16GB", "checkpoint_timeout": "1h", "max_connections": "200",
}

const template = "bench_template"

// Start opens the harness on a private server, which source describes. Its nodes are processes of this program, whose
// configuration is the value of the flag -node. stop ends both.
func (h *Harness) Start(ctx context.Context) (source string, stop func() error, err error) {
	self, err := os.Executable()
	if err != nil {
		return "", nil, fmt.Errorf("find this program: %w", err)
	}
	server, err := devpostgres.Start(ctx, devpostgres.Config{Settings: ServerSettings})
	if err != nil {
		return "", nil, err
	}
	ending := context.WithoutCancel(ctx)
	h.Server, h.Program, h.Log = server.Config(), []string{self, "-node"}, slog.New(slog.NewTextHandler(os.Stderr, nil))
	if err := h.Open(ctx); err != nil {
		return "", nil, errors.Join(err, server.Stop(ending))
	}
	return server.Source(), func() error { return errors.Join(h.Close(ending), server.Stop(ending)) }, nil
}

// Open prepares a migrated database of which every axis gets a copy.
func (h *Harness) Open(ctx context.Context) (err error) {
	if h.admin, err = pgx.ConnectConfig(ctx, h.Server.Copy()); err != nil {
		return fmt.Errorf("connect: %w", err)
	}
	if h.meter, err = meter.New(ctx, h.admin); err != nil {
		return err
	}
	if _, err = h.admin.Exec(ctx, `CREATE DATABASE `+template); err != nil {
		return fmt.Errorf("create database: %w", err)
	}
	config := h.Server.Copy()
	config.Database = template
	_, err = migrations.Up(ctx, config)
	return err
}

// Close ends the harness's connection.
func (h *Harness) Close(ctx context.Context) error { return h.admin.Close(ctx) }

// sizes are the points of an axis.
func (h *Harness) sizes(short, full []int) []int {
	if h.Short {
		return short
	}
	return full
}

// testbed is a database with one queue, and a pool of the harness's own on it.
type testbed struct {
	harness *Harness
	dsn     string
	pool    *pgxpool.Pool
	queue   *invalidation.Queue
	claims  int32
}

const database = "bench"

// testbed returns a new database with a queue; the one before is dropped.
func (h *Harness) testbed(ctx context.Context, c invalidation.Config) (*testbed, error) {
	for _, sql := range []string{
		`DROP DATABASE IF EXISTS ` + database + ` WITH (FORCE)`,
		`CREATE DATABASE ` + database + ` TEMPLATE ` + template,
		`CHECKPOINT`,
	} {
		if _, err := h.admin.Exec(ctx, sql); err != nil {
			return nil, fmt.Errorf("prepare database: %w", err)
		}
	}
	query := url.Values{"host": {h.Server.Host}, "port": {strconv.Itoa(int(h.Server.Port))}, "user": {h.Server.User}}
	s := &testbed{harness: h, dsn: "postgres:///" + database + "?" + query.Encode()}
	var err error
	if s.pool, err = openPool(ctx, s.dsn, 18, false); err != nil {
		return nil, err
	}
	if c.ResultRetention == 0 {
		c.ResultRetention = -time.Second
	}
	if s.queue, err = invalidation.Create(ctx, s.pool, "bench", c); err != nil {
		s.close()
		return nil, err
	}
	return s, nil
}

// openPool opens a pool that the meter does not wait for.
func openPool(ctx context.Context, dsn string, conns int32, pooled bool) (*pgxpool.Pool, error) {
	plain, err := postgres.Open(ctx, postgres.Config{DSN: dsn, MaxConns: conns, Pooled: pooled})
	if err != nil {
		return nil, err
	}
	defer plain.Close()
	config := plain.Config()
	config.ConnConfig.RuntimeParams["application_name"] = meter.Bystander
	pool, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return nil, fmt.Errorf("open pool: %w", err)
	}
	return pool, nil
}

func (s *testbed) close() { s.pool.Close() }

func (s *testbed) exec(ctx context.Context, sql string, args ...any) error {
	if _, err := s.pool.Exec(ctx, sql, args...); err != nil {
		return fmt.Errorf("prepare the point: %w", err)
	}
	return nil
}

// Axis is one curve: it adds its points one by one, so that those are kept that were measured when its time is over.
type Axis struct {
	Name, Title, X string
	Measure        func(h *Harness, ctx context.Context, add func(Point)) error
}

// Point is one measurement.
type Point struct {
	Axis    string  `json:"axis"`
	Series  string  `json:"series,omitempty"`
	X       string  `json:"x"`
	Figures Figures `json:"figures"`
}

// Figures are measured values by the titles of their columns.
type Figures map[string]float64

// with adds further figures.
func (f Figures) with(others ...Figures) Figures {
	for _, other := range others {
		for name, value := range other {
			f[name] = value
		}
	}
	return f
}

// Measure runs an axis for at most d. It returns the points there are and says what is missing.
func (h *Harness) Measure(ctx context.Context, a Axis, d time.Duration) ([]Point, error) {
	var points []Point
	bounded, cancel := context.WithTimeout(ctx, d)
	defer cancel()
	start := time.Now()
	err := a.Measure(h, bounded, func(p Point) {
		p.Axis = a.Name
		points = append(points, p)
		h.Log.Info("measured", "axis", a.Name, "series", p.Series, "x", p.X, "after",
			time.Since(start).Round(100*time.Millisecond))
	})
	if err != nil && bounded.Err() != nil && ctx.Err() == nil {
		err = fmt.Errorf("%w of %s: the rest of the axis was not run", errTime, d)
	}
	if err != nil {
		return points, fmt.Errorf("axis %s: %w", a.Name, err)
	}
	return points, nil
}

var errTime = errors.New("out of time")

// count writes a number as people do: 10k, 1M.
func count(n int) string {
	switch {
	case n >= 1_000_000 && n%100_000 == 0:
		return strconv.FormatFloat(float64(n)/1e6, 'f', -1, 64) + "M"
	case n >= 1000 && n%100 == 0:
		return strconv.FormatFloat(float64(n)/1e3, 'f', -1, 64) + "k"
	}
	return strconv.Itoa(n)
}
