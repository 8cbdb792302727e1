package election_test

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock/penstock/internal/machine"
	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/election"
)

// candidate is an elector with a pool of its own, as a process has.
type candidate struct {
	*election.Elector
	pool  *pgxpool.Pool
	stop  context.CancelFunc
	ended chan struct{}
	terms chan election.Term // each term as it begins
}

func candidacy(t *testing.T, dsn string, cfg election.Config) *candidate {
	t.Helper()
	config, err := pgxpool.ParseConfig(dsn)
	if err != nil {
		t.Fatal(err)
	}
	return standOn(t, config, cfg)
}

func standOn(t *testing.T, config *pgxpool.Config, cfg election.Config) *candidate {
	t.Helper()
	config.MaxConns = 10
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	c := &candidate{
		Elector: election.New(pool, cfg), pool: pool, stop: stop,
		ended: make(chan struct{}), terms: make(chan election.Term, 100),
	}
	go func() {
		defer close(c.ended)
		_ = c.Run(ctx, func(ctx context.Context, term election.Term) error {
			c.terms <- term
			<-ctx.Done()
			return nil
		})
	}()
	t.Cleanup(func() {
		stop()
		<-c.ended
		pool.Close()
	})
	return c
}

// electedAfter waits for a term of any of the candidates that is newer than one. On a machine that stood still they
// may have had terms since then that nobody has asked for.
func electedAfter(t *testing.T, last election.Term, candidates ...*candidate) (*candidate, election.Term) {
	t.Helper()
	for {
		if c, term := elected(t, candidates...); term > last {
			return c, term
		}
	}
}

// elected waits for the next term of any of the candidates.
func elected(t *testing.T, candidates ...*candidate) (*candidate, election.Term) {
	t.Helper()
	type win struct {
		c    *candidate
		term election.Term
	}
	wins := make(chan win, len(candidates))
	done := make(chan struct{})
	defer close(done)
	for _, c := range candidates {
		go func() {
			select {
			case term := <-c.terms:
				wins <- win{c, term}
			case <-done:
			}
		}()
	}
	select {
	case w := <-wins:
		return w.c, w.term
	case <-time.After(time.Minute):
		t.Fatal("no process was elected within a minute")
		return nil, 0
	}
}

func others(all []*candidate, but *candidate) []*candidate {
	var rest []*candidate
	for _, c := range all {
		if c != but {
			rest = append(rest, c)
		}
	}
	return rest
}

// The others poll every 300 ms at most.
func TestTimedResignationHandsOverWithinHalfASecond(t *testing.T) {
	dsn := pgtest.DSN(t)
	cfg := election.Config{}
	all := []*candidate{candidacy(t, dsn, cfg), candidacy(t, dsn, cfg), candidacy(t, dsn, cfg)}
	m := machine.WatchTest(t, all[0].pool)
	first, term := elected(t, all...)
	began := time.Now()
	first.stop()
	_, next := elected(t, others(all, first)...)
	m.Judge(t, "the hand-over", began, time.Now(), 500*time.Millisecond)
	if next <= term {
		t.Errorf("term %d after term %d", next, term)
	}
}

func TestTimedCrashIsTakenOverWithinSixSeconds(t *testing.T) {
	dsn := pgtest.DSN(t)
	dead := candidacy(t, dsn, election.Config{})
	m := machine.WatchTest(t, dead.pool)
	_, term := elected(t, dead)
	heir := candidacy(t, dsn, election.Config{})
	// A crash: the connections are cut and the process does not resign.
	began := time.Now()
	dead.pool.Close()
	_, next := elected(t, heir)
	m.Judge(t, "the take-over", began, time.Now(), 6*time.Second)
	if next <= term {
		t.Errorf("term %d after term %d", next, term)
	}
}

// When a new term begins, the process that had the last one has stopped believing in it.
func TestTrustEndsBeforeTheNextTermBegins(t *testing.T) {
	dsn := pgtest.DSN(t)
	cfg := election.Config{Lease: time.Second, Poll: 20 * time.Millisecond}
	all := []*candidate{candidacy(t, dsn, cfg), candidacy(t, dsn, cfg), candidacy(t, dsn, cfg)}
	var last election.Term
	for len(all) > 0 {
		now, term := electedAfter(t, last, all...)
		last = term
		all = others(all, now)
		for _, c := range all {
			// On a machine that stood still a lease may be over, and a later term have begun.
			s := c.Status()
			if s.Leading && (s.Term < term || leads(now) && leads(c) && c.Status().Term == s.Term) {
				t.Errorf("two lead: terms %d and %d", term, s.Term)
			}
		}
		// From now on it neither renews nor resigns.
		now.pool.Close()
		if len(all) > 0 {
			heir, next := electedAfter(t, term, all...)
			if s := now.Status(); s.Leading && s.Term < next {
				t.Errorf("term %d is still trusted when term %d begins", s.Term, next)
			}
			heir.terms <- next // for the next round
		}
	}
}

func leads(c *candidate) bool { return c.Status().Leading }

func TestLeaderWhoseConnectionsFreezeStopsBeforeTheNextTerm(t *testing.T) {
	dsn := pgtest.DSN(t)
	var frozen atomic.Bool
	first := standOn(t, deafConfig(t, dsn, &frozen), election.Config{})
	_, term := elected(t, first)
	heir := candidacy(t, dsn, election.Config{})
	frozen.Store(true)
	_, next := elected(t, heir)
	if s := first.Status(); s.Leading && s.Term < next || next <= term {
		t.Errorf("term %d began while term %d was trusted", next, s.Term)
	}
	frozen.Store(false)
	heir.stop()
	electedAfter(t, next, first) // its network was broken, and it can be elected again
}

// A leader that was frozen between reading its clock and writing.
func TestWriteOfAnOldTermChangesNothing(t *testing.T) {
	ctx := t.Context()
	pool := pgtest.New(t)
	exec(t, pool, `CREATE TABLE written (term bigint)`)
	old, next := takeTerm(t, pool), election.Term(0)
	write := func(term election.Term) error {
		return term.Fence(pool).InTx(ctx, func(tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `INSERT INTO written VALUES ($1)`, term)
			return err
		})
	}
	if err := write(old); err != nil {
		t.Fatalf("write within the term: %v", err)
	}
	exec(t, pool, `UPDATE penstock.leader SET renewed_at = renewed_at - interval '1 minute'`)
	if err := write(old); !errors.Is(err, election.ErrTermOver) {
		t.Errorf("write after the lease lapsed: %v, want ErrTermOver", err)
	}
	next = takeTerm(t, pool)
	if err := write(old); !errors.Is(err, election.ErrTermOver) {
		t.Errorf("write of an old term: %v, want ErrTermOver", err)
	}
	if err := write(next); err != nil {
		t.Errorf("write of the new term: %v", err)
	}
	for _, single := range []struct {
		term election.Term
		rows int64
	}{{old, 0}, {next, 1}} {
		tag, err := pool.Exec(ctx, `INSERT INTO written SELECT $1::bigint WHERE (SELECT penstock.holds_term($1))`, single.term)
		if err != nil || tag.RowsAffected() != single.rows {
			t.Errorf("statement under term %d wrote %d rows (%v), want %d", single.term, tag.RowsAffected(), err, single.rows)
		}
	}
	var terms []election.Term
	rows, err := pool.Query(ctx, `SELECT term FROM written ORDER BY term`)
	if err != nil {
		t.Fatal(err)
	}
	if terms, err = pgx.CollectRows(rows, pgx.RowTo[election.Term]); err != nil || len(terms) != 3 || terms[0] != old || terms[1] != next {
		t.Errorf("written under terms %v (%v), want one under %d and two under %d", terms, err, old, next)
	}
}

// takeTerm elects a holder for the test and returns the term without renewing it.
func takeTerm(t *testing.T, pool *pgxpool.Pool) election.Term {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	var term election.Term
	e := election.New(pool, election.Config{Lease: time.Minute})
	err := e.Run(ctx, func(_ context.Context, won election.Term) error {
		term = won
		stop()
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	exec(t, pool, `UPDATE penstock.leader SET renewed_at = clock_timestamp()`) // as if it had not resigned
	return term
}

func exec(t *testing.T, pool *pgxpool.Pool, sql string) {
	t.Helper()
	if _, err := pool.Exec(t.Context(), sql); err != nil {
		t.Fatal(err)
	}
}

// A write that began within the term and has not committed holds up the take-over: it is never seen after it.
func TestTakeOverWaitsForWritesOfTheOldTerm(t *testing.T) {
	ctx := t.Context()
	dsn := pgtest.DSN(t)
	pool, err := pgxpool.New(ctx, dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	old := takeTerm(t, pool)
	inside, goOn := make(chan struct{}), make(chan struct{})
	letGo := sync.OnceFunc(func() { close(goOn) })
	defer letGo() // the pool is closed when the transaction has ended
	var committed time.Time
	var wg sync.WaitGroup
	wg.Go(func() {
		err := old.Fence(pool).InTx(ctx, func(tx pgx.Tx) error {
			// It is silent here for as long as a busy machine takes.
			_, err := tx.Exec(ctx, `SET LOCAL idle_in_transaction_session_timeout = 0`)
			close(inside)
			<-goOn
			return err
		})
		committed = time.Now()
		if err != nil {
			t.Errorf("write within the term: %v", err)
		}
	})
	<-inside
	exec(t, pool, `UPDATE penstock.leader SET renewed_at = clock_timestamp()`) // a renewal does not wait
	exec(t, pool, `UPDATE penstock.leader SET renewed_at = '-infinity'`)
	heir := candidacy(t, dsn, election.Config{Poll: 20 * time.Millisecond})
	for deadline, polls := time.Now().Add(time.Minute), 0; polls < 3; polls++ { // the first may be from before
		for polled := time.Now(); time.Since(polled) <= heir.Status().SeenAgo; time.Sleep(time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatal("no poll of the heir is answered")
			}
		}
	}
	select {
	case term := <-heir.terms:
		t.Errorf("term %d began while a write of term %d was open", term, old)
	default:
	}
	letGo()
	elected(t, heir)
	wg.Wait()
	if committed.IsZero() {
		t.Error("the write of the old term never ended")
	}
}

// A leader that is frozen or cut off in the middle of a write must not hold up the next one for ever.
func TestSilentTransactionOfALeaderIsEnded(t *testing.T) {
	ctx := t.Context()
	dsn := pgtest.DSN(t)
	pool, err := pgxpool.New(ctx, dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	old := takeTerm(t, pool)
	heir := candidacy(t, dsn, election.Config{})
	began := time.Now()
	err = old.Fence(pool).InTx(ctx, func(tx pgx.Tx) error {
		exec(t, pool, `UPDATE penstock.leader SET renewed_at = '-infinity'`)
		elected(t, heir)
		_, err := tx.Exec(ctx, `CREATE TABLE too_late ()`)
		return err
	})
	if err == nil {
		t.Error("a transaction that was silent for longer than it may was committed")
	}
	if took := time.Since(began); took < 1900*time.Millisecond {
		t.Errorf("a short pause of %v already ended the transaction", took)
	}
	var exists bool
	if err := pool.QueryRow(ctx, `SELECT to_regclass('too_late') IS NOT NULL`).Scan(&exists); err != nil || exists {
		t.Errorf("the old term's write is there: %v (%v)", exists, err)
	}
}

func TestClockThatJumpsBackDoesNotProlongATerm(t *testing.T) {
	dsn := pgtest.DSN(t)
	pool, err := pgxpool.New(t.Context(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	old := takeTerm(t, pool)
	exec(t, pool, `UPDATE penstock.leader SET renewed_at = clock_timestamp() + interval '1 hour'`)
	_, next := elected(t, candidacy(t, dsn, election.Config{}))
	if next <= old {
		t.Errorf("term %d after %d", next, old)
	}
}

// renewedAt is when the present leader renewed its lease last.
func renewedAt(t *testing.T, pool *pgxpool.Pool) (at time.Time) {
	t.Helper()
	if err := pool.QueryRow(t.Context(), `SELECT renewed_at FROM penstock.leader`).Scan(&at); err != nil {
		t.Error(err)
	}
	return at
}

// Statements must not lean on what a connection remembers: behind a pooler the next one goes to another server process.
func TestElectionWorksWithoutPreparedStatements(t *testing.T) {
	dsn := pgtest.DSN(t)
	pool, err := postgres.Open(t.Context(), postgres.Config{DSN: dsn, Pooled: true})
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	ctx, stop := context.WithCancel(t.Context())
	e := election.New(pool, election.Config{Lease: 12 * time.Second})
	err = e.Run(ctx, func(ctx context.Context, term election.Term) error {
		defer stop()
		began := renewedAt(t, pool)
		for renewedAt(t, pool).Equal(began) { // the test's own timeout ends it
			select {
			case <-ctx.Done():
				return context.Cause(ctx)
			case <-time.After(20 * time.Millisecond):
			}
		}
		return term.Fence(pool).InTx(ctx, func(tx pgx.Tx) error {
			_, err := tx.Exec(ctx, `CREATE TABLE written ()`)
			return err
		})
	})
	if err != nil {
		t.Fatal(err)
	}
	if _, err := pool.Exec(t.Context(), `SELECT FROM written`); err != nil {
		t.Errorf("nothing was written within the term: %v", err)
	}
}
