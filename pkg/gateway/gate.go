package gateway

import (
	"context"
	"errors"
	"sync"
	"time"
)

// gate is a pool that goroutines share: one mutex, and one timer for the waits that end. A request that
// waits blocks its own goroutine, and gets its verdict through a channel of its own.
type gate struct {
	model string
	need  func(g *gate) // tells that slots are wanted; it must not block
	spare func(g *gate) // tells that slots came idle which others miss; it must not block

	mu    sync.Mutex
	pool  *Pool
	alarm *time.Timer
	armed time.Time // what the alarm is set to; zero: it is not
	peak  int       // most calls in flight since it was read last
	usual float64   // most calls in flight of late

	hinted time.Time // until then other nodes are known to miss slots, none of which was idle here; zero: they are not
}

func newGate(model string, policy PoolPolicy, budget *byteBudget, need, spare func(*gate)) *gate {
	return &gate{model: model, need: need, spare: spare, pool: NewPool(policy, budget)}
}

// admit waits until the request may go to an instance. The call must be ended with end. The error is a
// *Rejection.
func (g *gate) admit(ctx context.Context, r *Request) error {
	verdict := make(chan Dropped, 1)
	r.Leave = func(_ *Request, dropped Dropped) { verdict <- dropped }
	g.mu.Lock()
	flying, refused := g.pool.Arrive(time.Now(), r)
	g.settle()
	g.mu.Unlock()
	switch {
	case refused != nil:
		return refused
	case flying:
		return nil
	}
	select {
	case dropped := <-verdict:
		return g.verdict(r, dropped)
	case <-ctx.Done():
	}
	g.mu.Lock()
	withdrawn := g.pool.Cancel(time.Now(), r, reasonOf(ctx))
	g.settle()
	g.mu.Unlock()
	if withdrawn {
		return &Rejection{Reason: r.trace.Dropped}
	}
	if dropped := <-verdict; dropped != DropNone { // it was decided before the cancel
		return g.verdict(r, dropped)
	}
	g.end(r, Taken{Unused: true}) // a slot came in the same moment
	return &Rejection{Reason: reasonOf(ctx)}
}

func reasonOf(ctx context.Context) Dropped {
	if errors.Is(context.Cause(ctx), context.DeadlineExceeded) {
		return DropDeadline
	}
	return DropCancelled
}

func (g *gate) verdict(r *Request, dropped Dropped) error {
	if dropped == DropNone {
		return nil
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	return &Rejection{Reason: dropped, RetryAfter: g.pool.retryAfter(time.Now(), r), Detail: "waited " + time.Duration(
		r.trace.WaitedMS*float64(time.Millisecond)).Round(time.Millisecond).String()}
}

// end ends a call that was admitted.
func (g *gate) end(r *Request, u Taken) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.pool.End(time.Now(), r, u)
	g.settle()
}

// do changes the pool under its lock.
func (g *gate) do(change func(now time.Time, p *Pool)) {
	g.mu.Lock()
	defer g.mu.Unlock()
	change(time.Now(), g.pool)
	g.settle()
}

// settle follows every change of the pool: the timer is set to what is due next, and where requests wait
// for slots, or slots are to be given back, the feeder is woken. Called with mu held.
func (g *gate) settle() {
	g.peak = max(g.peak, g.pool.stock)
	now := time.Now()
	if g.need != nil && (g.pool.wanted(now) > 0 || len(g.pool.left) > 0) {
		g.need(g)
	}
	if !g.hinted.IsZero() {
		g.passHint(now)
	}
	next := g.pool.Next()
	switch {
	case next.IsZero() || next.Equal(g.armed):
		return
	case g.alarm == nil:
		g.alarm = time.AfterFunc(next.Sub(now), g.ring)
	default:
		g.alarm.Reset(next.Sub(now))
	}
	g.armed = next
}

// passHint tells of slots that came idle behind a hint. Called with mu held.
func (g *gate) passHint(now time.Time) {
	switch {
	case now.After(g.hinted):
		g.hinted = time.Time{}
	case spareOf(g.pool) > 0:
		g.hinted = time.Time{}
		g.spare(g)
	}
}

func (g *gate) ring() {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.armed = time.Time{}
	g.pool.Tick(time.Now())
	g.settle()
}

// cold says whether requests wait for an instance to start.
func (g *gate) cold() bool {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.pool.mode == ModeCold && g.pool.waiting > 0
}

// view returns the state of the pool.
func (g *gate) view() PoolState {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.pool.view(time.Now(), g.model)
}
