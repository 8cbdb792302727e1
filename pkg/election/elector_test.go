package election

import (
	"context"
	"errors"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

// fakeRow is the row in memory, judged by the test's clock. It can stop answering, as a database
// does.
type fakeRow struct {
	mu      sync.Mutex
	term    Term
	renewed time.Time // zero: free
	lease   time.Duration
	away    bool
	polls   int
}

var errAway = errors.New("database is away")

// wait is how a database that is away answers: not at all.
func (f *fakeRow) wait(ctx context.Context) error {
	f.mu.Lock()
	away := f.away
	f.mu.Unlock()
	if away {
		<-ctx.Done()
		return errAway
	}
	return nil
}

func (f *fakeRow) poll(ctx context.Context, take bool) (seen, error) {
	if err := f.wait(ctx); err != nil {
		return seen{}, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	f.polls++
	if take && time.Since(f.renewed) >= f.lease {
		f.term++
		f.renewed = time.Now()
		return seen{term: f.term, won: true, held: true}, nil
	}
	return seen{term: f.term, held: !f.renewed.IsZero()}, nil
}

func (f *fakeRow) renew(ctx context.Context, term Term) (bool, error) {
	if err := f.wait(ctx); err != nil {
		return false, err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if term != f.term || time.Since(f.renewed) >= f.lease {
		return false, nil
	}
	f.renewed = time.Now()
	return true, nil
}

func (f *fakeRow) resign(ctx context.Context, term Term) error {
	if err := f.wait(ctx); err != nil {
		return err
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	if term == f.term {
		f.renewed = time.Time{}
	}
	return nil
}

func (f *fakeRow) setAway(away bool) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.away = away
}

func (f *fakeRow) lastRenewal() time.Time {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.renewed
}

const testLease = 4 * time.Second

// run starts an elector and returns it; it ends with the test's bubble.
func run(ctx context.Context, o leaseRow, cfg Config, lead Lead) (e *Elector, ended chan struct{}) {
	cfg.Lease = testLease
	e, ended = newElector(o, cfg), make(chan struct{})
	go func() {
		defer close(ended)
		_ = e.Run(ctx, lead)
	}()
	return e, ended
}

func untilDone(ctx context.Context, _ Term) error {
	<-ctx.Done()
	return nil
}

func TestRenewedTermLasts(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, stop := context.WithCancel(t.Context())
		row := &fakeRow{lease: testLease}
		e, ended := run(ctx, row, Config{}, untilDone)
		time.Sleep(10 * time.Minute)
		s := e.Status()
		if !s.Leading || s.Term != 1 {
			t.Errorf("after ten quiet minutes: %+v, want term 1, leading", s)
		}
		if s.SeenAgo > testLease/4 || s.Age < 9*time.Minute {
			t.Errorf("last seen %v ago, age %v", s.SeenAgo, s.Age)
		}
		stop()
		<-ended
		if !row.renewed.IsZero() {
			t.Error("the row is not free after the elector ended")
		}
	})
}

func TestLeadEndsBeforeTheLeaseWhenNobodyAnswers(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, stop := context.WithCancel(t.Context())
		row := &fakeRow{lease: testLease}
		ledUntil := make(chan time.Time, 10)
		var cause error
		_, ended := run(ctx, row, Config{}, func(ctx context.Context, _ Term) error {
			<-ctx.Done()
			cause = context.Cause(ctx)
			ledUntil <- time.Now()
			return nil
		})
		time.Sleep(10*time.Second + 300*time.Millisecond)
		row.setAway(true)
		end, renewed := <-ledUntil, row.lastRenewal()
		if lapse := renewed.Add(testLease); !end.Before(lapse) {
			t.Errorf("lead ended %v after its lease", end.Sub(lapse))
		}
		if end.Sub(renewed) < testLease/2 {
			t.Errorf("lead ended %v after the last renewal: a short silence should be lived through", end.Sub(renewed))
		}
		if !errors.Is(cause, ErrTrustLost) {
			t.Errorf("cause is %v, want ErrTrustLost", cause)
		}
		row.setAway(false)
		synctest.Wait()
		time.Sleep(2 * testLease)
		stop()
		<-ended
		if row.term != 2 {
			t.Errorf("term is %d after the database came back, want 2", row.term)
		}
	})
}

// Probes and metrics of a process whose duties are slow to end must not call it the leader beside the next one.
func TestStatusDoesNotLeadBehindTheTrustWindow(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, stop := context.WithCancel(t.Context())
		row := &fakeRow{lease: testLease}
		lost, leave := make(chan struct{}, 9), make(chan struct{})
		e, ended := run(ctx, row, Config{}, func(ctx context.Context, _ Term) error {
			<-ctx.Done()
			lost <- struct{}{}
			<-leave
			return nil
		})
		time.Sleep(10 * time.Second)
		row.setAway(true)
		<-lost
		synctest.Wait()
		if s := e.Status(); s.Leading {
			t.Errorf("the trust window has closed, and the status is %+v", s)
		}
		row.setAway(false)
		close(leave)
		stop()
		<-ended
	})
}

// The goroutine that ends a term may come late, on a machine that is busy with others.
func TestStatusGoesByTheTrustWindowAndNotByWhatEndsTheTerm(t *testing.T) {
	for age, leading := range map[time.Duration]bool{0: true, testLease: false} {
		e := newElector(&fakeRow{lease: testLease}, Config{Lease: testLease})
		e.see(time.Now().Add(-age), seen{term: 1, won: true, held: true}, nil)
		if s := e.Status(); s.Leading != leading {
			t.Errorf("%v after the poll that won the term: %+v, want leading %v", age, s, leading)
		}
		if e.seeRenewed(time.Now()); !e.Status().Leading {
			t.Errorf("%v after the poll a renewal leaves the status at %+v", age, e.Status())
		}
	}
}

// Duties that return because the trust ended are no failure of theirs: the elector may take the next term at once.
func TestDutiesThatReturnBecauseTheTrustEndedHaveNotFailed(t *testing.T) {
	e := newElector(&fakeRow{lease: testLease}, Config{Lease: testLease})
	for range 100 { // where both are ready, select takes either
		ctx, end := context.WithCancelCause(t.Context())
		end(ErrTrustLost)
		done := make(chan error, 1)
		done <- nil
		if err := e.keep(ctx, &renewals{term: 1, last: time.Now()}, time.NewTimer(time.Hour), end, done); !errors.Is(err, ErrTrustLost) {
			t.Fatalf("the term ended with %v, want ErrTrustLost", err)
		}
	}
}

func TestDutiesThatAreSlowToEndDoNotHoldUpTheNextLeader(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, stop := context.WithCancel(t.Context())
		row := &fakeRow{lease: testLease}
		leave := make(chan struct{})
		_, ended := run(ctx, row, Config{}, func(context.Context, Term) error {
			<-leave
			return nil
		})
		synctest.Wait()
		stop()
		time.Sleep(resignGrace / 2)
		if row.lastRenewal().IsZero() {
			t.Error("the row is free while duties still write")
		}
		time.Sleep(resignGrace)
		if !row.lastRenewal().IsZero() {
			t.Error("the row waits for the duties")
		}
		close(leave)
		<-ended
	})
}

func TestTrustCountsFromTheStartOfTheRenewal(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, stop := context.WithCancel(t.Context())
		row := &slowRow{fakeRow: fakeRow{lease: testLease}}
		ledUntil := make(chan time.Time, 10)
		_, ended := run(ctx, row, Config{}, func(ctx context.Context, _ Term) error {
			<-ctx.Done()
			ledUntil <- time.Now()
			return nil
		})
		// The renewal that begins at 1 s is stamped at once and answered 900 ms later. Then nothing is answered.
		end := <-ledUntil
		if want := time.Second + testLease*3/4; end.Sub(row.won) != want {
			t.Errorf("lead ended %v after it began, want %v", end.Sub(row.won), want)
		}
		stop()
		<-ended
	})
}

// slowRow answers the first renewal late and no other.
type slowRow struct {
	fakeRow
	won      time.Time
	renewals int
}

func (s *slowRow) poll(ctx context.Context, take bool) (seen, error) {
	found, err := s.fakeRow.poll(ctx, take)
	if found.won && s.won.IsZero() {
		s.won = time.Now()
	}
	return found, err
}

func (s *slowRow) renew(ctx context.Context, term Term) (bool, error) {
	if s.renewals++; s.renewals > 1 {
		s.setAway(true)
	}
	held, err := s.fakeRow.renew(ctx, term)
	select {
	case <-ctx.Done():
		return false, ctx.Err()
	case <-time.After(900 * time.Millisecond):
		return held, err
	}
}

func TestLeaderWhoseDutyFailsLetsAnotherAhead(t *testing.T) {
	for name, lead := range map[string]Lead{
		"error":  func(context.Context, Term) error { return errors.New("cannot start") },
		"return": func(context.Context, Term) error { return nil },
		"panic":  func(context.Context, Term) error { panic("duty") },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, stop := context.WithCancel(t.Context())
				row := &fakeRow{lease: testLease}
				began := time.Now()
				bad, badEnded := run(ctx, row, Config{}, lead)
				synctest.Wait()
				good, goodEnded := run(ctx, row, Config{}, untilDone)
				time.Sleep(time.Second)
				if !good.Status().Leading || bad.Status().Leading {
					t.Errorf("%v after the start: bad %+v, good %+v", time.Since(began), bad.Status(), good.Status())
				}
				stop()
				<-badEnded
				<-goodEnded
			})
		})
	}
}

func TestLeaderWhoseDutyFailsLeadsAgainWhereNobodyElseDoes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, stop := context.WithCancel(t.Context())
		row := &fakeRow{lease: testLease}
		began, cfg := make(chan time.Time, 2), Config{HoldOff: time.Minute}.withDefaults()
		_, ended := run(ctx, row, cfg, func(ctx context.Context, term Term) error {
			if began <- time.Now(); term == 1 {
				return errors.New("cannot start")
			}
			return untilDone(ctx, term)
		})
		first := <-began
		if away := (<-began).Sub(first); away < 4*cfg.Poll || away > 4*cfg.Poll+2*cfg.Poll {
			t.Errorf("no process led for %v, want about %v", away, 4*cfg.Poll)
		}
		stop()
		<-ended
	})
}

func TestHoldOffGrowsAndIsBounded(t *testing.T) {
	e := newElector(&fakeRow{}, Config{HoldOff: time.Second})
	for failures, want := range map[int]time.Duration{0: 1, 1: 2, 3: 8, 4: 10, 1000: 10} {
		want *= time.Second
		if got := e.holdOff(failures); got < want || got > want*5/4 {
			t.Errorf("hold-off after %d failures is %v, want %v and up to a quarter more", failures, got, want)
		}
	}
}

func TestSpectatorNeverLeads(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, stop := context.WithCancel(t.Context())
		row := &fakeRow{lease: testLease}
		_, ended := run(ctx, row, Config{Spectator: true}, func(context.Context, Term) error {
			t.Error("spectator was elected")
			return nil
		})
		time.Sleep(time.Minute)
		stop()
		<-ended
		if row.polls < 100 {
			t.Errorf("spectator polled %d times in a minute; it should still watch", row.polls)
		}
	})
}
