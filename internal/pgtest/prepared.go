package pgtest

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"testing"

	"github.com/jackc/pgx/v5/pgxpool"
)

// prepared has the databases that this test binary copies for Prepared, by key.
var prepared struct {
	sync.Mutex
	databases map[string]string
}

// Prepared returns the connection string of a fresh migrated database in which fill has run, which
// is dropped when the test ends. fill runs once for each key in a test binary; the databases are
// copies of the one that it filled.
func Prepared(t testing.TB, key string, fill func(context.Context, *pgxpool.Pool) error) string {
	t.Helper()
	database, err := preparedFor(key, fill)
	if err != nil {
		t.Fatalf("prepare the database of tests %q: %v", key, err)
	}
	return clone(t, database)
}

// NewPrepared is Prepared with a pool as that of New.
func NewPrepared(t testing.TB, key string, fill func(context.Context, *pgxpool.Pool) error) *pgxpool.Pool {
	t.Helper()
	return pool(t, Prepared(t, key, fill))
}

func preparedFor(key string, fill func(context.Context, *pgxpool.Pool) error) (database string, err error) {
	prepared.Lock()
	defer prepared.Unlock()
	if known := prepared.databases[key]; known != "" {
		return known, nil
	}
	database, err = prepare(fill)
	if err != nil {
		return "", err
	}
	if prepared.databases == nil {
		prepared.databases = map[string]string{}
	}
	prepared.databases[key] = database
	return database, nil
}

// prepare makes the database that is copied. Its name has the run of this binary, so that the next
// one drops it on a server that is shared.
func prepare(fill func(context.Context, *pgxpool.Pool) error) (database string, err error) {
	ctx, cancel := context.WithTimeout(context.Background(), startTimeout)
	defer cancel()
	b, err := sharedBackend()
	if err != nil {
		return "", err
	}
	dsn, _, err := b.createDatabase(ctx, template)
	if err != nil {
		return "", err
	}
	pool, err := pgxpool.New(ctx, dsn)
	if err != nil {
		return "", err
	}
	database = pool.Config().ConnConfig.Database
	err = fill(ctx, pool)
	pool.Close() // a connection would make each copy fail
	sql := "ALTER DATABASE " + quote(database) + " WITH ALLOW_CONNECTIONS false"
	if _, failed := b.admin.Exec(ctx, sql); failed != nil {
		err = errors.Join(err, fmt.Errorf("close the prepared database: %w", failed))
	}
	return database, err
}
