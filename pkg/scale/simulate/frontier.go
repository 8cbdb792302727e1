package simulate

import (
	"fmt"
	"io"
	"math"
	"slices"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/penstock/penstock/pkg/scale"
)

// Point is a scaler with one setting, and its score.
type Point struct {
	Name    string `json:"name"`
	Setting string `json:"setting"`
	Score
}

// Contender is a scaler with the settings at which it is tried.
type Contender struct {
	Name     string
	Settings []Setting
	Bound    bool // requests are bound to instances as they arrive, where Load.Bound is set
}

// Setting makes a scaler for a load.
type Setting struct {
	Name    string
	Initial int
	New     func(load Load) Scaler

	// Period is that of a loop which decides every so often, 0 for one that decides each second. When such a loop
	// begins is chance, and changes its score as much as its target does: it is played with several beginnings, and
	// the score is their mean.
	Period time.Duration
}

// Contenders are our own policy, those of others with their constants, fixed numbers and the bound. Each is
// tried at several values of the knob that trades instances for waits, so that frontiers can be compared and
// not single settings.
func Contenders(load Load, zero bool) []Contender {
	least := 1
	if zero {
		least = 0
	}
	base := scale.Policy{
		Min: least, Max: load.Max, Slots: load.Slots, SLO: seconds(load.SLO), ScaleToZero: &zero,
	}
	all := []Contender{{Name: "penstock", Settings: penstockSettings(base, zero)}}
	all = append(all, hpaContender(base, zero), replicateContender(base, false), replicateContender(base, true))
	all = append(all, knativeContender(load, least), utilizationContender(base))
	return append(all, staticContender(load), clairvoyantContender())
}

func seconds(s float64) scale.Seconds { return scale.Seconds(s * float64(time.Second)) }

func policySetting(name string, initial int, p scale.Policy) Setting {
	return Setting{Name: name, Initial: initial, New: func(Load) Scaler { return NewDecider(p) }}
}

func penstockSettings(base scale.Policy, zero bool) []Setting {
	settings := []Setting{policySetting("default", base.Min, base)}
	if zero {
		for _, price := range []float64{7, 10, 30, 60} {
			p := base
			p.ColdPrice = price
			settings = append(settings, policySetting(fmt.Sprintf("cold price %g", price), base.Min, p))
		}
		return settings
	}
	for _, hold := range []time.Duration{5 * time.Minute, 15 * time.Minute, 30 * time.Minute} {
		for _, tolerated := range []float64{0.0001, 0.05, 0.1} {
			p := base
			p.Hold, p.Tolerated = scale.Seconds(hold), tolerated
			name := fmt.Sprintf("hold %v, tolerated %g %%", hold, 100*tolerated)
			settings = append(settings, policySetting(name, base.Min, p))
		}
	}
	return settings
}

func hpaContender(base scale.Policy, zero bool) Contender {
	c := Contender{Name: "hpa", Bound: true}
	p := base
	p.Algorithm = scale.HPA
	if zero {
		c.Name = "hpa with keda"
		for _, cooldown := range []time.Duration{5, 10, 15, 20, 30, 45} {
			p.HPA.Cooldown = scale.Seconds(cooldown * time.Minute)
			c.Settings = append(c.Settings, policySetting(fmt.Sprintf("cooldown %d min", cooldown), 0, p))
		}
		return c
	}
	for _, share := range []float64{0.25, 0.5, 0.7, 0.8, 0.9, 1, 1.5, 2, 3} {
		p.HPA.Target = share * float64(base.Slots)
		s := policySetting(fmt.Sprintf("target %.3g", p.HPA.Target), 1, p)
		s.Period = hpaPeriod
		c.Settings = append(c.Settings, s)
	}
	return c
}

// hpaPeriod is the default of --horizontal-pod-autoscaler-sync-period.
const hpaPeriod = 15 * time.Second

func replicateContender(base scale.Policy, computing bool) Contender {
	c := Contender{Name: "replicate, waiting"}
	if computing {
		c.Name = "replicate, waiting + computing"
	}
	p := base
	p.Algorithm = scale.ReplicateV2
	p.Replicate.Computing = computing
	for _, share := range []float64{0.5, 1, 2} {
		for _, delay := range []time.Duration{5, 15, 30} {
			p.Replicate.Target = share * float64(base.Slots)
			p.Replicate.IdleDelay = scale.Seconds(delay * time.Minute)
			name := fmt.Sprintf("target %.3g, idle %d min", p.Replicate.Target, delay)
			c.Settings = append(c.Settings, policySetting(name, base.Min, p))
			if base.Min > 0 {
				break
			}
		}
	}
	return c
}

func knativeContender(load Load, least int) Contender {
	c := Contender{Name: "knative", Bound: true}
	for _, share := range []float64{0.5, 0.7, 1} {
		c.Settings = append(c.Settings, Setting{
			Name: fmt.Sprintf("target %.3g", share*float64(load.Slots)), Initial: least,
			New: func(load Load) Scaler { return &Knative{Target: share * float64(load.Slots), Max: load.Max} },
		})
	}
	return c
}

func utilizationContender(base scale.Policy) Contender {
	c := Contender{Name: "workers ai"}
	p := base
	p.Algorithm = scale.Utilization
	for _, variant := range []string{"count", "band", "bounds"} {
		p.Utilization = scale.UtilizationPolicy{Variant: variant, OutOfCap: true}
		c.Settings = append(c.Settings, policySetting(variant, max(1, base.Min), p))
	}
	return c
}

func staticContender(load Load) Contender {
	c := Contender{Name: "static"}
	for _, n := range []int{1, 2, 4, 6, 8, 10, 12, 16, 20, 24, 30, 40} {
		if n <= load.Max {
			c.Settings = append(c.Settings, Setting{
				Name: fmt.Sprint(n), Initial: n, New: func(Load) Scaler { return Static(n) },
			})
		}
	}
	return c
}

// clairvoyantContender knows the requests. With more of the SLO as its permitted wait it needs fewer instances,
// and more requests are late.
func clairvoyantContender() Contender {
	c := Contender{Name: "clairvoyant"}
	for _, margin := range []float64{0.5, 1, 2, 4, 8} {
		c.Settings = append(c.Settings, Setting{
			Name: fmt.Sprintf("%g of the SLO", margin),
			New:  func(load Load) Scaler { return NewClairvoyant(load, margin) },
		})
	}
	return c
}

// Named are the contenders whose names begin with one of the given texts, or all where there is none. It returns the
// text that none begins with, as an error.
func Named(contenders []Contender, names []string) ([]Contender, error) {
	if len(names) == 0 {
		return contenders, nil
	}
	for _, name := range names {
		if !slices.ContainsFunc(contenders, func(c Contender) bool { return strings.HasPrefix(c.Name, name) }) {
			return nil, fmt.Errorf("no policy has a name that begins with %q", name)
		}
	}
	return slices.DeleteFunc(contenders, func(c Contender) bool {
		return !slices.ContainsFunc(names, func(name string) bool { return strings.HasPrefix(c.Name, name) })
	}), nil
}

// Compare plays the loads against each setting of the contenders. All loads share the figures of the first.
func Compare(loads []Load, faults Faults, contenders []Contender) []Point {
	var points []Point
	for _, c := range contenders {
		loads := slices.Clone(loads)
		for i := range loads {
			loads[i].Bound = loads[i].Bound && c.Bound
		}
		if c.Name == "static" && len(loads) > 1 {
			c.Settings = c.Settings[:2] // so many for each of the models
		}
		for _, s := range c.Settings {
			score := s.play(loads, faults)
			points = append(points, Point{Name: c.Name, Setting: s.Name, Score: score})
		}
	}
	return points
}

// beginnings is how many beginnings of a loop are played, at equal distances.
const beginnings = 5

func (s Setting) play(loads []Load, faults Faults) Score {
	if s.Period == 0 {
		return RunAll(loads, faults, s.New, s.Initial)
	}
	scores := make([]Score, beginnings)
	for i := range scores {
		scores[i] = s.PlayFrom(loads, faults, s.Period*time.Duration(i)/beginnings)
	}
	return mean(scores)
}

// PlayFrom plays the loads against a loop that first decides after a time, less than its period.
func (s Setting) PlayFrom(loads []Load, faults Faults, first time.Duration) Score {
	return RunAll(loads, faults, func(load Load) Scaler {
		return late{s.New(load), epoch.Add(time.Second + first), s.Initial}
	}, s.Initial)
}

// late is a scaler that begins at a time. Until then there are as many instances as at the begin.
type late struct {
	Scaler
	begin   time.Time
	initial int
}

// Desired implements Scaler.
func (l late) Desired(now time.Time, o scale.Obs) int {
	if now.Before(l.begin) {
		return l.initial
	}
	return l.Scaler.Desired(now, o)
}

// Hull returns the points of a scaler that none of its others beats in both GPU-hours and violations, made
// convex: between two settings a mixture of both can be had. Ordered by GPU-hours.
func Hull(points []Point, name string) []Point {
	var own []Point
	for _, p := range points {
		if p.Name == name {
			own = append(own, p)
		}
	}
	slices.SortFunc(own, func(a, b Point) int {
		if a.GPUHours != b.GPUHours {
			return int(math.Copysign(1, a.GPUHours-b.GPUHours))
		}
		return a.Late - b.Late
	})
	var hull []Point
	for _, p := range own {
		if len(hull) > 0 && p.Violations() >= hull[len(hull)-1].Violations() {
			continue
		}
		for len(hull) > 1 && above(hull[len(hull)-2], hull[len(hull)-1], p) {
			hull = hull[:len(hull)-1]
		}
		hull = append(hull, p)
	}
	return hull
}

// above says whether b lies on or above the line from a to c.
func above(a, b, c Point) bool {
	along := (b.GPUHours - a.GPUHours) / (c.GPUHours - a.GPUHours)
	return b.Violations() >= a.Violations()+along*(c.Violations()-a.Violations())
}

// Write prints the points as a table.
func Write(to io.Writer, points []Point) error {
	table := tabwriter.NewWriter(to, 0, 0, 2, ' ', 0)
	fmt.Fprintln(table, "POLICY\tSETTING\tLATE\tGPU-HOURS\tP50 WAIT\tP99 WAIT\tSTARTS\tFLIPS")
	for _, p := range points {
		fmt.Fprintf(table, "%s\t%s\t%.2f %%\t%.1f\t%.1f s\t%.1f s\t%d\t%d\n", p.Name, p.Setting,
			100*p.Violations(), p.GPUHours, p.WaitP50, p.WaitP99, p.Starts, p.Flips)
	}
	return table.Flush()
}
