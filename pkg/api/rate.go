package api

import (
	"errors"
	"fmt"
	"math"
	"sync"
	"time"
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
	of map[string]*tokenBucket
}

// tokenBucket is a token bucket: it holds up to burst entries and gains rate of them a second.
type tokenBucket struct {
	level float64 // at the time at
	at    time.Time
}

// bucketsMax bounds the memory of rates: beyond it, buckets that are full again are forgotten.
const bucketsMax = 10_000

// take takes n entries from the rate of a caller, all or none. More than the burst can never be pushed at once.
func (r *rates) take(c caller, n int) error {
	if c.Rate == nil || n == 0 {
		return nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	b, burst := r.bucket(c, time.Now())
	if float64(n) > burst {
		return &rateError{text: fmt.Sprintf("it may push %v entries at once; push fewer", burst)}
	}
	return b.spend(n, *c.Rate)
}

// some takes up to n entries, and returns how many; the error refuses the rest of them.
func (r *rates) some(c caller, n int) (int, error) {
	if c.Rate == nil || n == 0 {
		return n, nil
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	b, _ := r.bucket(c, time.Now())
	may := min(n, int(b.level))
	b.level -= float64(may)
	if may == n {
		return n, nil
	}
	return may, b.spend(1, *c.Rate)
}

// giveBack returns n entries that were taken, and that needed no push: they had been accepted before.
func (r *rates) giveBack(c caller, n int) {
	if c.Rate == nil || n == 0 {
		return
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	b, burst := r.bucket(c, time.Now())
	b.level = min(burst, b.level+float64(n))
}

// bucket returns what a caller has left now, and its burst.
func (r *rates) bucket(c caller, now time.Time) (*tokenBucket, float64) {
	burst := max(1, math.Ceil(*c.Rate))
	if c.Burst != nil {
		burst = float64(*c.Burst)
	}
	b := r.of[c.Name]
	if b == nil {
		if r.of == nil || len(r.of) >= bucketsMax {
			r.forget(now)
		}
		b = &tokenBucket{level: burst, at: now}
		r.of[c.Name] = b
	}
	b.level = min(burst, b.level+now.Sub(b.at).Seconds()*(*c.Rate))
	b.at = now
	return b, burst
}

// forget drops what has not been used for a minute. A rate below one a minute then has its burst again at most once a
// minute.
func (r *rates) forget(now time.Time) {
	kept := map[string]*tokenBucket{}
	for name, b := range r.of {
		if now.Sub(b.at) < time.Minute {
			kept[name] = b
		}
	}
	r.of = kept
}

// spend takes n entries, or says when there will be as many.
func (b *tokenBucket) spend(n int, rate float64) error {
	if missing := float64(n) - b.level; missing > 0 {
		return &rateError{
			text: fmt.Sprintf("it may push %v entries a second; try again later", rate),
			wait: time.Duration(min(missing/rate, 1e9) * float64(time.Second)),
		}
	}
	b.level -= float64(n)
	return nil
}
