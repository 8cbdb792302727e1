package main

import (
	"bytes"
	"context"
	"fmt"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock/penstock/internal/devpostgres"
)

const (
	superuser    = "postgres"
	databaseName = "chaos"
)

// database is the private Postgres with fsync on, and the harness's own connections, which do not
// go through the proxy.
type database struct {
	server *devpostgres.Server
	socket string // of the server that was started first
	pool   *pgxpool.Pool
	timed  *pgxpool.Pool // one connection, for what is timed: it waits for no other statement of the harness
	clock  *clock        // nil: libfaketime is not installed
	log    string        // file of the server's log, which each start begins anew
	keep   string        // directory for logs that tell of deadlocks

	met []string // deadlocks before the last restart

	mu   sync.Mutex
	host string // directory of the socket of the primary
	port uint16
}

func startDatabase(ctx context.Context, clock *clock) (*database, error) {
	if clock != nil {
		clock.enter()
		defer clock.leave()
	}
	server, err := devpostgres.Start(ctx, devpostgres.Config{Settings: map[string]string{
		"fsync": "on", "synchronous_commit": "on", "max_connections": "120", "shared_buffers": "128MB",
		"autovacuum_naptime": "5s", "deadlock_timeout": "500ms", "max_wal_senders": "4", "wal_keep_size": "512MB",
		"max_wal_size":     "512MB",
		"log_min_messages": "warning",
	}})
	if err != nil {
		return nil, err
	}
	cc := server.Config()
	d := &database{server: server, host: cc.Host, port: cc.Port, clock: clock}
	d.socket = filepath.Join(cc.Host, fmt.Sprintf(".s.PGSQL.%d", cc.Port))
	admin, err := pgx.ConnectConfig(ctx, cc)
	if err != nil {
		return nil, err
	}
	defer admin.Close(ctx)
	if _, err := admin.Exec(ctx, "CREATE DATABASE "+databaseName); err != nil {
		return nil, err
	}
	if d.pool, err = d.open(ctx, 6); err != nil {
		return nil, err
	}
	if d.timed, err = d.open(ctx, 1); err != nil {
		return nil, err
	}
	var data string
	err = d.pool.QueryRow(ctx, `SHOW data_directory`).Scan(&data)
	d.log = filepath.Join(filepath.Dir(data), "postgres.log")
	return d, err
}

// open opens connections to the primary, whichever server that is.
func (d *database) open(ctx context.Context, most int32) (*pgxpool.Pool, error) {
	pc, err := pgxpool.ParseConfig(d.dsn())
	if err != nil {
		return nil, err
	}
	pc.MaxConns = most
	pc.BeforeConnect = func(_ context.Context, cc *pgx.ConnConfig) error {
		cc.Host, cc.Port = d.address()
		return nil
	}
	return pgxpool.NewWithConfig(ctx, pc)
}

// deadlocks returns what the server's log tells of deadlocks, a line for each, and keeps a log that does: the
// statement that met one may be the harness's own, and the log names both.
func (d *database) deadlocks() (lines []string) {
	text, err := os.ReadFile(d.log)
	if err != nil || !bytes.Contains(text, []byte("deadlock detected")) {
		return nil
	}
	for line := range strings.Lines(string(text)) {
		if strings.Contains(line, "deadlock detected") {
			lines = append(lines, "the server: "+strings.TrimSpace(line))
		}
	}
	name := filepath.Join(d.keep, fmt.Sprintf("postgres-%d.log", time.Now().UnixNano()))
	if err := os.WriteFile(name, text, 0o600); err != nil {
		lines = append(lines, err.Error())
	}
	return lines
}

// dsn is the address of the primary past the proxy.
func (d *database) dsn() string {
	host, port := d.address()
	return dsnOf(host, port)
}

func dsnOf(host string, port uint16) string {
	return fmt.Sprintf(
		"postgres://%s@/%s?host=%s&port=%d&application_name=chaos",
		superuser,
		databaseName,
		url.QueryEscape(host),
		port,
	)
}

func (d *database) address() (host string, port uint16) {
	d.mu.Lock()
	defer d.mu.Unlock()
	return d.host, d.port
}

// move says that another server is the primary.
func (d *database) move(host string, port uint16) {
	d.mu.Lock()
	d.host, d.port = host, port
	d.mu.Unlock()
	d.pool.Reset()
	d.timed.Reset()
}

func (d *database) close() {
	for _, pool := range []*pgxpool.Pool{d.pool, d.timed} {
		if pool != nil {
			pool.Close()
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	_ = d.server.Stop(ctx)
}

// restart stops the server by a signal, leaves it down for a while and starts it again.
func (d *database) restart(ctx context.Context, how devpostgres.Signal, down time.Duration) error {
	if err := d.server.Halt(ctx, how); err != nil {
		return err
	}
	d.met = append(d.met, d.deadlocks()...)
	time.Sleep(down)
	if d.clock != nil {
		d.clock.enter()
		defer d.clock.leave()
	}
	return d.server.Resume(ctx)
}

// exec runs a statement of the harness past the proxy.
func (d *database) exec(ctx context.Context, sql string, args ...any) error {
	_, err := d.pool.Exec(ctx, sql, args...)
	return err
}

// commit makes a transaction that needs no lock, and waits for it alone.
func (d *database) commit(ctx context.Context) error {
	_, err := d.timed.Exec(ctx, `SELECT pg_logical_emit_message(true, 'chaos', '')`)
	return err
}

// lockTable keeps every statement from a hot table for a while. One table at a time: locks on several
// would deadlock with statements of the product, by no fault of theirs.
func (d *database) lockTable(ctx context.Context, table string, hold time.Duration) error {
	return pgx.BeginFunc(ctx, d.pool, func(tx pgx.Tx) error {
		sql := `LOCK TABLE ` + pgx.Identifier{"penstock", table}.Sanitize() + ` IN ACCESS EXCLUSIVE MODE`
		if _, err := tx.Exec(ctx, `SET LOCAL lock_timeout = '5s'`); err != nil {
			return err
		}
		if _, err := tx.Exec(ctx, sql); err != nil {
			return err
		}
		time.Sleep(hold)
		return nil
	})
}

// holdRows keeps rows of entries that run, or lock records, locked for a while. It waits for none, so that it takes
// part in no deadlock.
func (d *database) holdRows(ctx context.Context, entries bool, n int, hold time.Duration) error {
	return pgx.BeginFunc(ctx, d.pool, func(tx pgx.Tx) error {
		sql := `
SELECT FROM penstock.lock
 WHERE (queue_id, lock_key) IN (SELECT queue_id, lock_key FROM penstock.lock ORDER BY random() LIMIT $1)
   FOR UPDATE SKIP LOCKED`
		if entries {
			sql = `
SELECT FROM penstock.entry
 WHERE id IN (
       SELECT e.id
         FROM penstock.lock l
         JOIN penstock.entry e ON e.queue_id = l.queue_id AND e.id <= l.last_entry_id
                              AND (e.id = l.last_entry_id OR e.lock_key = l.lock_key)
        ORDER BY random() LIMIT $1)
   FOR UPDATE SKIP LOCKED`
		}
		if _, err := tx.Exec(ctx, sql, n); err != nil {
			return err
		}
		return sleepIn(ctx, tx, hold)
	})
}

// holdSnapshot keeps a REPEATABLE READ transaction open for a while, so that no dead row can be
// removed.
func (d *database) holdSnapshot(ctx context.Context, hold time.Duration) error {
	return pgx.BeginTxFunc(ctx, d.pool, pgx.TxOptions{IsoLevel: pgx.RepeatableRead}, func(tx pgx.Tx) error {
		if _, err := tx.Exec(ctx, `SELECT count(*) FROM penstock.queue`); err != nil {
			return err
		}
		return sleepIn(ctx, tx, hold)
	})
}

// sleepIn keeps a transaction open for a while, and returns an error when its connection ends.
func sleepIn(ctx context.Context, tx pgx.Tx, hold time.Duration) error {
	_, err := tx.Exec(ctx, `SELECT pg_sleep($1)`, hold.Seconds())
	if ctx.Err() != nil {
		return nil
	}
	return err
}

// holdSnapshots keeps a snapshot open all the while; after a restart of the server a new one.
func (s *site) holdSnapshots(ctx context.Context) {
	for ctx.Err() == nil {
		_ = s.db.holdSnapshot(ctx, s.cfg.run)
		select {
		case <-time.After(100 * time.Millisecond):
		case <-ctx.Done():
		}
	}
}

// useUpConnections opens connections until the server refuses, and keeps them for a while.
func (d *database) useUpConnections(ctx context.Context, hold time.Duration) (taken int) {
	var conns []*pgx.Conn
	defer func() {
		for _, c := range conns {
			c.Close(context.WithoutCancel(ctx))
		}
	}()
	for range 200 {
		c, err := pgx.Connect(
			ctx,
			d.dsn()+"_filler",
		)
		if err != nil {
			break
		}
		conns = append(conns, c)
	}
	time.Sleep(hold)
	return len(conns)
}

// killBackends terminates some of the sessions of the product.
func (d *database) killBackends(ctx context.Context, share float64) (n int, err error) {
	err = d.pool.QueryRow(ctx, `
SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity
 WHERE datname = $1 AND application_name NOT LIKE 'chaos%' AND random() < $2`, databaseName, share).Scan(&n)
	return n, err
}

// clock is the clock of the database server, moved by libfaketime.
type clock struct {
	library, file string
}

var fakeLibraries = []string{
	"/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1", "/usr/lib/aarch64-linux-gnu/faketime/libfaketime.so.1",
	"/usr/lib/faketime/libfaketime.so.1",
}

// findClock returns nil where libfaketime is not installed.
func findClock(dir string) *clock {
	for _, library := range fakeLibraries {
		if _, err := os.Stat(library); err == nil {
			c := &clock{library, filepath.Join(dir, "faketime")}
			if c.jump(0) != nil {
				return nil
			}
			return c
		}
	}
	return nil
}

// enter lets servers that are started from now on see the moved clock, and leave ends that.
func (c *clock) enter() {
	for name, value := range map[string]string{
		"LD_PRELOAD": c.library, "FAKETIME_TIMESTAMP_FILE": c.file,
		"FAKETIME_NO_CACHE": "1", "FAKETIME_DONT_FAKE_MONOTONIC": "1",
	} {
		os.Setenv(name, value)
	}
}

func (c *clock) leave() {
	for _, name := range []string{
		"LD_PRELOAD", "FAKETIME_TIMESTAMP_FILE", "FAKETIME_NO_CACHE", "FAKETIME_DONT_FAKE_MONOTONIC",
	} {
		os.Unsetenv(name)
	}
}

// jump sets how far the server's clock is ahead.
func (c *clock) jump(ahead time.Duration) error {
	next := c.file + ".next"
	text := fmt.Appendf(nil, "%+d\n", int(ahead.Seconds()))
	if err := os.WriteFile(next, text, 0o644); err != nil { //nolint:gosec // the server runs as another user
		return err
	}
	return os.Rename(next, c.file)
}
