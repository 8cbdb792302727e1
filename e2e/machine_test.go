package e2e_test

import (
	"context"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

// machine measures how much time the machine withholds from this test: a probe, which sleeps and then asks the database
// for nothing, is repeated until the test ends, and what it takes longer than on an idle machine is withheld, but for no
// more than the share of the processors that others took meanwhile: a product that makes the machine busy by itself has
// the bounds that are written. The promises of the product in seconds are for a machine that has time for it, so that
// their bounds exclude the time that is withheld: on an idle machine it is none.
type machine struct {
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

// watchMachine probes until the test ends.
func (s *site) watchMachine() *machine {
	s.t.Helper()
	m := &machine{}
	ctx, stop := context.WithCancel(s.t.Context())
	ended := make(chan struct{})
	s.t.Cleanup(func() {
		stop()
		<-ended
	})
	go func() {
		defer close(ended)
		m.probe(ctx, s.dsn)
	}()
	own := s.consumers()
	watched := make(chan struct{})
	s.t.Cleanup(func() { <-watched })
	go func() {
		defer close(watched)
		m.account(ctx, own)
	}()
	return m
}

// probe repeats probes over one connection. A probe without an answer, since the database is away, counts with its pause
// alone.
func (m *machine) probe(ctx context.Context, dsn string) {
	var conn *pgx.Conn
	for ctx.Err() == nil {
		began := time.Now()
		time.Sleep(probePause)
		ended := time.Now()
		if conn == nil || conn.IsClosed() {
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

// withheld is how much of the time between two moments the machine withheld. Of a probe that is partly outside, no more
// counts than the part inside, and of all of them no more than others took.
func (m *machine) withheld(from, to time.Time) (sum time.Duration) {
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

// judge reports an error if more than bound passed between two moments, without the time that was withheld.
func (m *machine) judge(t *testing.T, what string, from, to time.Time, bound time.Duration) {
	t.Helper()
	took, withheld := to.Sub(from), m.withheld(from, to)
	t.Logf("%s took %d ms, of which the machine withheld %d", what, took.Milliseconds(), withheld.Milliseconds())
	if took-withheld > bound {
		t.Errorf("%s took %v, of which the machine withheld %v, want %v at most", what, took, withheld, bound)
	}
}

// within judges the time between the two moments, on the clock of the database, that a query returns.
func (s *site) within(m *machine, what string, bound time.Duration, sql string, args ...any) {
	s.t.Helper()
	var from, to *time.Time
	if err := s.pool.QueryRow(s.t.Context(), sql, args...).Scan(&from, &to); err != nil {
		s.t.Fatalf("%s: %v", what, err)
	}
	if from == nil || to == nil {
		s.t.Errorf("%s did not happen", what)
		return
	}
	m.judge(s.t, what, *from, *to, bound)
}

func TestTimeWithheldIsThatOfLateProbesBetweenTwoMoments(t *testing.T) {
	t.Parallel()
	at := func(ms int) time.Time { return time.UnixMilli(int64(ms)) }
	m := &machine{
		delayed: []delay{
			{at(0), at(130), 100 * time.Millisecond},
			{at(200), at(280), 50 * time.Millisecond},
			{at(500), at(600), 70 * time.Millisecond},
		},
		used: []usage{{at: at(0)}, {at: at(2000), others: 2 * time.Second}},
	}
	for _, c := range []struct{ from, to, want int }{
		{0, 1000, 220},
		{130, 200, 0},
		{100, 300, 80},
		{210, 550, 100},
		{540, 550, 10},
	} {
		if got := m.withheld(at(c.from), at(c.to)); got != time.Duration(c.want)*time.Millisecond {
			t.Errorf("between %d and %d ms: %v, want %d ms", c.from, c.to, got, c.want)
		}
	}
}
