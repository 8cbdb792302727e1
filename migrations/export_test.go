package migrations

import (
	"context"
	"io/fs"
	"testing/fstest"

	"github.com/jackc/pgx/v5"
)

// Functions returns a copy of the embedded files of functions, to be changed by tests.
func Functions() (fstest.MapFS, error) {
	copied := fstest.MapFS{}
	names, err := fs.Glob(files, "functions/*.sql")
	for _, name := range names {
		text, err := files.ReadFile(name)
		if err != nil {
			return nil, err
		}
		copied[name] = &fstest.MapFile{Data: text}
	}
	return copied, err
}

// UpWith is Up of a program of another release with other functions.
func UpWith(ctx context.Context, cfg *pgx.ConnConfig, functions fs.FS, release int) (Result, error) {
	set, err := readFunctions(functions)
	if err != nil {
		return Result{}, err
	}
	set.release = release
	set.hash = set.digest()
	return up(ctx, cfg, set)
}

// Catalog returns the definition of every object, for comparisons between databases.
func Catalog(ctx context.Context, c *pgx.Conn) (map[string]string, error) {
	tx, err := c.Begin(ctx)
	if err != nil {
		return nil, err
	}
	defer func() { _ = tx.Rollback(ctx) }()
	return catalog(ctx, tx)
}
