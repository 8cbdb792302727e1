package pgproxy_test

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/penstock/penstock/chaos/pgproxy"
	"github.com/penstock/penstock/internal/devpostgres"
)

// started is a server that ends with the test.
func started(t *testing.T) *devpostgres.Server {
	t.Helper()
	server, err := devpostgres.Start(t.Context(), devpostgres.Config{Fast: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = server.Stop(context.WithoutCancel(t.Context())) })
	return server
}

// fate is a policy with one fault for the next transaction of kind finish.
type fate struct {
	mu       sync.Mutex
	decision pgproxy.Decision
	reports  chan report        // of faults that are over; nil: they are dropped
	begun    chan pgproxy.Fault // of faults that took effect; nil: they are dropped
}

type report struct {
	fault    pgproxy.Fault
	from, to time.Time
}

func (f *fate) Decide(_ *pgproxy.Link, group pgproxy.Group) pgproxy.Decision {
	f.mu.Lock()
	defer f.mu.Unlock()
	if group.Kind != pgproxy.Finish || !group.Commits {
		return pgproxy.Decision{}
	}
	return f.decision
}

func (f *fate) Happened(
	_ *pgproxy.Link, _ pgproxy.Group, fault pgproxy.Fault, from time.Time,
) (over func(to time.Time)) {
	if f.begun != nil {
		f.begun <- fault
	}
	return func(to time.Time) {
		if f.reports != nil {
			f.reports <- report{fault, from, to}
		}
	}
}

// whenBegun calls do once the fault has taken effect.
func (f *fate) whenBegun(ctx context.Context, fault pgproxy.Fault, do func()) {
	for {
		select {
		case <-ctx.Done():
			return
		case begun := <-f.begun:
			if begun == fault {
				do()
			}
		}
	}
}

func (f *fate) Committed(*pgproxy.Link, pgproxy.Kind, time.Time) {}

func (f *fate) set(d pgproxy.Decision) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.decision = d
}

// Each fault has the effect that its name says, for a statement by itself and for a COMMIT.
func TestFaultsHaveTheEffectOfTheirNames(t *testing.T) {
	server := started(t)
	direct, err := pgx.Connect(t.Context(), server.ConnString())
	if err != nil {
		t.Fatal(err)
	}
	for _, sql := range []string{
		`CREATE SCHEMA penstock`, `CREATE TABLE penstock.lock (n int)`, `CREATE TABLE public.gone (n int)`,
	} {
		if _, err := direct.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	cc := server.Config()
	policy := &fate{begun: make(chan pgproxy.Fault, 100)}
	proxy := pgproxy.New("unix", filepath.Join(cc.Host, fmt.Sprintf(".s.PGSQL.%d", cc.Port)), policy)
	link, err := proxy.Open(t.Context(), "n1")
	if err != nil {
		t.Fatal(err)
	}
	defer link.Close()

	for i, c := range []struct {
		decision        pgproxy.Decision
		committed       bool
		fails, sendsRow bool
	}{
		{pgproxy.Decision{}, true, false, true},
		{pgproxy.Decision{Fault: pgproxy.CutBefore}, false, true, false},
		{pgproxy.Decision{Fault: pgproxy.Refuse, SQLSTATE: "40001"}, false, true, false},
		{pgproxy.Decision{Fault: pgproxy.Refuse, SQLSTATE: "57P01"}, false, true, false},
		{pgproxy.Decision{Fault: pgproxy.Unsent}, false, true, true},
		{pgproxy.Decision{Fault: pgproxy.Swallow}, true, true, false},
		{pgproxy.Decision{Fault: pgproxy.Mute}, true, true, false},
		{pgproxy.Decision{Fault: pgproxy.Late, Delay: 50 * time.Millisecond}, true, false, true},
		{pgproxy.Decision{Fault: pgproxy.Slow, Delay: 50 * time.Millisecond}, true, false, true},
		{pgproxy.Decision{Fault: pgproxy.KillAfter}, true, true, false},
		{pgproxy.Decision{Fault: pgproxy.KillBefore}, false, true, false},
	} {
		for _, block := range []bool{false, true} {
			if block && c.decision.Fault == pgproxy.Unsent {
				continue // a COMMIT has no rows
			}
			t.Run(fmt.Sprintf("%s, block %v", c.decision.Fault, block), func(t *testing.T) {
				if _, err := direct.Exec(t.Context(), `TRUNCATE penstock.lock, public.gone`); err != nil {
					t.Fatal(err)
				}
				if _, err := direct.Exec(t.Context(), `INSERT INTO penstock.lock VALUES ($1)`, i); err != nil {
					t.Fatal(err)
				}
				conn, err := pgx.Connect(
					t.Context(),
					"postgres://postgres@"+link.Address()+"/postgres?sslmode=disable",
				)
				if err != nil {
					t.Fatal(err)
				}
				defer conn.Close(context.WithoutCancel(t.Context()))
				policy.set(c.decision)
				ctx, giveUp := context.WithTimeout(t.Context(), time.Minute)
				defer giveUp()
				if c.decision.Fault == pgproxy.Mute {
					go policy.whenBegun(ctx, pgproxy.Mute, giveUp)
				}
				row, err := transaction(ctx, conn, block)
				policy.set(pgproxy.Decision{})
				if (err != nil) != c.fails || !block && row != c.sendsRow {
					t.Errorf("error %v, row %v", err, row)
				}
				var pg *pgconn.PgError
				if code := c.decision.SQLSTATE; code != "" && (!errors.As(err, &pg) || pg.Code != code) {
					t.Errorf("error %v, want SQLSTATE %s", err, code)
				}
				committed(t, direct, c.committed)
			})
		}
	}
}

// While a commit is held up, its statements have been run: the row is locked, and others see it as it was.
func TestASlowCommitHoldsLocksAndShowsNothing(t *testing.T) {
	server := started(t)
	direct, err := pgx.Connect(t.Context(), server.ConnString())
	if err != nil {
		t.Fatal(err)
	}
	for _, sql := range []string{
		`CREATE SCHEMA penstock`, `CREATE TABLE penstock.lock (n int)`, `INSERT INTO penstock.lock VALUES (1)`,
	} {
		if _, err := direct.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	cc := server.Config()
	policy := &fate{decision: pgproxy.Decision{Fault: pgproxy.Slow, Delay: time.Hour}}
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
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	ended := make(chan error, 1)
	go func() {
		_, err := conn.Exec(ctx, `DELETE FROM penstock.lock WHERE n = $1`, 1)
		ended <- err
	}()
	const sql = `SELECT (SELECT count(*) FROM penstock.lock),
       (SELECT count(*) FROM (SELECT n FROM penstock.lock FOR UPDATE SKIP LOCKED) free)`
	for visible, free := 1, 1; free > 0; {
		if err := direct.QueryRow(ctx, sql).Scan(&visible, &free); err != nil || visible != 1 {
			t.Fatalf("%d rows are visible (%v), want 1", visible, err)
		}
	}
	cancel()
	if err := <-ended; err == nil {
		t.Error("the statement ended well, and its commit was held up for an hour")
	}
}

// A process that is held up by an answer, or by a commit, is held up until it gives up: this is the time that the judges
// are told, and not the one that the plan had in mind. The report comes when it is over.
func TestAProcessThatGivesUpIsHeldUpNoLonger(t *testing.T) {
	server := started(t)
	direct, err := pgx.Connect(t.Context(), server.ConnString())
	if err != nil {
		t.Fatal(err)
	}
	for _, sql := range []string{`CREATE SCHEMA penstock`, `CREATE TABLE penstock.lock (n int)`} {
		if _, err := direct.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	cc := server.Config()
	policy := &fate{reports: make(chan report, 8), begun: make(chan pgproxy.Fault, 8)}
	proxy := pgproxy.New("unix", filepath.Join(cc.Host, fmt.Sprintf(".s.PGSQL.%d", cc.Port)), policy)
	link, err := proxy.Open(t.Context(), "n1")
	if err != nil {
		t.Fatal(err)
	}
	defer link.Close()
	for _, c := range []struct {
		decision pgproxy.Decision
		atLeast  time.Duration
		givesUp  bool
	}{
		{pgproxy.Decision{Fault: pgproxy.Late, Delay: time.Hour}, 0, true},
		{pgproxy.Decision{Fault: pgproxy.Mute}, 0, true},
		{pgproxy.Decision{Fault: pgproxy.Late, Delay: 50 * time.Millisecond}, 50 * time.Millisecond, false},
		{pgproxy.Decision{Fault: pgproxy.Slow, Delay: 50 * time.Millisecond}, 50 * time.Millisecond, false},
	} {
		if _, err := direct.Exec(t.Context(), `INSERT INTO penstock.lock VALUES (1)`); err != nil {
			t.Fatal(err)
		}
		conn, err := pgx.Connect(t.Context(), "postgres://postgres@"+link.Address()+"/postgres?sslmode=disable")
		if err != nil {
			t.Fatal(err)
		}
		policy.set(c.decision)
		ctx, giveUp := context.WithTimeout(t.Context(), time.Minute)
		ended := make(chan error, 1)
		go func() {
			_, err := conn.Exec(ctx, `DELETE FROM penstock.lock`)
			ended <- err
		}()
		for left := 1; left > 0; {
			if err := direct.QueryRow(t.Context(), `SELECT count(*) FROM penstock.lock`).Scan(&left); err != nil {
				t.Fatal(err)
			}
		}
		if c.givesUp { // the fault is told of while it lasts
			awaitFault(t, policy.begun, c.decision.Fault)
			giveUp()
		}
		if err := <-ended; (err != nil) != c.givesUp {
			t.Errorf("%v: %v", c.decision.Fault, err)
		}
		select {
		case r := <-policy.reports:
			if held := r.to.Sub(r.from); r.fault != c.decision.Fault || held < c.atLeast || held > time.Minute {
				t.Errorf("%v for %v: %v, for %v", c.decision.Fault, c.decision.Delay, r.fault, held)
			}
		case <-time.After(time.Minute):
			t.Fatalf("%v for %v is not told to be over a minute after the process gave up", c.decision.Fault, c.decision.Delay)
		}
		if !c.givesUp {
			awaitFault(t, policy.begun, c.decision.Fault)
		}
		policy.set(pgproxy.Decision{})
		giveUp()
		conn.Close(t.Context())
	}
}

func awaitFault(t *testing.T, begun <-chan pgproxy.Fault, want pgproxy.Fault) {
	t.Helper()
	select {
	case got := <-begun:
		if got != want {
			t.Errorf("told of %v, want %v", got, want)
		}
	case <-time.After(time.Minute):
		t.Fatalf("%v is not told of", want)
	}
}

// transaction deletes a row, by a statement alone or in a block, and says whether it saw the row.
func transaction(ctx context.Context, conn *pgx.Conn, block bool) (row bool, err error) {
	const sql = `DELETE FROM penstock.lock RETURNING n`
	read := func(rows pgx.Rows, err error) error {
		if err != nil {
			return err
		}
		for rows.Next() {
			row = true
		}
		return rows.Err()
	}
	if !block {
		err = read(conn.Query(ctx, sql))
		return row, err
	}
	err = pgx.BeginFunc(ctx, conn, func(tx pgx.Tx) error { return read(tx.Query(ctx, sql)) })
	return row, err
}

// committed waits until the transaction has ended and says whether it took effect: a lock on the
// table waits for it.
func committed(t *testing.T, direct *pgx.Conn, want bool) {
	t.Helper()
	var left int
	err := pgx.BeginFunc(t.Context(), direct, func(tx pgx.Tx) error {
		if _, err := tx.Exec(t.Context(), `LOCK TABLE penstock.lock IN ACCESS EXCLUSIVE MODE`); err != nil {
			return err
		}
		return tx.QueryRow(t.Context(), `SELECT count(*) FROM penstock.lock`).Scan(&left)
	})
	if err != nil {
		t.Fatal(err)
	}
	if (left == 0) != want {
		t.Errorf("%d rows are left, committed should be %v", left, want)
	}
}
