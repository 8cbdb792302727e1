package election_test

import (
	"context"
	"errors"
	"math/rand/v2"
	"net"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/pkg/election"
)

// Under all faults the writes are in the order of the terms: no write of an old term comes after one
// of a new one.
func TestLongWritesOfTermsNeverInterleave(t *testing.T) {
	dsn := pgtest.DSN(t)
	pool, err := pgxpool.New(t.Context(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	exec(t, pool, `CREATE TABLE written (id bigint GENERATED ALWAYS AS IDENTITY, term bigint NOT NULL)`)

	const writers = 3
	var frozen [writers]atomic.Bool
	var elections [writers]atomic.Pointer[context.CancelFunc]
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan struct{}, writers)
	for i := range writers {
		db := openPool(t, deafConfig(t, dsn, &frozen[i]))
		go func() {
			defer func() { ended <- struct{}{} }()
			for ctx.Err() == nil {
				one, resign := context.WithCancel(ctx)
				elections[i].Store(&resign)
				e := election.New(db, election.Config{Lease: time.Second, Poll: 20 * time.Millisecond, HoldOff: 100 * time.Millisecond})
				_ = e.Run(one, func(lead context.Context, term election.Term) error { return keepWriting(lead, db, term) })
				resign()
			}
		}()
	}
	for began := time.Now(); time.Since(began) < pgtest.Long(4*time.Second, 12*time.Second) || time.Since(began) < 2*time.Minute && few(t, pool); {
		time.Sleep(rand.N(600 * time.Millisecond))
		i := rand.IntN(writers)
		if resign := elections[i].Load(); rand.IntN(3) == 0 && resign != nil {
			(*resign)()
			continue
		}
		frozen[i].Store(true)
		time.AfterFunc(rand.N(2*time.Second), func() { frozen[i].Store(false) })
	}
	stop()
	for range writers {
		<-ended
	}

	writes, terms, disorders := written(t, pool)
	t.Logf("%d writes in %d terms", writes, terms)
	if disorders > 0 {
		t.Errorf("%d writes of an old term came after writes of a new one", disorders)
	}
	if few(t, pool) {
		t.Errorf("only %d writes in %d terms: the test shows nothing", writes, terms)
	}
}

// written returns how many writes there are, in how many terms, and how many follow a write of a later term.
func written(t *testing.T, pool *pgxpool.Pool) (writes, terms, disorders int) {
	t.Helper()
	err := pool.QueryRow(t.Context(), `
		SELECT count(*), count(DISTINCT term), count(*) FILTER (WHERE term < before)
		  FROM (SELECT term, lag(term) OVER (ORDER BY id) AS before FROM written) w`).Scan(&writes, &terms, &disorders)
	if err != nil {
		t.Fatal(err)
	}
	return writes, terms, disorders
}

// few is true while the writes and terms are too few for an order to be wrong.
func few(t *testing.T, pool *pgxpool.Pool) bool {
	t.Helper()
	writes, terms, _ := written(t, pool)
	return writes < 100 || terms < 4
}

// keepWriting writes on for a while after its term has ended and ignores its context, like a duty
// that was frozen between reading its clock and writing.
func keepWriting(ctx context.Context, db *pgxpool.Pool, term election.Term) error {
	detached := context.WithoutCancel(ctx)
	var ended time.Time
	for ended.IsZero() || time.Since(ended) < 2*time.Second {
		if ctx.Err() != nil && ended.IsZero() {
			ended = time.Now()
		}
		limited, cancel := context.WithTimeout(detached, 300*time.Millisecond)
		_ = term.Fence(db).InTx(limited, func(tx pgx.Tx) error {
			time.Sleep(rand.N(5 * time.Millisecond))
			_, err := tx.Exec(limited, `INSERT INTO written (term) VALUES ($1)`, term)
			return err
		})
		cancel()
	}
	return nil
}

func openPool(t *testing.T, config *pgxpool.Config) *pgxpool.Pool {
	t.Helper()
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	return pool
}

// deafConn is a connection of which nothing arrives once frozen is set, as behind a broken network.
type deafConn struct {
	net.Conn
	frozen *atomic.Bool
}

func (c deafConn) Write(b []byte) (int, error) {
	switch {
	case !c.frozen.Load():
		return c.Conn.Write(b)
	case b[0] == 'X': // the client takes its leave; it would wait 15 s for the server to hang up
		return len(b), c.Close()
	}
	return len(b), nil
}

// deafConfig is of connections that a test can freeze. There are no new ones meanwhile.
func deafConfig(t *testing.T, dsn string, frozen *atomic.Bool) *pgxpool.Config {
	t.Helper()
	config, err := pgxpool.ParseConfig(dsn)
	if err != nil {
		t.Fatal(err)
	}
	config.MaxConns = 30
	dial := config.ConnConfig.DialFunc
	config.ConnConfig.DialFunc = func(ctx context.Context, network, address string) (net.Conn, error) {
		if frozen.Load() {
			return nil, errors.New("network is down")
		}
		conn, err := dial(ctx, network, address)
		return deafConn{conn, frozen}, err
	}
	return config
}
