package doctor

import (
	"context"
	"encoding/binary"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgproto3"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock/penstock/internal/pgtest"
)

// standby is a synchronous standby that confirms what it is told to.
type standby struct {
	t    *testing.T
	conn *pgconn.PgConn
}

func newStandby(t *testing.T, pool *pgxpool.Pool) *standby {
	t.Helper()
	cfg := pool.Config().ConnConfig.Config.Copy()
	cfg.RuntimeParams = map[string]string{"replication": "true", "application_name": "b"}
	conn, err := pgconn.ConnectConfig(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = conn.Conn().Close() })
	s := &standby{t, conn}
	var position string
	if err := pool.QueryRow(t.Context(), `SELECT pg_current_wal_flush_lsn()::text`).Scan(&position); err != nil {
		t.Fatal(err)
	}
	conn.Frontend().Send(&pgproto3.Query{String: "START_REPLICATION PHYSICAL " + position})
	s.flush()
	if answer, err := conn.ReceiveMessage(t.Context()); err != nil {
		t.Fatal(err)
	} else if _, follows := answer.(*pgproto3.CopyBothResponse); !follows {
		t.Fatalf("the server answers %+v", answer)
	}
	return s
}

func (s *standby) flush() {
	s.t.Helper()
	if err := s.conn.Frontend().Flush(); err != nil {
		s.t.Error(err)
	}
}

// confirm says that the standby has the log up to a position: written, flushed and applied.
func (s *standby) confirm(position uint64) {
	s.t.Helper()
	status := []byte{'r'}
	for range 3 {
		status = binary.BigEndian.AppendUint64(status, position)
	}
	s.conn.Frontend().Send(&pgproto3.CopyData{Data: append(status, make([]byte, 9)...)})
	s.flush()
}

// waitUntil waits until a query returns true.
func waitUntil(t *testing.T, pool *pgxpool.Pool, query string) {
	t.Helper()
	for done := false; !done; time.Sleep(5 * time.Millisecond) {
		if err := pool.QueryRow(t.Context(), query).Scan(&done); err != nil {
			t.Fatal(err)
		}
	}
}

// The age of a session that waits is that of its whole statement: a second reading tells whether its commit hangs.
func TestACommitThatWaitsForAMomentIsNoStandbyThatHangs(t *testing.T) {
	own := pgtest.ServerWith(t, map[string]string{"wal_level": "replica", "max_wal_senders": "2"})
	pool := own.Pool()
	own.Standbys("b")
	s := newStandby(t, pool)
	s.confirm(1)
	waitUntil(t, pool, `SELECT count(*) = 1 FROM pg_stat_replication WHERE sync_state = 'sync'`)
	most, pause := standbyMax, standbyPause
	t.Cleanup(func() { standbyMax, standbyPause = most, pause })
	standbyMax = 0
	session, err := pool.Acquire(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer session.Release()
	ended := make(chan error, 1)
	commit := func() {
		go func() {
			_, err := session.Exec(t.Context(), `INSERT INTO penstock.audit (actor, verb, object) VALUES ('ada', 'look', 'audit')`)
			ended <- err
		}()
		waitUntil(t, pool, `SELECT count(*) = 1 FROM pg_stat_activity WHERE wait_event = 'SyncRep'`)
	}
	commit()
	standbyPause = func(context.Context) error { return nil }
	want(t, find(t, pool, "standby", Config{}), Critical, "synchronous standby (b)", "1 session waits")

	standbyPause = func(ctx context.Context) error { // the session goes on to its next commit
		var position uint64
		if err := pool.QueryRow(ctx, `SELECT (pg_current_wal_flush_lsn() - '0/0')::bigint`).Scan(&position); err != nil {
			return err
		}
		s.confirm(position)
		err := <-ended
		commit()
		return err
	}
	want(t, find(t, pool, "standby", Config{}), Fine)
	s.confirm(1 << 62)
	if err := <-ended; err != nil {
		t.Error(err)
	}
}
