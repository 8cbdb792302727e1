package pgproxy_test

import (
	"fmt"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/chaos/pgproxy"
	"github.com/penstock/penstock/internal/postgres"
)

// counting loses the answer to each commit of kind finish and counts the commits that were sent.
type counting struct {
	pgproxy.Policy
	sent atomic.Int64
}

func (c *counting) Decide(_ *pgproxy.Link, group pgproxy.Group) pgproxy.Decision {
	if group.Kind != pgproxy.Finish || !group.Commits {
		return pgproxy.Decision{}
	}
	c.sent.Add(1)
	return pgproxy.Decision{Fault: pgproxy.Swallow}
}

func (c *counting) Happened(*pgproxy.Link, pgproxy.Group, pgproxy.Fault, time.Time) func(time.Time) {
	return func(time.Time) {}
}

func (c *counting) Committed(*pgproxy.Link, pgproxy.Kind, time.Time) {}

// A COMMIT that is sent again on a fresh connection "succeeds" with a warning, and says nothing about
// the transaction that was lost. The product's transactions send it once and return an error.
func TestALostCommitIsAnErrorAndIsSentOnce(t *testing.T) {
	server := started(t)
	cc := server.Config()
	policy := &counting{}
	proxy := pgproxy.New("unix", filepath.Join(cc.Host, fmt.Sprintf(".s.PGSQL.%d", cc.Port)), policy)
	link, err := proxy.Open(t.Context(), "n1")
	if err != nil {
		t.Fatal(err)
	}
	defer link.Close()
	pool, err := postgres.Open(t.Context(), postgres.Config{
		DSN: "postgres://postgres@" + link.Address() + "/postgres?sslmode=disable",
	})
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	for _, sql := range []string{`CREATE SCHEMA penstock`, `CREATE TABLE penstock.lock (n int)`} {
		if _, err := pool.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	err = postgres.InTx(t.Context(), pool, func(tx pgx.Tx) error {
		_, err := tx.Exec(t.Context(), `DELETE FROM penstock.lock`)
		return err
	})
	if err == nil {
		t.Error("a commit whose answer was lost is a success")
	}
	if !postgres.Unavailable(err) {
		t.Errorf("%v is not taken for a database that was out of reach", err)
	}
	if n := policy.sent.Load(); n != 1 {
		t.Errorf("the COMMIT was sent %d times", n)
	}
}
