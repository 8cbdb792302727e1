// Package sizing says what a database of so many cores carries: a linear model of what an entry costs, fitted to
// measured points and checked against points that it was not fitted to.
//
// An entry costs, in each step (push, work) and of each resource (server CPU, client CPU, WAL):
//
//	cost = a x commits + b x locks + c + d x payload + e x chunks + f if it has a lock key
//
// with its share of a commit, its share of a lock record (and ready row), its payload in KB, and the chunks
// in which Postgres stores a large payload out of line. From there
//
//	entries/s = cores x utilization x 1e6 / (server us of push + server us of work)
package sizing

import (
	"errors"
	"fmt"
	"math"
	"slices"

	"gonum.org/v1/gonum/mat"
)

// Step is what is done with an entry.
type Step string

// The steps of an entry's life. Sustained is both at once: it is predicted from the two, never fitted.
const (
	Push      Step = "push"
	Work      Step = "work"
	Sustained Step = "sustained"
)

// Cost is what one entry takes.
type Cost struct {
	ServerMicros float64 // of CPU, all processes of the server
	ClientMicros float64 // of CPU, pushers and nodes
	WALBytes     float64
}

// Plus is the sum of two costs.
func (c Cost) Plus(o Cost) Cost {
	return Cost{c.ServerMicros + o.ServerMicros, c.ClientMicros + o.ClientMicros, c.WALBytes + o.WALBytes}
}

// Shape is what an entry's cost depends on.
type Shape struct {
	Commits      float64 // an entry, in this step
	Group        int     // entries that share a lock key, 1 for solo entries
	PayloadBytes int
}

// chunkBytes is how much of a payload a row of a TOAST table holds, toastBytes how large a row may be that
// needs none, less what an entry has beside its payload.
const chunkBytes, toastBytes = 1996, 1900

func (s Shape) features() linear {
	chunks, keyed := 0.0, 0.0
	if s.PayloadBytes > toastBytes {
		chunks = math.Ceil(float64(s.PayloadBytes) / chunkBytes)
	}
	if s.Group > 1 {
		keyed = 1
	}
	return linear{s.Commits, 1 / float64(max(1, s.Group)), 1, float64(s.PayloadBytes) / 1024, chunks, keyed}
}

// Point is a measurement.
type Point struct {
	Step      Step
	PushBatch int // entries a push
	Shape
	Cost
	Entries     int
	Rate        float64 // entries a second
	ServerCores int     // that the server was confined to, 0 for all of the machine
	Check       bool    // not fitted, only predicted
	PushCommits float64 // an entry, in Sustained: Commits is then what working took
}

// linear is the coefficients of one resource in one step: of a commit, of a lock, of the entry, of a KB, of a
// chunk, of a key.
type linear [6]float64

func (l linear) at(s Shape) (sum float64) {
	for i, x := range s.features() {
		sum += l[i] * x
	}
	return sum
}

// Model is the coefficients of all resources in both steps.
type Model map[Step]struct{ Server, Client, WAL linear }

// ErrTooFew is returned when there are not enough points to fit.
var ErrTooFew = errors.New("too few points")

// Fit fits a model to the points that are not checks.
func Fit(points []Point) (Model, error) {
	m := Model{}
	for _, step := range []Step{Push, Work} {
		var some []Point
		for _, p := range points {
			if p.Step == step && !p.Check && p.ServerCores == 0 {
				some = append(some, p)
			}
		}
		if len(some) < len(linear{}) {
			return nil, fmt.Errorf("fit %s: %w: %d", step, ErrTooFew, len(some))
		}
		row := m[step]
		row.Server = fit(some, func(p Point) float64 { return p.ServerMicros })
		row.Client = fit(some, func(p Point) float64 { return p.ClientMicros })
		row.WAL = fit(some, func(p Point) float64 { return p.WALBytes })
		m[step] = row
	}
	return m, nil
}

// fit is least squares of the relative error, so that cheap entries count as much as dear ones. A coefficient that
// comes out negative stands for nothing: it is left out, and the others are fitted again.
func fit(points []Point, value func(Point) float64) (l linear) {
	used := []int{0, 1, 2, 3, 4, 5}
	for len(used) > 0 {
		a, b := mat.NewDense(len(points), len(used), nil), mat.NewVecDense(len(points), nil)
		for i, p := range points {
			features, v := p.features(), value(p)
			for j, k := range used {
				a.Set(i, j, features[k]/v)
			}
			b.SetVec(i, 1)
		}
		var x mat.VecDense
		if err := x.SolveVec(a, b); err != nil && !errors.As(err, new(mat.Condition)) {
			return l
		}
		least := 0
		for j := range used {
			if x.AtVec(j) < x.AtVec(least) {
				least = j
			}
		}
		if x.AtVec(least) >= 0 {
			for j, k := range used {
				l[k] = x.AtVec(j)
			}
			return l
		}
		used = append(used[:least], used[least+1:]...)
	}
	return l
}

// Cost predicts what an entry of a shape takes in a step.
func (m Model) Cost(step Step, s Shape) Cost {
	c := m[step]
	return Cost{c.Server.at(s), c.Client.at(s), c.WAL.at(s)}
}

// Median is the point whose figures are the medians of those of points, which are of one load.
func Median(points []Point) Point {
	p := points[0]
	for _, figure := range []func(*Point) *float64{
		func(p *Point) *float64 { return &p.Commits }, func(p *Point) *float64 { return &p.PushCommits },
		func(p *Point) *float64 { return &p.Rate }, func(p *Point) *float64 { return &p.ServerMicros },
		func(p *Point) *float64 { return &p.ClientMicros }, func(p *Point) *float64 { return &p.WALBytes },
	} {
		values := make([]float64, len(points))
		for i := range points {
			values[i] = *figure(&points[i])
		}
		slices.Sort(values)
		*figure(&p) = values[len(values)/2]
	}
	return p
}

// Predict says what the model expects of a point.
func (m Model) Predict(p Point) Cost {
	if p.Step != Sustained {
		return m.Cost(p.Step, p.Shape)
	}
	push := p.Shape
	push.Commits = p.PushCommits
	return m.Cost(Push, push).Plus(m.Cost(Work, p.Shape))
}

// Rate is how many entries a second a machine of so many cores does that has server and clients on it, if
// nothing but CPU holds it up; with serverCores above 0 the server has those alone, and the clients the
// others.
func (c Cost) Rate(cores, serverCores int) float64 {
	if serverCores == 0 || serverCores >= cores {
		return float64(cores) * 1e6 / (c.ServerMicros + c.ClientMicros)
	}
	return math.Min(float64(serverCores)*1e6/c.ServerMicros, float64(cores-serverCores)*1e6/c.ClientMicros)
}

// Capacity is how many entries a second a database of so many cores carries, whose clients are elsewhere.
func (c Cost) Capacity(cores, utilization float64) float64 {
	return cores * utilization * 1e6 / c.ServerMicros
}
