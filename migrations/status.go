package migrations

import (
	"context"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

// The states of a migration. One is unknown to a program that is older than the database.
const (
	Applied = "applied"
	Pending = "pending"
	Unknown = "unknown"
)

// Status is one step of the schema's history, as this program or the database knows it.
type Status struct {
	Version   int64      `json:"version"`
	Name      string     `json:"name,omitempty"` // empty: this program does not know it
	State     string     `json:"state"`
	AppliedAt *time.Time `json:"applied_at,omitempty"`
}

// Queryer is a pool, a connection or a transaction.
type Queryer interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// List compares the migrations that this program knows with those that the database has seen, in order. It only reads.
func List(ctx context.Context, db Queryer) ([]Status, error) {
	all, err := Names()
	if err != nil {
		return nil, err
	}
	seen, err := applied(ctx, db)
	if err != nil {
		return nil, fmt.Errorf("read which migrations were applied: %w", err)
	}
	for i := range all {
		m := &all[i]
		if at, done := seen[m.Version]; done {
			m.State, m.AppliedAt = Applied, &at
		}
		delete(seen, m.Version)
	}
	for version, at := range seen {
		all = append(all, Status{Version: version, State: Unknown, AppliedAt: &at})
	}
	slices.SortFunc(all, func(x, y Status) int { return int(x.Version - y.Version) })
	return all, nil
}

const appliedSQL = `SELECT version_id, max(tstamp) FROM ` + Table + ` WHERE is_applied AND version_id > 0 GROUP BY version_id`

// applied is when each migration was applied; there is no table before the first.
func applied(ctx context.Context, db Queryer) (map[int64]time.Time, error) {
	var there bool
	if err := db.QueryRow(ctx, `SELECT to_regclass($1) IS NOT NULL`, Table).Scan(&there); err != nil || !there {
		return nil, err
	}
	rows, _ := db.Query(ctx, appliedSQL)
	found := map[int64]time.Time{}
	var version int64
	var at time.Time
	_, err := pgx.ForEachRow(rows, []any{&version, &at}, func() error { found[version] = at; return nil })
	return found, err
}

// OldError says that the database is older than this program: no waiting helps.
type OldError struct{ Missing string }

func (e *OldError) Error() string {
	return fmt.Sprintf("the schema is too old: migration %s is missing; apply it, or start one leader with --migrate", e.Missing)
}

// Final says that the error does not pass by itself.
func (e *OldError) Final() {}

// Check is an *OldError where a migration is missing that this program knows.
func Check(ctx context.Context, db Queryer) error {
	all, err := List(ctx, db)
	for _, m := range all {
		if m.State == Pending {
			return &OldError{m.Name}
		}
	}
	return err
}

// Names returns every migration that this program knows, in order, as pending: no database is asked.
func Names() ([]Status, error) {
	names, err := fs.Glob(files, "*.sql")
	if err != nil {
		return nil, fmt.Errorf("list migrations: %w", err)
	}
	list := make([]Status, len(names))
	for i, name := range names {
		digits, _, _ := strings.Cut(path.Base(name), "_")
		version, err := strconv.ParseInt(digits, 10, 64)
		if err != nil {
			return nil, fmt.Errorf("read version of migration %q: %w", name, err)
		}
		list[i] = Status{Version: version, Name: name, State: Pending}
	}
	return list, nil
}
