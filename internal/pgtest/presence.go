package pgtest

import (
	"context"
	"fmt"
	"regexp"

	"github.com/jackc/pgx/v5"
)

// On a server that test binaries share, a binary that is killed leaves its databases behind, and
// every change of a migration leaves a template. So each binary holds a shared advisory lock on the
// databases it uses, until it ends; the next binary drops those on which there is no lock.

const (
	// presenceClass is the first half of the keys of these advisory locks; the second is a hash of the name.
	presenceClass = 0x70677473 // "pgts"
	// templateLock is held while templates are made and dropped.
	templateLock = 0x70656e73746f636b // "penstock"
)

// ownerOf returns the part of a database name on which its user holds a lock: a run or the digest
// of a template.
var ownerOf = regexp.MustCompile(`^penstock_(?:test|template)_([a-z0-9]+)`)

// hold takes the lock of owner for this binary, until conn is closed.
func hold(ctx context.Context, conn *pgx.Conn, owner string) error {
	if _, err := conn.Exec(ctx, "SELECT pg_advisory_lock_shared($1, hashtext($2))", presenceClass, owner); err != nil {
		return fmt.Errorf("hold %s: %w", owner, err)
	}
	return nil
}

// sweep drops this role's test databases and templates on which there is no lock.
// The caller holds the template lock, so that none is about to be used.
func sweep(ctx context.Context, conn *pgx.Conn, mine ...string) error {
	rows, _ := conn.Query(ctx, `SELECT datname FROM pg_database
		WHERE datname ~ '^penstock_(test|template)_'
		  AND datdba = (SELECT oid FROM pg_roles WHERE rolname = current_user)`)
	names, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return fmt.Errorf("list test databases: %w", err)
	}
	held := map[string]bool{}
	for _, owner := range mine {
		held[owner] = true // the test below would not see this session's own locks
	}
	for _, name := range names {
		match := ownerOf.FindStringSubmatch(name)
		if match == nil || held[match[1]] {
			continue
		}
		if err := dropUnheld(ctx, conn, name, match[1]); err != nil {
			return err
		}
	}
	return nil
}

func dropUnheld(ctx context.Context, conn *pgx.Conn, name, owner string) error {
	var free bool
	if err := conn.QueryRow(ctx, "SELECT pg_try_advisory_lock($1, hashtext($2))", presenceClass,
		owner).Scan(&free); err != nil {
		return fmt.Errorf("test hold on %s: %w", owner, err)
	}
	if !free {
		return nil
	}
	if _, err := conn.Exec(ctx, "DROP DATABASE IF EXISTS "+quote(name)+" WITH (FORCE)"); err != nil {
		return fmt.Errorf("drop abandoned database %s: %w", name, err)
	}
	if _, err := conn.Exec(ctx, "SELECT pg_advisory_unlock($1, hashtext($2))", presenceClass, owner); err != nil {
		return fmt.Errorf("release %s: %w", owner, err)
	}
	return nil
}
