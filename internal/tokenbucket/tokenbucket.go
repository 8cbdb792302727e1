// Package tokenbucket bounds rates in the memory of one process: of entries that a token of the API pushes, of requests
// that it makes at a gateway, of hints, of passes of the autoscaler. Rates that hold over all processes are rows of
// penstock.bucket, and their arithmetic is penstock.bucket_level.
//
// golang.org/x/time/rate does not do it: its limiter returns no tokens that were taken a while ago, and keeps rate and
// burst, which are settings that change while the bucket is in use here.
package tokenbucket

import (
	"math"
	"sort"
	"time"
)

// Rate is how much a bucket lets in. A rate that is not a number above 0 and finite is no bound.
type Rate struct {
	PerSecond float64 // tokens
	Burst     float64 // tokens that are saved up at most, and so let in at once
}

// Every is the rate of one token in an interval, and so many at once.
func Every(interval time.Duration, burst float64) Rate {
	return Rate{PerSecond: 1 / interval.Seconds(), Burst: burst}
}

// Bounded says whether the rate is a bound.
func (r Rate) Bounded() bool { return r.PerSecond > 0 && !math.IsInf(r.PerSecond, 1) }

// Fill is how long an empty bucket takes to hold the burst; 0: the rate is no bound.
func (r Rate) Fill() time.Duration {
	if !r.Bounded() {
		return 0
	}
	return r.in(r.Burst)
}

// inMost bounds the time of tokens, 36 years: sums of a few of them must not overflow.
const inMost = math.MaxInt64 / 8

// in is the time in which the rate lets in so many tokens. It is rounded down, so that tokens that are taken one by one
// need no more time than those that are taken at once.
func (r Rate) in(tokens float64) time.Duration {
	return time.Duration(min(tokens/r.PerSecond*float64(time.Second), inMost))
}

// Bucket is a token bucket by the generic cell rate algorithm (ITU-T I.371): it is kept as the time at which it will be
// full again. The zero value is full. Each call gets the time and the rate; callers serialise them.
type Bucket struct {
	full time.Time
}

// taken is the time in which what was taken will be there again.
func (b *Bucket) taken(now time.Time) time.Duration { return max(0, b.full.Sub(now)) }

// Wait is how long it takes until n tokens may be taken; 0: they may be now. More than the burst never may: the
// wait then never comes to 0.
func (b *Bucket) Wait(now time.Time, r Rate, n float64) time.Duration {
	if !r.Bounded() {
		return 0
	}
	return max(0, b.taken(now)+r.in(n)-r.in(r.Burst))
}

// Take takes n tokens, whether or not they are there.
func (b *Bucket) Take(now time.Time, r Rate, n float64) {
	if r.Bounded() {
		b.full = now.Add(b.taken(now) + r.in(n))
	}
}

// TakeAll takes n tokens if they are there. Otherwise it takes none, and returns how long to wait for them.
func (b *Bucket) TakeAll(now time.Time, r Rate, n float64) (wait time.Duration) {
	if wait = b.Wait(now, r, n); wait == 0 {
		b.Take(now, r, n)
	}
	return wait
}

// TakeSome takes up to n tokens, and returns how many, and how long to wait for one more where these are fewer.
func (b *Bucket) TakeSome(now time.Time, r Rate, n int) (took int, wait time.Duration) {
	if b.TakeAll(now, r, float64(n)) == 0 {
		return n, 0
	}
	took = sort.Search(n, func(i int) bool { return b.Wait(now, r, float64(i+1)) > 0 })
	b.Take(now, r, float64(took))
	return took, b.Wait(now, r, 1)
}

// Return puts n tokens back that were taken. What is beyond the burst is lost.
func (b *Bucket) Return(r Rate, n float64) {
	if r.Bounded() {
		b.full = b.full.Add(-r.in(n))
	}
}
