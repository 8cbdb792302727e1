package pgproxy_test

import (
	"context"
	"fmt"
	"path/filepath"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/chaos/pgproxy"
)

// unsent keeps each commit of claims and finishes from the server, and counts those that the proxy reports.
type unsent struct {
	pgproxy.Policy
	happened, committed atomic.Int64
}

func (u *unsent) Decide(_ *pgproxy.Link, group pgproxy.Group) pgproxy.Decision {
	if group.Kind != pgproxy.Claim && group.Kind != pgproxy.Finish || !group.Commits {
		return pgproxy.Decision{}
	}
	return pgproxy.Decision{Fault: pgproxy.Unsent}
}

func (u *unsent) Happened(*pgproxy.Link, pgproxy.Group, pgproxy.Fault, time.Time) func(time.Time) {
	u.happened.Add(1)
	return func(time.Time) {}
}

func (u *unsent) Committed(*pgproxy.Link, pgproxy.Kind, time.Time) { u.committed.Add(1) }

// A server says no more about a statement without a Sync: one that changed nothing, or failed, has to get it. Else its
// process waits until it gives up, for a fault that is neither counted nor recorded.
func TestACommitThatIsKeptBackIsOneThatWouldChangeSomething(t *testing.T) {
	server := started(t)
	direct, err := pgx.Connect(t.Context(), server.ConnString())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := direct.Exec(t.Context(), `CREATE SCHEMA penstock; CREATE TABLE penstock.lock (n int)`); err != nil {
		t.Fatal(err)
	}
	const nothing = `INSERT INTO penstock.lock (n) SELECT 1 WHERE $1 > 100 RETURNING n`
	const fails = `DELETE FROM penstock.lock WHERE 1 / ($1::int - $1::int) = 1`
	const changes = `INSERT INTO penstock.lock (n) SELECT generate_series(1, 2 + $1) RETURNING n`
	cc := server.Config()
	for _, c := range []struct {
		name          string
		statements    []string
		ends, happens bool // the statements end well; the fault takes effect
	}{
		{"a claim that finds nothing", []string{nothing}, true, false},
		{"a finish that fails", []string{fails}, false, false},
		{"a claim that finds nothing, and one that does", []string{nothing, changes}, false, true},
		{"two that find nothing", []string{nothing, nothing}, true, false},
		{"one that fails before one that finds something", []string{fails, changes}, false, false},
		{"a claim", []string{changes}, false, true},
	} {
		t.Run(c.name, func(t *testing.T) {
			policy := &unsent{}
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
			ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
			defer cancel()
			batch := &pgx.Batch{}
			for _, sql := range c.statements {
				batch.Queue(sql, 1)
			}
			err = conn.SendBatch(ctx, batch).Close()
			if ctx.Err() != nil {
				t.Fatalf("the process waits for an answer that does not come: %v", err)
			}
			if (err == nil) != c.ends || (policy.happened.Load() == 1) != c.happens {
				t.Errorf("ended with %v, and the fault took effect %d times", err, policy.happened.Load())
			}
			var rows int
			if err := direct.QueryRow(t.Context(), `SELECT count(*) FROM penstock.lock`).Scan(&rows); err != nil || rows != 0 {
				t.Errorf("%d rows were committed (%v)", rows, err)
			}
			if c.happens || !c.ends {
				return
			}
			if _, err := conn.Exec(ctx, `SELECT 1`); err != nil {
				t.Errorf("the connection is of no use afterwards: %v", err)
			}
		})
	}
}
