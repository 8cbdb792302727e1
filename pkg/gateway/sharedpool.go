package gateway

import (
	"context"
	"errors"
	"sync"
	"time"
)

// sharedPool is a pool that goroutines share: one mutex, and one timer for the waits that end. A request that
// waits blocks its own goroutine, and gets the pool's decision through a channel of its own.
type sharedPool struct {
	model string
	need  func(s *sharedPool) // tells that slots are wanted; it must not block
	spare func(s *sharedPool) // tells that slots came idle which others miss; it must not block

	retries retryBudget

	mu    sync.Mutex
	pool  *Pool
	alarm *time.Timer
	armed time.Time // what the alarm is set to; zero: it is not
	peak  int       // most calls in flight since it was read last
	usual float64   // most calls in flight of late

	// Until then slots that come idle are offered: another node misses some, and none was idle when it said so. Zero:
	// none are.
	hinted time.Time
}

func newSharedPool(model string, policy PoolPolicy, budget *byteBudget, need, spare func(*sharedPool)) *sharedPool {
	return &sharedPool{model: model, need: need, spare: spare, pool: NewPool(policy, budget)}
}

// await waits until the request may go to an instance. The call must be ended with end. The error is a
// *Rejection.
func (s *sharedPool) await(ctx context.Context, r *Request) error {
	decision := make(chan Dropped, 1)
	r.Leave = func(_ *Request, dropped Dropped) { decision <- dropped }
	s.mu.Lock()
	inFlight, refused := s.pool.Arrive(time.Now(), r)
	s.afterChange()
	s.mu.Unlock()
	switch {
	case refused != nil:
		return refused
	case inFlight:
		return nil
	}
	select {
	case dropped := <-decision:
		return s.rejectionOf(r, dropped)
	case <-ctx.Done():
	}
	s.mu.Lock()
	withdrawn := s.pool.Cancel(time.Now(), r, reasonOf(ctx))
	s.afterChange()
	s.mu.Unlock()
	if withdrawn {
		return &Rejection{Reason: r.trace.Dropped}
	}
	if dropped := <-decision; dropped != DropNone { // it was decided before the cancel
		return s.rejectionOf(r, dropped)
	}
	s.end(r, CallEnd{Unused: true}) // a slot came in the same moment
	return &Rejection{Reason: reasonOf(ctx)}
}

// others says whether a sound instance is there beside the one that a request is in flight to.
func (s *sharedPool) others(r *Request) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.pool.fleet.sound(r.instance)
}

func reasonOf(ctx context.Context) Dropped {
	if errors.Is(context.Cause(ctx), context.DeadlineExceeded) {
		return DropDeadline
	}
	return DropCancelled
}

// rejectionOf returns the error of a request that has waited and was dropped; nil: it was dispatched.
func (s *sharedPool) rejectionOf(r *Request, dropped Dropped) error {
	if dropped == DropNone {
		return nil
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	return &Rejection{Reason: dropped, RetryAfter: s.pool.retryAfter(time.Now(), r), Detail: "waited " + time.Duration(
		r.trace.WaitedMS*float64(time.Millisecond)).Round(time.Millisecond).String()}
}

// end ends a call that await let go.
func (s *sharedPool) end(r *Request, end CallEnd) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.pool.End(time.Now(), r, end)
	s.afterChange()
}

// recheck acts on the state of the pool as a change would have done.
func (s *sharedPool) recheck() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.afterChange()
}

// do changes the pool under its lock.
func (s *sharedPool) do(change func(now time.Time, p *Pool)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change(time.Now(), s.pool)
	s.afterChange()
}

// afterChange follows every change of the pool: the timer is set to what is due next, and where requests wait
// for slots, or slots are to be given back, the leaser is woken. Called with mu held.
func (s *sharedPool) afterChange() {
	s.peak = max(s.peak, s.pool.inFlight)
	now := time.Now()
	if s.need != nil && (s.pool.wanted(now) > 0 || len(s.pool.returning) > 0) {
		s.need(s)
	}
	if !s.hinted.IsZero() {
		s.passHint(now)
	}
	next := s.pool.Next()
	switch {
	case next.IsZero() || next.Equal(s.armed):
		return
	case s.alarm == nil:
		s.alarm = time.AfterFunc(next.Sub(now), s.ring)
	default:
		s.alarm.Reset(next.Sub(now))
	}
	s.armed = next
}

// passHint tells of slots that came idle behind a hint. Called with mu held.
func (s *sharedPool) passHint(now time.Time) {
	switch {
	case now.After(s.hinted):
		s.hinted = time.Time{}
	case spareOf(s.pool) > 0:
		s.hinted = time.Time{}
		s.spare(s)
	}
}

func (s *sharedPool) ring() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.armed = time.Time{}
	s.pool.Tick(time.Now())
	s.afterChange()
}

// cold says whether requests wait for an instance to start.
func (s *sharedPool) cold() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.pool.mode == ModeCold && s.pool.waiting > 0
}

// view returns the state of the pool.
func (s *sharedPool) view() PoolState {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.pool.view(time.Now(), s.model)
}
