package curves

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strconv"
	"time"

	"github.com/penstock/penstock/bench/meter"
	"github.com/penstock/penstock/bench/sizing"
	"github.com/penstock/penstock/pkg/invalidation"
)

// load is what one point of sizing does.
type load struct {
	step                  sizing.Step
	batch, group, payload int
	threads, micros       int // of the node, 0 for its defaults
	check                 bool
}

// loads are the points that the model is fitted to, and those that check it.
var loads = []load{
	{step: sizing.Push, batch: 1, group: 1, payload: 50},
	{step: sizing.Push, batch: 1, group: 1, payload: 1500},
	{step: sizing.Push, batch: 1000, group: 1, payload: 50},
	{step: sizing.Push, batch: 1000, group: 1, payload: 1500},
	{step: sizing.Push, batch: 1000, group: 1, payload: 8000}, // stored out of line
	{step: sizing.Push, batch: 1000, group: 50, payload: 50},
	{step: sizing.Push, batch: 1000, group: 10, payload: 50},
	{step: sizing.Push, batch: 10, group: 1, payload: 50, check: true},
	{step: sizing.Push, batch: 100, group: 1, payload: 1000, check: true},
	{step: sizing.Push, batch: 1000, group: 5, payload: 500, check: true},
	{step: sizing.Push, batch: 1000, group: 1, payload: 4000, check: true},

	{step: sizing.Work, batch: 1000, group: 1, payload: 50},
	{step: sizing.Work, batch: 1000, group: 1, payload: 1500},
	{step: sizing.Work, batch: 1000, group: 1, payload: 8000},
	{step: sizing.Work, batch: 1000, group: 50, payload: 50},
	{step: sizing.Work, batch: 1000, group: 10, payload: 50},
	{step: sizing.Work, batch: 1000, group: 1, payload: 50, threads: 2, micros: 5000},
	{step: sizing.Work, batch: 1000, group: 1, payload: 50, threads: 16, micros: 5000},
	{step: sizing.Work, batch: 1000, group: 5, payload: 500, check: true},
	{step: sizing.Work, batch: 1000, group: 1, payload: 1000, check: true},
	{step: sizing.Work, batch: 1000, group: 1, payload: 50, threads: 8, micros: 2000, check: true},

	{step: sizing.Sustained, batch: 1000, group: 1, payload: 50, check: true},
	{step: sizing.Sustained, batch: 100, group: 10, payload: 500, check: true},
	{step: sizing.Sustained, batch: 1, group: 1, payload: 200, check: true},
}

// SizingPoints measures what sizing is fitted to and checked against: all points in turn, round by round, and
// the medians of the rounds count.
func (h *Harness) SizingPoints(ctx context.Context, rounds int) ([]sizing.Point, error) {
	var all [][]sizing.Point
	for range rounds {
		at := 0
		err := h.sizingRound(ctx, func(p sizing.Point) {
			if at == len(all) {
				all = append(all, nil)
			}
			all[at] = append(all[at], p)
			at++
		})
		if err != nil {
			return nil, err
		}
	}
	points := make([]sizing.Point, len(all))
	for i := range all {
		points[i] = sizing.Median(all[i])
	}
	return points, nil
}

func (h *Harness) sizingRound(ctx context.Context, add func(sizing.Point)) error {
	for _, load := range loads {
		p, err := h.sized(ctx, load)
		if err != nil {
			return fmt.Errorf("%s in batches of %d, groups of %d: %w", load.step, load.batch, load.group, err)
		}
		add(p)
	}
	return h.confined(ctx, add)
}

func (h *Harness) sized(ctx context.Context, load load) (p sizing.Point, err error) {
	s, err := h.testbed(ctx, invalidation.Config{})
	if err != nil {
		return p, err
	}
	defer s.close()
	switch load.step {
	case sizing.Push:
		p, err = s.sizedPush(ctx, load)
	case sizing.Work:
		p, err = s.sizedWork(ctx, load)
	default:
		p, err = s.sizedSustained(ctx, load)
	}
	p.Step, p.Check, p.PushBatch, p.Group, p.PayloadBytes = load.step, load.check, load.batch, load.group, load.payload
	h.Log.Info("measured", "step", load.step, "batch", load.batch, "group", load.group, "payload", load.payload,
		"server_us", p.ServerMicros)
	return p, err
}

func (s *testbed) pushLoad(ctx context.Context, n int, load load) error {
	entry := padded(load.payload, load.group)
	if load.batch > 1 {
		_, err := s.push(ctx, n, load.batch, entry)
		return err
	}
	_, err := s.pushSingles(ctx, s.queue.WithTx(s.pool), n, 16,
		entry) // each in a transaction of its own, as from many processes
	return err
}

func (s *testbed) sizedPush(ctx context.Context, load load) (p sizing.Point, err error) {
	n := 2 * s.harness.Entries
	if err := s.pushLoad(ctx, 1000, load); err != nil { // connections and plans are made
		return p, err
	}
	if _, err := meter.Flush(ctx, s.pool); err != nil {
		return p, err
	}
	before, err := s.harness.meter.Read(ctx, database)
	if err != nil {
		return p, err
	}
	self, start := meter.Self(), time.Now()
	if err := s.pushLoad(ctx, n, load); err != nil {
		return p, err
	}
	took, used := time.Since(start), meter.Self().CPUSeconds-self.CPUSeconds
	if _, err := meter.Flush(ctx, s.pool); err != nil {
		return p, err
	}
	after, err := s.harness.meter.Read(ctx, database)
	if err != nil {
		return p, err
	}
	return point(n, took.Seconds(), used, after.Since(before)), nil
}

func point(n int, seconds, clientSeconds float64, spent meter.Spent) sizing.Point {
	each := func(v float64) float64 { return v / float64(n) }
	return sizing.Point{
		Entries: n, Rate: float64(n) / seconds,
		Shape: sizing.Shape{Commits: each(float64(spent.Commits))},
		Cost: sizing.Cost{
			ServerMicros: each(spent.CPUSeconds * 1e6), ClientMicros: each(clientSeconds * 1e6),
			WALBytes: each(float64(spent.WALBytes)),
		},
	}
}

func (s *testbed) sizedWork(ctx context.Context, load load) (sizing.Point, error) {
	n := 3 * s.harness.Entries
	if load.micros > 0 {
		n = min(n, 3*load.threads*1_000_000/load.micros) // three seconds' worth
	}
	if err := s.pushLoad(ctx, n, load); err != nil {
		return sizing.Point{}, err
	}
	o, err := s.drain(ctx, NodeConfig{Threads: load.threads, Micros: load.micros}, 1, n)
	if err != nil {
		return sizing.Point{}, err
	}
	return point(o.Handled, o.Seconds, o.CPUSeconds, o.server), nil
}

// sizedSustained pushes and works at once for as long as a point may last.
func (s *testbed) sizedSustained(ctx context.Context, load load) (sizing.Point, error) {
	c, err := s.startNodes(ctx, NodeConfig{}, 1)
	if err != nil {
		return sizing.Point{}, err
	}
	self := meter.Self()
	pushed := 0
	for end := time.Now().Add(s.harness.PointTime); time.Now().Before(end); {
		if int64(pushed)-c.handled.Load() > int64(s.harness.Entries) {
			time.Sleep(time.Millisecond)
			continue
		}
		n := 2000
		if err := s.pushLoad(ctx, n, load); err != nil {
			return sizing.Point{}, err
		}
		pushed += n
	}
	if err := c.await(ctx, pushed, time.Minute); err != nil {
		return sizing.Point{}, err
	}
	used := meter.Self().CPUSeconds - self.CPUSeconds
	o, err := c.stop(ctx)
	if err != nil {
		return sizing.Point{}, err
	}
	p := point(o.Handled, o.Seconds, o.CPUSeconds+used, o.server)
	p.PushCommits = 1 / float64(load.batch)
	p.Commits = max(0, p.Commits-p.PushCommits)
	return p, nil
}

// confined drains with the server on one core and the node on the others: how the rate follows the server's cores.
func (h *Harness) confined(ctx context.Context, add func(sizing.Point)) (err error) {
	taskset, lookErr := exec.LookPath("taskset")
	if lookErr != nil || runtime.NumCPU() < 2 {
		h.Log.Warn("not run: a server on one core needs taskset and two cores")
		return nil
	}
	last := runtime.NumCPU() - 1
	if err := h.confine(ctx, taskset, "0"); err != nil {
		return err
	}
	program := h.Program
	h.Program = slices.Concat([]string{taskset, "-c", "1-" + strconv.Itoa(last)}, program)
	defer func() {
		h.Program = program
		err = errors.Join(err, h.confine(ctx, taskset, "0-"+strconv.Itoa(last)))
	}()
	for _, load := range []load{
		{step: sizing.Work, batch: 1000, group: 1, payload: 50, check: true},
		{step: sizing.Work, batch: 1000, group: 50, payload: 50, check: true},
	} {
		p, err := h.sized(ctx, load)
		if err != nil {
			return err
		}
		p.ServerCores = 1
		add(p)
	}
	return nil
}

// confine puts all processes of the server, and those to come, on some cores.
func (h *Harness) confine(ctx context.Context, taskset, cores string) error {
	pids, err := h.meter.Pids()
	if err != nil {
		return err
	}
	for _, pid := range pids {
		out, err := exec.CommandContext(ctx, taskset, "-p", "-c", cores, strconv.Itoa(pid)).CombinedOutput()
		if _, gone := os.Stat(fmt.Sprintf("/proc/%d", pid)); err != nil && gone == nil {
			return fmt.Errorf("put the server on cores %s: %w: %s", cores, err, out)
		}
	}
	return nil
}
