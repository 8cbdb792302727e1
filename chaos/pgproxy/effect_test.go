package pgproxy_test

import (
	"context"
	"fmt"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/chaos/pgproxy"
)

// tally counts the commits that changed something, by kind.
type tally struct {
	pgproxy.Policy
	mu     sync.Mutex
	counts map[pgproxy.Kind]int
}

func (c *tally) Decide(*pgproxy.Link, pgproxy.Group) pgproxy.Decision { return pgproxy.Decision{} }

func (c *tally) Committed(_ *pgproxy.Link, kind pgproxy.Kind, _ time.Time) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.counts[kind]++
}

// A recovery reads the row of its term, and a finish counts what it ended: neither shows that a lock was ended.
func TestCommitsOfRecoveriesAndFinishesCountByTheLocksThatTheyEnd(t *testing.T) {
	server := started(t)
	cc := server.Config()
	policy := &tally{counts: map[pgproxy.Kind]int{}}
	proxy := pgproxy.New("unix", filepath.Join(cc.Host, fmt.Sprintf(".s.PGSQL.%d", cc.Port)), policy)
	link, err := proxy.Open(t.Context(), "n1")
	if err != nil {
		t.Fatal(err)
	}
	defer link.Close()
	conn, err := pgx.Connect(t.Context(), "postgres://postgres@"+link.Address()+"/postgres?sslmode=disable")
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(context.WithoutCancel(t.Context()))
	const schema = `
CREATE SCHEMA penstock;
CREATE TABLE penstock.lock (token bigint);
CREATE TABLE penstock.leader (term bigint, renewed_at timestamptz);
CREATE SEQUENCE penstock.term_seq;
CREATE FUNCTION penstock.need_read_committed() RETURNS boolean LANGUAGE sql AS 'SELECT true';
CREATE FUNCTION penstock.all_ended(bigint, bigint) RETURNS boolean LANGUAGE sql AS 'SELECT true';
INSERT INTO penstock.lock SELECT generate_series(1, 20);
INSERT INTO penstock.leader SELECT n, now() FROM generate_series(1, 20) n`
	if _, err := conn.Exec(t.Context(), schema, pgx.QueryExecModeSimpleProtocol); err != nil {
		t.Fatal(err)
	}
	const recovery = `SELECT l.token FROM penstock.lock l WHERE l.token = $1 FOR UPDATE OF l SKIP LOCKED`
	const hold = `
SELECT token FROM penstock.lock WHERE (SELECT penstock.need_read_committed()) IS NOT NULL AND token = $1 FOR UPDATE`
	const done = `SELECT penstock.all_ended($1, 0)`
	const solo = `WITH freed AS (DELETE FROM penstock.lock WHERE token = $1 RETURNING token) SELECT token FROM freed`
	const other = `DELETE FROM penstock.lock WHERE token = $1`
	const term = `SELECT $1::bigint > 0`
	const renewal = `UPDATE penstock.leader SET renewed_at = now() WHERE term = $1`
	const election = `UPDATE penstock.leader SET term = nextval('penstock.term_seq') WHERE term = $1`
	for _, c := range []struct {
		name       string
		statements []string
		token      int
		kind       pgproxy.Kind
		counts     int
	}{
		{"a recovery that frees a lock", []string{term, recovery}, 1, pgproxy.Recover, 1},
		{"a recovery that frees none", []string{term, recovery}, 99, pgproxy.Recover, 0},
		{"a finish", []string{hold, done}, 2, pgproxy.Finish, 1},
		{"a finish that is settled again", []string{hold, done}, 99, pgproxy.Finish, 0},
		{"a finish of solo entries", []string{solo}, 3, pgproxy.Finish, 1},
		{"a finish of solo entries that is settled again", []string{solo}, 99, pgproxy.Finish, 0},
		{"another statement that ends a lock", []string{other}, 4, pgproxy.Finish, 1},
		{"a renewal", []string{renewal}, 1, pgproxy.Renew, 1},
		{"a renewal of a term that is over", []string{renewal}, 99, pgproxy.Renew, 0},
		{"an election", []string{election}, 1, pgproxy.Elect, 1},
	} {
		for _, within := range []bool{false, true} { // a transaction block
			policy.mu.Lock()
			clear(policy.counts)
			policy.mu.Unlock()
			batch := &pgx.Batch{}
			for _, sql := range c.statements {
				batch.Queue(sql, c.token)
			}
			run := func() error { return conn.SendBatch(t.Context(), batch).Close() }
			if within {
				run = func() error {
					return pgx.BeginFunc(t.Context(), conn, func(tx pgx.Tx) error {
						return tx.SendBatch(t.Context(), batch).Close()
					})
				}
			}
			if err := run(); err != nil {
				t.Fatalf("%s: %v", c.name, err)
			}
			policy.mu.Lock()
			if got := policy.counts[c.kind]; got != c.counts {
				t.Errorf("%s, in a block %v: %d commits of kind %s, want %d", c.name, within, got, c.kind, c.counts)
			}
			policy.mu.Unlock()
			c.token += 10 // another lock or term
		}
	}
}
