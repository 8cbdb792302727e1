package machine

import (
	"context"
	"os"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Machine measures how much time the machine withholds from a test: a probe, which sleeps and then
// asks the database for nothing, is repeated until the test ends, and what it takes longer than on
// an idle machine is withheld, but for no more than the share of the processors that others took
// meanwhile: a product that makes the machine busy by itself has the bounds that are written.
type Machine struct {
	mu      sync.Mutex
	delayed []delay
	used    []usage // in the order of time; none where the machine does not tell
}

// delay is a probe that was late.
type delay struct {
	began, ended time.Time
	by           time.Duration
}

const (
	probePause = 20 * time.Millisecond // between two probes
	probeUsual = 10 * time.Millisecond // most that a probe takes longer than its pause on an idle machine
)

// Watch probes until the test ends. The database of dsn is asked; none where it is empty. own has
// the processes that are not others.
func Watch(t testing.TB, dsn string, own *Consumers) *Machine {
	t.Helper()
	m := &Machine{}
	ctx, stop := context.WithCancel(context.Background())
	var watchers sync.WaitGroup
	watchers.Go(func() { m.probe(ctx, dsn) })
	watchers.Go(func() { m.account(ctx, own) })
	t.Cleanup(func() {
		stop()
		watchers.Wait()
	})
	return m
}

// WatchTest is Watch for a test that starts no programs: its own are this process and the Postgres
// of the pool, which may be nil.
func WatchTest(t testing.TB, pool *pgxpool.Pool) *Machine {
	t.Helper()
	dsn, directory := "", ""
	if pool != nil {
		dsn = pool.Config().ConnString()
		if err := pool.QueryRow(t.Context(), `SHOW data_directory`).Scan(&directory); err != nil {
			t.Fatalf("find the Postgres of this test: %v", err)
		}
	}
	return Watch(t, dsn, Of(directory, func() ([]int, time.Duration) { return []int{os.Getpid()}, 0 }))
}

// probe repeats probes over one connection. A probe without an answer, since the database is away,
// counts with its pause alone.
func (m *Machine) probe(ctx context.Context, dsn string) {
	var conn *pgx.Conn
	for ctx.Err() == nil {
		began := time.Now()
		time.Sleep(probePause)
		ended := time.Now()
		if dsn != "" && (conn == nil || conn.IsClosed()) {
			conn, _ = pgx.Connect(ctx, dsn) // nil without a database; how long it takes is not counted
			ended = time.Now()
			began = ended.Add(-probePause)
		}
		if conn != nil {
			if _, err := conn.Exec(ctx, `SELECT`); err == nil {
				ended = time.Now()
			}
		}
		if by := ended.Sub(began) - probePause - probeUsual; by > 0 {
			m.mu.Lock()
			m.delayed = append(m.delayed, delay{began, ended, by})
			m.mu.Unlock()
		}
	}
	if conn != nil {
		_ = conn.Close(context.WithoutCancel(ctx)) // the test has ended
	}
}

// Withheld is how much of the time between two moments the machine withheld. Of a probe that is
// partly outside, no more counts than the part inside, and of all of them no more than others
// took.
func (m *Machine) Withheld(from, to time.Time) (sum time.Duration) {
	m.mu.Lock()
	defer m.mu.Unlock()
	for _, d := range m.delayed {
		began, ended := d.began, d.ended
		if began.Before(from) {
			began = from
		}
		if ended.After(to) {
			ended = to
		}
		sum += max(0, min(d.by, ended.Sub(began)))
	}
	return min(sum, othersTook(m.used, from, to))
}

// Judge reports an error if more than bound passed between two moments, without the time that was
// withheld: for what waits for messages and clocks.
func (m *Machine) Judge(t testing.TB, what string, from, to time.Time, bound time.Duration) {
	t.Helper()
	m.awaitAccount(to)
	judge(t, what, to.Sub(from), m.Withheld(from, to), bound)
}

// JudgeWork is Judge for work that keeps a processor busy from one moment to the other: all time
// that others had is withheld from it. A probe does not tell how much that is, since a process
// that slept is preferred to one that works.
func (m *Machine) JudgeWork(t testing.TB, what string, from, to time.Time, bound time.Duration) {
	t.Helper()
	judge(t, what, to.Sub(from), m.Taken(from, to), bound)
}

// Taken is how much of the time between two moments others had the processors.
func (m *Machine) Taken(from, to time.Time) time.Duration {
	m.awaitAccount(to)
	m.mu.Lock()
	defer m.mu.Unlock()
	return othersTook(m.used, from, to)
}

// awaitAccount waits for an account of the time up to a moment, where the machine tells.
func (m *Machine) awaitAccount(to time.Time) {
	known := func() bool {
		m.mu.Lock()
		defer m.mu.Unlock()
		return len(m.used) == 0 || !m.used[len(m.used)-1].at.Before(to)
	}
	for end := time.Now().Add(time.Minute); !known() && time.Now().Before(end); {
		time.Sleep(accountPause / 5)
	}
}

func judge(t testing.TB, what string, took, withheld, bound time.Duration) {
	t.Helper()
	t.Logf("%s took %d ms, of which the machine withheld %d", what, took.Milliseconds(), withheld.Milliseconds())
	if took-withheld > bound {
		t.Errorf("%s took %v, of which the machine withheld %v, want %v at most", what, took, withheld, bound)
	}
}
