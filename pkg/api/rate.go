package api

import (
	"errors"
	"fmt"
	"math"
	"sync"
	"time"

	"github.com/penstock/penstock/internal/tokenbucket"
)

// errRate refuses a push of a token that has pushed as many entries as it may.
var errRate = errors.New("the token pushes too fast")

// rateError is errRate with the time after which as much may be pushed, 0 if it never may.
type rateError struct {
	text string
	wait time.Duration
}

func (r *rateError) Error() string { return errRate.Error() + ": " + r.text }

func (r *rateError) Unwrap() error { return errRate }

// rates bounds how many entries a second each token pushes. They are kept by the name of the token, so that a rotation
// does not renew them, and each leader counts by itself: a shared count would cost every push a write to one row.
type rates struct {
	mu sync.Mutex
	of map[string]*pushBucket
}

// pushBucket is the bucket of the tokens of one name.
type pushBucket struct {
	tokenbucket.Bucket
	used time.Time // last
}

// bucketsMax bounds the memory of rates: beyond it, buckets that have not been used of late are forgotten.
const bucketsMax = 10_000

// take takes n entries from the rate of a caller, all or none. More than the burst can never be pushed at once.
func (r *rates) take(c caller, n int) error {
	if c.Rate == nil || n == 0 {
		return nil
	}
	rate, now := pushRate(c), time.Now()
	if float64(n) > rate.Burst {
		return &rateError{text: fmt.Sprintf("it may push %v entries at once; push fewer", rate.Burst)}
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	return tooFast(rate, r.bucket(c, now).TakeAll(now, rate, float64(n)))
}

// tooFast returns the refusal of entries that may be pushed after a wait; nil: there is none.
func tooFast(rate tokenbucket.Rate, wait time.Duration) error {
	if wait == 0 {
		return nil
	}
	return &rateError{
		text: fmt.Sprintf("it may push %v entries a second; try again later", rate.PerSecond), wait: wait,
	}
}

// some takes up to n entries, and returns how many; the error refuses the rest of them.
func (r *rates) some(c caller, n int) (int, error) {
	if c.Rate == nil || n == 0 {
		return n, nil
	}
	rate, now := pushRate(c), time.Now()
	r.mu.Lock()
	defer r.mu.Unlock()
	may, wait := r.bucket(c, now).TakeSome(now, rate, n)
	return may, tooFast(rate, wait)
}

// giveBack returns n entries that were taken, and that needed no push: they had been accepted before.
func (r *rates) giveBack(c caller, n int) {
	if c.Rate == nil || n == 0 {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	r.bucket(c, time.Now()).Return(pushRate(c), float64(n))
}

// pushRate is the rate of a caller that has one. Gateways take it as the same (pkg/gateway/pushlimit.go).
func pushRate(c caller) tokenbucket.Rate {
	rate := tokenbucket.Rate{PerSecond: *c.Rate, Burst: max(1, math.Ceil(*c.Rate))}
	if c.Burst != nil {
		rate.Burst = float64(*c.Burst)
	}
	return rate
}

// bucket returns the bucket of a caller, which is used now. Called with mu held.
func (r *rates) bucket(c caller, now time.Time) *pushBucket {
	b := r.of[c.Name]
	if b == nil {
		if r.of == nil || len(r.of) >= bucketsMax {
			r.forget(now)
		}
		b = &pushBucket{}
		r.of[c.Name] = b
	}
	b.used = now
	return b
}

// forget drops what has not been used for a minute. A rate below one a minute then has its burst again at most once a
// minute.
func (r *rates) forget(now time.Time) {
	kept := map[string]*pushBucket{}
	for name, b := range r.of {
		if now.Sub(b.used) < time.Minute {
			kept[name] = b
		}
	}
	r.of = kept
}
