package pgtest

import (
	"context"
	"crypto/rand"
	"fmt"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock/penstock/migrations"
)

// template asks createDatabase for a copy of the migrated template.
const template = ""

// startTimeout bounds the start of the server and its template, downloads included.
const startTimeout = 5 * time.Minute

// sharedBackend starts the test binary's one server at the first call. A failure is every test's failure.
// It is the one global of this package: tests have nothing else in common to hang it on.
var sharedBackend = sync.OnceValues(func() (*backend, error) {
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	server, err := startShared(ctx)
	if err != nil {
		return nil, err
	}
	return newBackend(ctx, server)
})

// backend is a server with a migrated template in it.
type backend struct {
	engine   engine
	admin    *pgxpool.Pool
	presence *pgx.Conn // see presence.go; lives as long as the backend
	template string
	strategy string // of CREATE DATABASE
	run      string // distinguishes the databases of this backend
	count    atomic.Int64
}

func newBackend(ctx context.Context, server engine) (*backend, error) {
	config, err := pgxpool.ParseConfig(server.ConnString())
	if err != nil {
		return nil, fmt.Errorf("parse DSN of test server: %w", err)
	}
	config.MaxConns = 4
	admin, err := pgxpool.NewWithConfig(ctx, config)
	if err != nil {
		return nil, fmt.Errorf("connect to test server: %w", err)
	}
	presence, err := pgx.Connect(ctx, server.ConnString())
	if err != nil {
		admin.Close()
		return nil, fmt.Errorf("connect to test server: %w", err)
	}
	b := &backend{engine: server, admin: admin, presence: presence, run: strings.ToLower(rand.Text()[:10])}
	if err := b.prepare(ctx); err != nil {
		b.close(ctx)
		return nil, err
	}
	return b, nil
}

func (b *backend) close(ctx context.Context) {
	b.admin.Close()
	_ = b.presence.Close(ctx) // nothing hangs on a good-bye
}

// prepare makes the migrated template unless it exists, under a name with its key, and drops databases that earlier
// test binaries left.
func (b *backend) prepare(ctx context.Context) error {
	key, _, err := templateKey()
	if err != nil {
		return err
	}
	owner := key[:16]
	b.template = "penstock_template_" + owner
	if _, err := b.presence.Exec(ctx, "SELECT pg_advisory_lock($1)", templateLock); err != nil {
		return fmt.Errorf("lock templates: %w", err)
	}
	for _, held := range []string{b.run, owner} {
		if err := hold(ctx, b.presence, held); err != nil {
			return err
		}
	}
	if err := sweep(ctx, b.presence, b.run, owner); err != nil {
		return err
	}
	if err := b.ensureTemplate(ctx); err != nil {
		return err
	}
	if err := b.chooseStrategy(ctx); err != nil {
		return err
	}
	if _, err := b.presence.Exec(ctx, "SELECT pg_advisory_unlock($1)", templateLock); err != nil {
		return fmt.Errorf("unlock templates: %w", err)
	}
	return nil
}

// chooseStrategy copies files where that is cheap. It takes two checkpoints, which cost nothing while fsync is off:
// measured in memory 13 ms a clone, against 95-120 ms for the default, which writes every page to the log.
func (b *backend) chooseStrategy(ctx context.Context) error {
	const sql = "SELECT current_setting('fsync') = 'off' AND current_setting('server_version_num')::int >= 150000"
	var cheap bool
	if err := b.presence.QueryRow(ctx, sql).Scan(&cheap); err != nil {
		return fmt.Errorf("read settings of test server: %w", err)
	}
	if cheap {
		b.strategy = " STRATEGY file_copy"
	}
	return nil
}

func (b *backend) ensureTemplate(ctx context.Context) error {
	var exists bool
	err := b.presence.QueryRow(ctx, "SELECT EXISTS (SELECT FROM pg_database WHERE datname = $1)",
		b.template).Scan(&exists)
	if err != nil {
		return fmt.Errorf("find template: %w", err)
	}
	if exists {
		return nil
	}
	return b.makeTemplate(ctx)
}

// makeTemplate migrates a database of another name and renames it last: a template is complete or absent.
func (b *backend) makeTemplate(ctx context.Context) error {
	unfinished := b.template + "_unfinished"
	for _, sql := range []string{
		"DROP DATABASE IF EXISTS " + quote(unfinished) + " WITH (FORCE)",
		"CREATE DATABASE " + quote(unfinished) + " TEMPLATE template0",
	} {
		if _, err := b.presence.Exec(ctx, sql); err != nil {
			return fmt.Errorf("create template: %w", err)
		}
	}
	config, err := pgx.ParseConfig(b.dsn(unfinished))
	if err != nil {
		return fmt.Errorf("parse DSN of template: %w", err)
	}
	if _, err := migrations.Up(ctx, config); err != nil {
		return fmt.Errorf("migrate template: %w", err)
	}
	// The finished template accepts no connections: an open one would make every clone of it fail.
	for _, sql := range []string{
		"ALTER DATABASE " + quote(unfinished) + " WITH ALLOW_CONNECTIONS false",
		"ALTER DATABASE " + quote(unfinished) + " RENAME TO " + quote(b.template),
	} {
		if _, err := b.presence.Exec(ctx, sql); err != nil {
			return fmt.Errorf("finish template: %w", err)
		}
	}
	return nil
}

// createDatabase copies a database, the template by default, and returns the copy's DSN and how to drop it.
func (b *backend) createDatabase(ctx context.Context, from string) (dsn string, drop func(context.Context) error,
	err error,
) {
	if from == template {
		from = b.template
	}
	name := fmt.Sprintf("penstock_test_%s_%d", b.run, b.count.Add(1))
	if _, err := b.admin.Exec(ctx, "CREATE DATABASE "+quote(name)+" TEMPLATE "+quote(from)+b.strategy); err != nil {
		return "", nil, err
	}
	drop = func(ctx context.Context) error {
		_, err := b.admin.Exec(ctx, "DROP DATABASE "+quote(name)+" WITH (FORCE)")
		return err
	}
	return b.dsn(name), drop, nil
}

func (b *backend) dsn(database string) string { return withDatabase(b.engine.ConnString(), database) }

func quote(name string) string { return pgx.Identifier{name}.Sanitize() }

// withDatabase is dsn, a URL or a list of key=value pairs, for another database of the same server.
func withDatabase(dsn, name string) string {
	u, err := url.Parse(dsn)
	if err != nil || u.Scheme == "" {
		return dsn + " dbname=" + name // the last one of a key counts
	}
	u.Path = "/" + name
	return u.String()
}
