package election

import (
	"context"
	"errors"
	"log/slog"
	"math/rand/v2"
	"sync/atomic"
	"time"

	"github.com/penstock/penstock/internal/duty"
	"github.com/penstock/penstock/internal/postgres"
)

// Elector takes part in one election.
type Elector struct {
	cfg    Config
	row    leaseRow
	status atomic.Pointer[Status]
}

// leaseRow is the row that electors compete for; tests that need a clock of their own use a fake.
type leaseRow interface {
	poll(ctx context.Context, take bool) (seen, error)
	renew(ctx context.Context, term Term) (bool, error)
	resign(ctx context.Context, term Term) error
}

// New returns an elector under a fresh incarnation. db should be a pool of ten connections for it alone.
func New(db postgres.DB, cfg Config) *Elector {
	cfg = cfg.withDefaults()
	return newElector(row{
		db: db, name: cfg.Name, holder: cfg.Holder, lease: cfg.Lease, incarnation: rand.Int64N(1<<62) + 1,
	}, cfg)
}

func newElector(o leaseRow, cfg Config) *Elector {
	e := &Elector{cfg: cfg.withDefaults(), row: o}
	e.status.Store(&Status{})
	return e
}

// The causes for which a term's context ended, as context.Cause returns them.
var (
	// ErrTrustLost is the cause when renewals were unanswered for so long that another process may
	// be elected.
	ErrTrustLost = errors.New("trust window closed")
	errResigned  = errors.New("resigned")
)

// Lead does the work of a leader until ctx ends. If it returns before, the leader resigns and holds
// off, so that another process is elected; so it should return when it cannot start or run one of
// its duties.
type Lead func(ctx context.Context, term Term) error

// Run takes part until ctx ends, then resigns. It calls lead in each term that it wins, with a
// context that ends with ctx, when the trust window closes or when the term is found to be over.
// Run returns after lead has returned.
func (e *Elector) Run(ctx context.Context, lead Lead) error {
	failures := 0
	var notBefore time.Time
	for {
		term, start, ok := e.follow(ctx, notBefore)
		if !ok {
			return nil
		}
		err := e.hold(ctx, term, start, lead)
		switch {
		case ctx.Err() != nil:
			return nil
		case err == nil, errors.Is(err, ErrTermOver), errors.Is(err, ErrTrustLost):
			failures = 0
			e.cfg.Log.WarnContext(ctx, "term ended", "election", e.cfg.Name, "term", term, "reason", err)
		default:
			if time.Since(start) > 10*e.cfg.HoldOff {
				failures = 0
			}
			wait := e.holdOff(failures)
			failures++
			notBefore = time.Now().Add(wait)
			e.cfg.Log.ErrorContext(ctx, "resigned because a duty failed", "election", e.cfg.Name, "term", term,
				"hold_off", wait, "error", err)
		}
	}
}

// follow polls the row until it wins a term or ctx ends. start is the start of the winning poll.
// Before notBefore it takes only a lease that stayed free for four polls: a leader that may fail
// again is better than none.
func (e *Elector) follow(ctx context.Context, notBefore time.Time) (term Term, start time.Time, ok bool) {
	var failing duty.Failing
	log := e.cfg.Log.With("election", e.cfg.Name)
	var freeSince time.Time // as polls found it; zero: held
	for {
		start = time.Now()
		unwanted := !freeSince.IsZero() && start.Sub(freeSince) >= 4*e.cfg.Poll
		s, err := e.poll(ctx, start, !e.cfg.Spectator && (unwanted || !start.Before(notBefore)))
		failing.Note(ctx, log, slog.LevelWarn, "read the election", err)
		switch {
		case ctx.Err() != nil:
			if s.won {
				e.resign(ctx, s.term)
			}
			return 0, start, false
		case err == nil && s.won:
			return s.term, start, true
		}
		if err != nil || s.held {
			freeSince = time.Time{}
		} else if freeSince.IsZero() {
			freeSince = start
		}
		select {
		case <-ctx.Done():
			return 0, start, false
		case <-time.After(e.cfg.Poll/2 + rand.N(e.cfg.Poll/2+1)):
		}
	}
}

// poll is bounded by the trust window that it could begin at start.
func (e *Elector) poll(ctx context.Context, start time.Time, take bool) (seen, error) {
	ctx, cancel := context.WithTimeout(ctx, e.cfg.trust()/2)
	defer cancel()
	s, err := e.row.poll(ctx, take)
	e.see(start, s, err)
	return s, err
}

// hold runs lead for one term and returns why the term ended: lead's error, ErrTrustLost or ErrTermOver.
func (e *Elector) hold(ctx context.Context, term Term, start time.Time, lead Lead) error {
	leadCtx, end := context.WithCancelCause(ctx)
	defer end(nil)
	window := time.AfterFunc(time.Until(start.Add(e.cfg.trust())), func() { end(ErrTrustLost) })
	defer window.Stop()
	e.cfg.Log.InfoContext(ctx, "elected", "election", e.cfg.Name, "term", term, "holder", e.cfg.Holder)

	done := make(chan error, 1)
	go func() {
		done <- duty.Protect(leadCtx, e.cfg.Log, func() error { return lead(leadCtx, term) })
	}()
	err := e.keep(leadCtx, &renewals{term: term, last: start}, window, end, done)
	e.endTerm() // now: duties may take their time to end, and another process leads
	end(errResigned)
	// The row is freed when the duties have ended, so that few writes are refused. A duty that
	// takes longer does not delay the next leader: its writes name a term that is over.
	select {
	case late := <-done:
		e.resign(ctx, term)
		return errors.Join(err, quiet(late))
	case <-time.After(resignGrace):
		e.resign(ctx, term)
		return errors.Join(err, quiet(<-done))
	}
}

// resignGrace is how long the next leader waits for the duties of this one to end.
const resignGrace = 100 * time.Millisecond

// quiet drops an error that a duty returns because its context ended.
func quiet(err error) error {
	if errors.Is(err, context.Canceled) || errors.Is(err, ErrTermOver) {
		return nil
	}
	return err
}

// ended returns why the context of a term ended: ErrTrustLost, or nil if the process ends.
func ended(ctx context.Context) error {
	if errors.Is(context.Cause(ctx), ErrTrustLost) {
		return ErrTrustLost
	}
	return nil
}

// renewals are those of one term.
type renewals struct {
	term    Term
	last    time.Time // start of the last one that was answered, or of the poll that won the term
	failing duty.Failing
}

// note logs when renewals begin to fail and when they work again. A term that ends meanwhile has a line of its own,
// with the reason.
func (e *Elector) note(ctx context.Context, r *renewals, err error) {
	log := e.cfg.Log.With("election", e.cfg.Name, "term", r.term)
	r.failing.Note(ctx, log, slog.LevelWarn, "renew the lease", err, duty.LeaseArgs(r.last, e.cfg.Lease)...)
}

// keep renews the term until it ends. When lead has returned, it puts the result back into done.
func (e *Elector) keep(ctx context.Context, r *renewals, window *time.Timer, end context.CancelCauseFunc,
	done chan error,
) error {
	pause := e.cfg.renewEvery()
	for {
		select {
		case <-ctx.Done():
			return ended(ctx)
		case err := <-done:
			done <- nil
			switch {
			case err != nil:
				return err
			case ctx.Err() != nil: // lead returned because of that
				return ended(ctx)
			}
			return errors.New("lead returned while elected")
		case <-time.After(pause):
		}
		start := time.Now()
		held, err := e.renew(ctx, r.term)
		e.note(ctx, r, err)
		switch {
		case ctx.Err() != nil: // reported above
		case err != nil:
			pause = e.cfg.renewEvery() / 5
		case !held:
			end(ErrTermOver)
			return ErrTermOver
		case window.Reset(time.Until(start.Add(e.cfg.trust()))):
			pause = e.cfg.renewEvery()
			r.last = start
			e.seeRenewed(start)
		default: // the window closed while the answer was on its way
			end(ErrTrustLost)
		}
	}
}

func (e *Elector) renew(ctx context.Context, term Term) (bool, error) {
	ctx, cancel := context.WithTimeout(ctx, e.cfg.renewEvery())
	defer cancel()
	return e.row.renew(ctx, term)
}

// resign frees the row, even if ctx has ended. If it fails, the lease lapses.
func (e *Elector) resign(ctx context.Context, term Term) {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), e.cfg.renewEvery())
	defer cancel()
	if err := e.row.resign(ctx, term); err != nil {
		e.cfg.Log.WarnContext(ctx, "cannot resign; the lease will lapse", "election", e.cfg.Name, "term", term,
			"error", err)
	}
}

// holdOff doubles with each failure in a row, up to ten times the first, and adds up to a quarter at random.
func (e *Elector) holdOff(failures int) time.Duration {
	wait := min(e.cfg.HoldOff<<min(failures, 10), 10*e.cfg.HoldOff)
	return wait + rand.N(wait/4+1)
}
