package simulate

import (
	"context"
	"math"
	"math/rand/v2"
	"runtime"
	"slices"
	"sync"
	"time"

	"github.com/penstock/penstock/pkg/scale"
)

// Scaler says once a second how many instances there should be.
type Scaler interface {
	Desired(now time.Time, o scale.Obs) int
}

// Score is the outcome of a load under a scaler.
type Score struct {
	Requests int     `json:"requests"`
	Late     int     `json:"late"` // waited longer than the SLO, or never began
	GPUHours float64 `json:"gpu_hours"`
	Flips    int     `json:"flips"` // changes of direction
	Starts   int     `json:"starts"`
	WaitP50  float64 `json:"wait_p50"` // seconds
	WaitP99  float64 `json:"wait_p99"`
}

// Violations is the share of the requests that waited longer than the SLO.
func (s Score) Violations() float64 {
	if s.Requests == 0 {
		return 0
	}
	return float64(s.Late) / float64(s.Requests)
}

// add sums two loads. Quantiles of waits do not add up: the worse of both is kept.
func (s Score) add(other Score) Score {
	return Score{
		Requests: s.Requests + other.Requests, Late: s.Late + other.Late,
		GPUHours: s.GPUHours + other.GPUHours, Flips: s.Flips + other.Flips, Starts: s.Starts + other.Starts,
		WaitP50: max(s.WaitP50, other.WaitP50), WaitP99: max(s.WaitP99, other.WaitP99),
	}
}

// mean is the mean of scores of one load. Quantiles of waits are those of the worst.
func mean(scores []Score) Score {
	var sum Score
	for _, s := range scores {
		sum = sum.add(s)
	}
	n := len(scores)
	rounded := func(total int) int { return (total + n/2) / n }
	sum.Requests, sum.Late = rounded(sum.Requests), rounded(sum.Late)
	sum.Flips, sum.Starts = rounded(sum.Flips), rounded(sum.Starts)
	sum.GPUHours /= float64(n)
	return sum
}

// Run plays a load against a scaler in steps of a second. The fleet begins with initial ready instances.
func Run(load Load, faults Faults, scaler Scaler, initial int) Score {
	score, _ := run(context.Background(), load, faults, scaler, initial) // which does not end
	return score
}

// stepsUnasked is how many steps are made until the context is asked again.
const stepsUnasked = 100

// run is Run until ctx ends.
func run(ctx context.Context, load Load, faults Faults, scaler Scaler, initial int) (Score, error) {
	f := newFleet(load, faults, initial)
	desired, direction, flips := initial, 0, 0
	for now := 1.0; now <= load.Span(); now++ {
		if int(now)%stepsUnasked == 0 && ctx.Err() != nil {
			return Score{}, context.Cause(ctx)
		}
		f.advance(now)
		want := scaler.Desired(moment(now), f.observe(now))
		if want != desired {
			turned := 1
			if want < desired {
				turned = -1
			}
			if direction != 0 && turned != direction && now > load.Warm {
				flips++
			}
			direction, desired = turned, want
		}
		f.resize(now, want)
	}
	return f.score(flips), nil
}

func (f *fleet) score(flips int) Score {
	s := Score{Requests: len(f.load.Requests) - f.skipped, GPUHours: f.gpu / 3600, Flips: flips, Starts: f.starts}
	s.Late = max(0, s.Requests-len(f.waits))
	for _, wait := range f.waits {
		if wait > f.load.SLO {
			s.Late++
		}
	}
	if slices.Sort(f.waits); len(f.waits) > 0 {
		s.WaitP50 = f.waits[len(f.waits)/2]
		s.WaitP99 = f.waits[len(f.waits)*99/100]
	}
	return s
}

// RunAll plays each load against a scaler of its own and adds the scores up.
func RunAll(loads []Load, faults Faults, scaler func(Load) Scaler, initial int) Score {
	var (
		lock  sync.Mutex
		tasks sync.WaitGroup
		total Score
	)
	free := make(chan struct{}, runtime.GOMAXPROCS(0))
	for _, load := range loads {
		tasks.Go(func() {
			free <- struct{}{}
			score := Run(load, faults, scaler(load), initial)
			<-free
			lock.Lock()
			defer lock.Unlock()
			total = total.add(score)
		})
	}
	tasks.Wait()
	return total
}

// logNormal is a factor whose logarithm has the standard deviation sigma.
func logNormal(random *rand.Rand, sigma float64) float64 {
	return math.Exp(sigma * random.NormFloat64())
}
