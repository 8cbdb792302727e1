package migrations

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"path"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
)

// Release grows by one with each published version. A function that is no longer in the files stays in the database for
// one release, in which programs of the version before may still call it. One whose arguments change does not: new
// arguments come last and have defaults, so that those programs can call the new form.
const Release = 1

// resultsFile is applied before all others, and the rest of these files behind them, in this order. Views and triggers
// are applied only if their own file has changed: unlike functions they wait for statements on the tables that they
// belong to.
const (
	resultsFile  = "results.sql"
	viewsFile    = "views.sql"
	triggersFile = "triggers.sql"
	seedFile     = "seed.sql"
	rightsFile   = "rights.sql"
)

// functionSet is the files of migrations/functions, as one program has them.
type functionSet struct {
	release int
	hash    string // of all files and the release
	files   []functionFile
}

type functionFile struct{ name, text, hash string }

func readFunctions(from fs.FS) (functionSet, error) {
	names, err := fs.Glob(from, "functions/*.sql")
	if err != nil {
		return functionSet{}, fmt.Errorf("list functions: %w", err)
	}
	last := []string{viewsFile, triggersFile, rightsFile, seedFile}
	rank := func(name string) int {
		if path.Base(name) == resultsFile {
			return -2
		}
		return slices.Index(last, path.Base(name)) // -1 for most
	}
	slices.SortStableFunc(names, func(a, b string) int { return rank(a) - rank(b) })
	set := functionSet{release: Release}
	for _, name := range names {
		text, err := fs.ReadFile(from, name)
		if err != nil {
			return functionSet{}, fmt.Errorf("read functions: %w", err)
		}
		set.files = append(set.files, functionFile{path.Base(name), string(text), hashOf(string(text))})
	}
	set.hash = set.digest()
	return set, nil
}

func (s functionSet) digest() string {
	var all strings.Builder
	fmt.Fprintf(&all, "release %d\n", s.release)
	for _, f := range s.files {
		fmt.Fprintln(&all, f.name, f.hash)
	}
	return hashOf(all.String())
}

func (s functionSet) hashes() map[string]string {
	hashes := make(map[string]string, len(s.files))
	for _, f := range s.files {
		hashes[f.name] = f.hash
	}
	return hashes
}

func hashOf(text string) string {
	sum := sha256.Sum256([]byte(text))
	return hex.EncodeToString(sum[:])
}

const (
	// The newest row says which functions are there. A set of the same release that has a row too was replaced
	// since: it belongs to a program that is older than the schema. Rows of other releases say nothing.
	setStateSQL = `
SELECT newest.release, (SELECT applied_at FROM penstock.schema_version WHERE hash = $1 AND release = newest.release)
  FROM (SELECT release FROM penstock.schema_version ORDER BY id DESC LIMIT 1) newest`

	newestFilesSQL = `SELECT files FROM penstock.schema_version ORDER BY id DESC LIMIT 1`

	recordSetSQL = `INSERT INTO penstock.schema_version (hash, release, files) VALUES ($1, $2, $3)` + againSQL

	// A set that is applied again becomes the newest one.
	againSQL = `
ON CONFLICT (hash) DO UPDATE SET id = DEFAULT, files = excluded.files, applied_at = excluded.applied_at`

	// Bodies are not checked on creation, so that files may refer to one another in any order; a test checks
	// all of them.
	beginSetSQL = `SET LOCAL check_function_bodies = off; SET LOCAL search_path = ''`
)

// state is Pending if the set is to be applied: no set was, or the newest one is of an older release, or of this
// release and this set never was. It is Unknown if the newest set is of a newer release.
func (s functionSet) state(ctx context.Context, db Queryer) (state string, at *time.Time, newest int, err error) {
	err = db.QueryRow(ctx, setStateSQL, s.hash).Scan(&newest, &at)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return Pending, nil, 0, nil
	case err != nil:
		return "", nil, 0, fmt.Errorf("read which functions were applied: %w", err)
	case newest > s.release:
		return Unknown, nil, newest, nil
	case at == nil || newest < s.release:
		return Pending, nil, newest, nil
	}
	return Applied, at, newest, nil
}

// apply replaces all functions in one transaction if they are pending. It records the schema as it is then, except for
// what was changed by hand before, if that or done has changed it, or the record is to be made anew.
func (s functionSet) apply(ctx context.Context, conn *pgx.Conn, byHand changes, anew bool, done *Result) error {
	tx, err := conn.Begin(ctx)
	if err != nil {
		return fmt.Errorf("begin: %w", err)
	}
	defer func() { _ = tx.Rollback(context.WithoutCancel(ctx)) }() // after a commit it does nothing
	state, _, newest, err := s.state(ctx, tx)
	if err != nil {
		return err
	}
	if state == Unknown {
		done.note("the functions of the database are of release %d and were left alone: this program is of release %d",
			newest, s.release)
	}
	if state != Pending && done.Applied == 0 && !anew {
		return nil
	}
	var written []string
	if state == Pending {
		if written, err = s.replace(ctx, tx); err != nil {
			return err
		}
	}
	if err := recordSchema(ctx, tx, byHand, s.release, written); err != nil {
		return err
	}
	if err := tx.Commit(ctx); err != nil {
		return fmt.Errorf("commit: %w", err)
	}
	if state == Pending {
		done.Applied++
	}
	return nil
}

// replace applies the files, removes functions that no program needs any more, and returns the functions that it wrote.
func (s functionSet) replace(ctx context.Context, tx pgx.Tx) (written []string, err error) {
	hashes, err := newestFiles(ctx, tx)
	if err != nil {
		return nil, err
	}
	if _, err := tx.Exec(ctx, beginSetSQL, pgx.QueryExecModeSimpleProtocol); err != nil {
		return nil, fmt.Errorf("prepare: %w", err)
	}
	before, err := objects(ctx, tx, functionVersionsSQL)
	if err != nil {
		return nil, fmt.Errorf("read the functions: %w", err)
	}
	if err := s.execute(ctx, tx, hashes); err != nil {
		return nil, err
	}
	after, err := objects(ctx, tx, functionVersionsSQL)
	if err != nil {
		return nil, fmt.Errorf("read the functions: %w", err)
	}
	written = slices.Sorted(maps.Keys(differences(before, after)))
	if err := dropUnused(ctx, tx, s.release, written); err != nil {
		return nil, err
	}
	if _, err := tx.Exec(ctx, recordSetSQL, s.hash, s.release, s.hashes()); err != nil {
		return nil, fmt.Errorf("record functions: %w", err)
	}
	return written, nil
}

// execute runs the files, those of views and triggers only if they have another hash than before.
func (s functionSet) execute(ctx context.Context, tx pgx.Tx, before map[string]string) error {
	for _, f := range s.files {
		var err error
		switch f.name {
		case viewsFile:
			if before[f.name] != f.hash {
				err = replaceViews(ctx, tx, f)
			}
		case triggersFile:
			if before[f.name] != f.hash {
				err = execute(ctx, tx, f)
			}
		default:
			err = execute(ctx, tx, f)
		}
		if err != nil {
			return err
		}
	}
	return nil
}

func newestFiles(ctx context.Context, tx pgx.Tx) (map[string]string, error) {
	var hashes map[string]string
	err := tx.QueryRow(ctx, newestFilesSQL).Scan(&hashes)
	if err != nil && !errors.Is(err, pgx.ErrNoRows) {
		return nil, fmt.Errorf("read which files were applied: %w", err)
	}
	return hashes, nil
}

// execute runs a file as one simple query.
func execute(ctx context.Context, tx pgx.Tx, f functionFile) error {
	if _, err := tx.Exec(ctx, f.text); err != nil {
		return fmt.Errorf("apply functions/%s: %w%s", f.name, err, placeOf(err, f.text))
	}
	return nil
}

// placeOf is the line of a file that an error of Postgres points to.
func placeOf(err error, text string) string {
	var pg *pgconn.PgError
	if !errors.As(err, &pg) || pg.Position == 0 {
		return ""
	}
	runes := []rune(text)
	end := min(int(pg.Position), len(runes))
	return fmt.Sprintf(" (line %d)", 1+strings.Count(string(runes[:end]), "\n"))
}

const (
	// How Postgres refuses to replace a view by one with other columns.
	invalidTableDefinition = "42P16"
	// How it refuses to drop one on which another object is built, which the detail names.
	dependentObjectsStillExist = "2BP01"
)

const (
	// Grants on views are read before the views are dropped, and given again to those that are there afterwards.
	viewGrantsSQL = `
SELECT coalesce(json_agg(json_build_object('view', c.oid::regclass::text,
                'right', a.privilege_type, 'option', a.is_grantable,
                'to', CASE WHEN a.grantee = 0 THEN 'PUBLIC' ELSE a.grantee::regrole::text END)), '[]')
  FROM pg_class c CROSS JOIN LATERAL aclexplode(c.relacl) a
 WHERE c.relnamespace = 'penstock'::regnamespace AND c.relkind = 'v' AND a.grantee <> c.relowner
   AND c.oid::regclass::text = ANY ($1)`

	grantViewsSQL = `
SELECT coalesce(string_agg(format('GRANT %s ON %s TO %s%s', g.right, to_regclass(g.view), g.to,
                                  CASE WHEN g.option THEN ' WITH GRANT OPTION' ELSE '' END), ';'), '')
  FROM json_to_recordset($1::json) g(view text, "right" text, option boolean, "to" text)
 WHERE to_regclass(g.view) IS NOT NULL`
)

var viewPattern = regexp.MustCompile(`(?m)^CREATE OR REPLACE VIEW (penstock\.\w+)`)

// views are those that the file makes. Others of the schema stay when it is applied: nothing would make them again.
func (f functionFile) views() []string {
	var names []string
	for _, match := range viewPattern.FindAllStringSubmatch(f.text, -1) {
		names = append(names, match[1])
	}
	return names
}

// replaceViews replaces the views of a file, or where columns of one have changed, drops all of them and makes them
// again.
func replaceViews(ctx context.Context, tx pgx.Tx, f functionFile) error {
	if _, err := tx.Exec(ctx, "SAVEPOINT views"); err != nil {
		return fmt.Errorf("replace views: %w", err)
	}
	err := execute(ctx, tx, f)
	if err == nil {
		if _, err := tx.Exec(ctx, "RELEASE SAVEPOINT views"); err != nil {
			return fmt.Errorf("replace views: %w", err)
		}
		return nil
	}
	var pg *pgconn.PgError
	if !errors.As(err, &pg) || pg.Code != invalidTableDefinition {
		return err
	}
	const back = "ROLLBACK TO SAVEPOINT views; RELEASE SAVEPOINT views"
	if _, err := tx.Exec(ctx, back, pgx.QueryExecModeSimpleProtocol); err != nil {
		return fmt.Errorf("replace views: %w", err)
	}
	views := f.views()
	var grants, regrant string
	if err := tx.QueryRow(ctx, viewGrantsSQL, views).Scan(&grants); err != nil {
		return fmt.Errorf("read grants of views: %w", err)
	}
	if _, err := tx.Exec(ctx, "DROP VIEW IF EXISTS "+strings.Join(views, ", ")); err != nil {
		return fmt.Errorf("drop views: %w%s", err, builtOn(err))
	}
	if err := execute(ctx, tx, f); err != nil {
		return err
	}
	if err := tx.QueryRow(ctx, grantViewsSQL, grants).Scan(&regrant); err != nil {
		return fmt.Errorf("grant on views: %w", err)
	}
	if _, err := tx.Exec(ctx, regrant); err != nil {
		return fmt.Errorf("grant on views: %w", err)
	}
	return nil
}

// builtOn names what is built on an object that could not be dropped for it.
func builtOn(err error) string {
	var pg *pgconn.PgError
	if !errors.As(err, &pg) || pg.Code != dependentObjectsStillExist {
		return ""
	}
	return "; drop what is built on it, and make it again afterwards: " + pg.Detail
}

const (
	// A version of a function is a row of the catalog, which CREATE OR REPLACE and ALTER write anew. The system columns
	// name it whichever subtransaction wrote it.
	functionVersionsSQL = `
SELECT 'function ' || p.oid::regprocedure, format('%s %s', p.xmin, p.ctid)
  FROM pg_proc p WHERE p.pronamespace = 'penstock'::regnamespace`

	// Which of two forms of a function a call means is ambiguous where both could take its arguments.
	unusedSQL = `
SELECT p.oid::regprocedure::text
  FROM pg_proc p
  JOIN penstock.schema_object o ON o.object = 'function ' || p.oid::regprocedure::text
 WHERE p.pronamespace = 'penstock'::regnamespace AND o.object <> ALL ($2)
   AND (o.release < $1 - 1 OR EXISTS (
        SELECT FROM pg_proc other
         WHERE other.pronamespace = p.pronamespace AND other.proname = p.proname
           AND 'function ' || other.oid::regprocedure::text = ANY ($2)))
 ORDER BY 1`
)

// dropUnused removes functions that were in the files of the release before the last one and not since, and other forms
// of those that this set has written, of a newer release as well: written is what it has written.
func dropUnused(ctx context.Context, tx pgx.Tx, release int, written []string) error {
	rows, _ := tx.Query(ctx, unusedSQL, release, written)
	unused, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return fmt.Errorf("find unused functions: %w", err)
	}
	for _, function := range unused {
		if _, err := tx.Exec(ctx, "DROP FUNCTION "+function); err != nil {
			return fmt.Errorf("drop function %s: %w%s", function, err, builtOn(err))
		}
	}
	return nil
}
