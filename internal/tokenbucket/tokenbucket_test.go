package tokenbucket

import (
	"math"
	"testing"
	"time"

	"pgregory.net/rapid"
)

var noBounds = []Rate{{}, {PerSecond: -1, Burst: 1}, {PerSecond: math.NaN(), Burst: 1}, {PerSecond: math.Inf(1), Burst: 1}}

func TestARateThatIsNoNumberAboveZeroIsNoBound(t *testing.T) {
	t.Parallel()
	now := time.Now()
	for _, r := range noBounds {
		var b Bucket
		b.Take(now, r, 1e9)
		b.Return(r, 1e9)
		if took, wait := b.TakeSome(now, r, 1e9); took != 1e9 || wait != 0 {
			t.Errorf("%+v lets %d in, and says to wait %v", r, took, wait)
		}
		if wait := b.TakeAll(now, r, 1e9); wait != 0 || r.Fill() != 0 || b != (Bucket{}) {
			t.Errorf("%+v: wait %v, fill %v, bucket %+v", r, wait, r.Fill(), b)
		}
	}
}

func TestABucketIsEmptyAfterItsBurst(t *testing.T) {
	t.Parallel()
	now, r := time.Now(), Rate{PerSecond: 10, Burst: 20}
	var b Bucket
	if wait := b.TakeAll(now, r, 20); wait != 0 {
		t.Fatalf("the burst waits %v", wait)
	}
	if wait := b.TakeAll(now, r, 5); wait != 500*time.Millisecond {
		t.Errorf("5 more wait %v", wait)
	}
	if took, wait := b.TakeSome(now.Add(250*time.Millisecond), r, 3); took != 2 || wait != 50*time.Millisecond {
		t.Errorf("%d of two and a half are taken, and the next one waits %v", took, wait)
	}
	b.Return(r, 22)
	if took, _ := b.TakeSome(now, r, 100); took != 20 {
		t.Errorf("%d are there after all were put back", took)
	}
	b = Bucket{}
	b.Take(now, r, 100) // beyond the burst
	if wait := b.Wait(now, r, 1); wait != 8100*time.Millisecond || r.Fill() != 2*time.Second {
		t.Errorf("after 100 at once the next one waits %v; the bucket fills in %v", wait, r.Fill())
	}
}

func TestTimesOfSlowRatesDoNotOverflow(t *testing.T) {
	t.Parallel()
	now, r := time.Now(), Rate{PerSecond: 1e-300, Burst: math.MaxInt32}
	var b Bucket
	b.Take(now, r, math.MaxInt32)
	b.Take(now, r, math.MaxInt32)
	if wait := b.Wait(now, r, 1); wait <= 0 || r.Fill() <= 0 {
		t.Errorf("wait %v, fill %v", wait, r.Fill())
	}
}

// Whatever is asked for, no more is let in within any time than the burst and the rate, and who waits as told is let in.
func TestABucketLetsInItsBurstAndItsRate(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		r := Rate{
			PerSecond: rapid.Float64Range(0.01, 10_000).Draw(t, "rate"),
			Burst:     float64(rapid.IntRange(1, 1000).Draw(t, "burst")),
		}
		var b Bucket
		start := time.Now()
		now, in := start, 0.0
		for range 100 {
			now = now.Add(time.Duration(rapid.Int64Range(0, int64(time.Second)).Draw(t, "pause")))
			n := rapid.IntRange(1, int(r.Burst)).Draw(t, "n")
			if rapid.Bool().Draw(t, "all") {
				wait := b.TakeAll(now, r, float64(n))
				if wait > 0 {
					now = now.Add(wait)
					if again := b.TakeAll(now, r, float64(n)); again != 0 {
						t.Fatalf("%d wait %v after a wait of %v", n, again, wait)
					}
				}
				in += float64(n)
			} else {
				took, wait := b.TakeSome(now, r, n)
				if (took == n) != (wait == 0) {
					t.Fatalf("%d of %d are taken, and the next waits %v", took, n, wait)
				}
				in += float64(took)
			}
			const takes = 200 // at most, each rounded to a nanosecond
			if most := r.Burst + now.Sub(start).Seconds()*r.PerSecond + takes*r.PerSecond*1e-9 + 1e-6; in > most {
				t.Fatalf("%v are in, want %v at most", in, most)
			}
		}
	})
}
