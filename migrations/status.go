package migrations

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// The states of a migration. One is unknown to a program that is older than the database, and so are functions of a
// newer release.
const (
	Applied = "applied"
	Pending = "pending"
	Unknown = "unknown"
)

// FunctionsName is the name of the files of functions in lists of migrations.
const FunctionsName = "functions"

// Status is one step of the schema's history, as this program or the database knows it.
type Status struct {
	Version   int64      `json:"version"`        // 0: the functions
	Name      string     `json:"name,omitempty"` // empty: this program does not know it
	State     string     `json:"state" doc:"applied, pending, or unknown to this program."`
	AppliedAt *time.Time `json:"applied_at,omitempty"`
}

// Queryer is a pool, a connection or a transaction.
type Queryer interface {
	Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error)
	QueryRow(ctx context.Context, sql string, args ...any) pgx.Row
}

// List compares the migrations that this program knows with those that the database has seen, in order, and then its
// functions: applied if they are, or were before others of the same release replaced them. It only reads.
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
	functions, err := functionStatus(ctx, db)
	if err != nil {
		return nil, fmt.Errorf("read which functions were applied: %w", err)
	}
	return append(all, functions), nil
}

const appliedSQL = `
SELECT version_id, max(tstamp) FROM ` + Table + `
 WHERE is_applied AND version_id > 0 GROUP BY version_id`

// applied returns when each migration was applied; there is no table before the first.
func applied(ctx context.Context, db Queryer) (map[int64]time.Time, error) {
	if there, err := exists(ctx, db, Table); err != nil || !there {
		return nil, err
	}
	rows, _ := db.Query(ctx, appliedSQL)
	found := map[int64]time.Time{}
	var version int64
	var at time.Time
	_, err := pgx.ForEachRow(rows, []any{&version, &at}, func() error { found[version] = at; return nil })
	return found, err
}

func functionStatus(ctx context.Context, db Queryer) (Status, error) {
	status := Status{Name: FunctionsName, State: Pending}
	set, err := readFunctions(files)
	if err != nil {
		return status, err
	}
	if there, err := exists(ctx, db, "penstock.schema_version"); err != nil || !there {
		return status, err
	}
	status.State, status.AppliedAt, _, err = set.state(ctx, db)
	return status, err
}

func exists(ctx context.Context, db Queryer, table string) (bool, error) {
	var there bool
	err := db.QueryRow(ctx, `SELECT to_regclass($1) IS NOT NULL`, table).Scan(&there)
	return there, err
}

// OldError says that the database is older than this program: no waiting helps.
type OldError struct{ Missing string }

func (e *OldError) Error() string {
	what := "migration " + e.Missing + " is missing"
	if e.Missing == FunctionsName {
		what = "its functions are not those of this program"
	}
	return "the schema is too old: " + what + "; run penstock migrate up, or start one leader with --migrate"
}

// Final says that the error does not pass by itself.
func (e *OldError) Final() {}

// Check is an *OldError where a migration is missing that this program knows, or its functions are pending.
func Check(ctx context.Context, db Queryer) error {
	all, err := List(ctx, db)
	for _, m := range all {
		if m.State == Pending {
			return &OldError{m.Name}
		}
	}
	return err
}

// CheckIfReadable is Check for a program whose role may not read what was applied, as those of nodes and gateways: it
// then finds nothing missing.
func CheckIfReadable(ctx context.Context, db Queryer) error {
	const insufficientPrivilege = "42501"
	err := Check(ctx, db)
	var refused *pgconn.PgError
	if errors.As(err, &refused) && refused.Code == insufficientPrivilege {
		return nil
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

// SQL returns the text of one migration, or of all functions, to be applied with other tools: the
// functions in one transaction, which also records that they were applied.
func SQL(name string) (string, error) {
	if name == FunctionsName {
		return functionsSQL()
	}
	text, err := files.ReadFile(name)
	if err != nil {
		return "", fmt.Errorf("read migration %q: %w", name, err)
	}
	return string(text), nil
}

func functionsSQL() (string, error) {
	set, err := readFunctions(files)
	if err != nil {
		return "", err
	}
	var all strings.Builder
	fmt.Fprintf(&all, "BEGIN;\n%s;\n", beginSetSQL)
	hashes := make([]string, 0, 2*len(set.files))
	for _, f := range set.files {
		fmt.Fprintf(&all, "\n-- functions/%s\n%s", f.name, f.text)
		hashes = append(hashes, fmt.Sprintf("'%s', '%s'", f.name, f.hash))
	}
	fmt.Fprintf(&all, "\nINSERT INTO penstock.schema_version (hash, release, files)\n"+
		"VALUES ('%s', %d, jsonb_build_object(%s))%s;\nCOMMIT;\n",
		set.hash, set.release, strings.Join(hashes, ", "), againSQL)
	return all.String(), nil
}

// OwnerError says that a role which does not own the schema was to grant rights on it.
type OwnerError struct{ User string }

func (e *OwnerError) Error() string {
	return fmt.Sprintf("only the owner of the schema penstock grants rights on it, and %q is not", e.User)
}
