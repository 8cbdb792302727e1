package postgres_test

import (
	"context"
	"errors"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/internal/postgres"
)

// A first statement that takes too long ends its connection, which is not used then. One that fails otherwise does not.
func TestConnectionThatItsWarmingEndedIsNotUsed(t *testing.T) {
	t.Parallel()
	var warmed, ended atomic.Int32
	other := pgtest.New(t)
	pool, err := postgres.Open(t.Context(), postgres.Config{
		DSN: other.Config().ConnString(), MaxConns: 1, Warm: func(ctx context.Context, conn *pgx.Conn) error {
			defer ended.Add(1)
			if warmed.Add(1) > 1 {
				return errors.New("there is no schema yet")
			}
			bounded, cancel := context.WithCancel(ctx)
			defer cancel()
			go func() { // its time is over once it runs
				for asleep := false; !asleep && bounded.Err() == nil; {
					_ = other.QueryRow(bounded, `SELECT EXISTS (SELECT FROM pg_stat_activity
						WHERE pid = $1 AND wait_event = 'PgSleep')`, conn.PgConn().PID()).Scan(&asleep)
				}
				cancel()
			}()
			_, err := conn.Exec(bounded, `SELECT pg_sleep(60)`)
			return err
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	for ended.Load() == 0 || pool.Stat().ConstructingConns() > 0 {
		time.Sleep(time.Millisecond)
	}
	if n := pool.Stat().TotalConns(); n != 0 {
		t.Errorf("%d connections are kept", n)
	}
	backend(t, pool)
	if n := warmed.Load(); n != 2 {
		t.Errorf("%d connections were made, want 2", n)
	}
}
