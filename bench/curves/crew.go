package curves

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"slices"
	"sync/atomic"
	"time"

	"github.com/penstock/penstock/bench/meter"
)

// crew is nodes at work, each a process, between two readings of the meter.
type crew struct {
	site    *site
	nodes   []*worker
	handled atomic.Int64
	before  meter.Reading
}

// worker is the process of one node.
type worker struct {
	cmd   *exec.Cmd
	in    io.WriteCloser
	out   *bufio.Reader
	shift Shift
	ended chan error
}

// outcome is what a crew did and what it cost.
type outcome struct {
	Shift  // sums; the memory is the largest of one node, the seconds are the longest
	server meter.Spent
	others float64
}

// hire starts as many nodes as wanted, and lets all begin when all are ready.
func (s *site) hire(ctx context.Context, d Duty, processes int) (*crew, error) {
	if d.DSN == "" {
		d.DSN = s.dsn
	}
	duty, err := json.Marshal(d)
	if err != nil {
		return nil, err
	}
	c := &crew{site: s}
	for range processes {
		w, err := startWorker(ctx, append(slices.Clone(s.lab.Program), string(duty)))
		if err != nil {
			return nil, errors.Join(err, c.kill())
		}
		c.nodes = append(c.nodes, w)
	}
	for _, w := range c.nodes {
		if _, err := w.out.ReadString('\n'); err != nil {
			return nil, errors.Join(fmt.Errorf("wait until a node is ready: %w", err), c.kill())
		}
	}
	if _, err := meter.Flush(ctx, s.pool); err != nil {
		return nil, errors.Join(err, c.kill())
	}
	if c.before, err = s.lab.meter.Read(ctx, database); err != nil {
		return nil, errors.Join(err, c.kill())
	}
	for _, w := range c.nodes {
		fmt.Fprintln(w.in, "go")
		go func() { w.ended <- w.follow(&c.handled) }()
	}
	return c, nil
}

func startWorker(ctx context.Context, args []string) (*worker, error) {
	w := &worker{cmd: exec.CommandContext(ctx, args[0], args[1:]...), ended: make(chan error, 1)}
	w.cmd.Stderr = os.Stderr
	in, err := w.cmd.StdinPipe()
	if err != nil {
		return nil, err
	}
	out, err := w.cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	w.in, w.out = in, bufio.NewReaderSize(out, 1<<16)
	if err := w.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start a node: %w", err)
	}
	return w, nil
}

// follow adds up what the node says it handled, until its report.
func (w *worker) follow(handled *atomic.Int64) error {
	for last := int64(0); ; {
		line, err := w.out.ReadBytes('\n')
		if err != nil {
			return fmt.Errorf("wait for the report of a node: %w", err)
		}
		var says struct {
			Handled int64    `json:"handled"`
			Seconds *float64 `json:"seconds"`
		}
		if err := json.Unmarshal(line, &says); err != nil {
			return fmt.Errorf("read the report of a node: %w", err)
		}
		handled.Add(says.Handled - last)
		last = says.Handled
		if says.Seconds != nil {
			return json.Unmarshal(line, &w.shift)
		}
	}
}

// await waits until the crew has handled n entries, or d has passed.
func (c *crew) await(ctx context.Context, n int, d time.Duration) error {
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(d); c.handled.Load() < int64(n) && time.Now().Before(end); {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
	}
	return nil
}

// dismiss stops the nodes gracefully and says what they did.
func (c *crew) dismiss(ctx context.Context) (outcome, error) {
	var o outcome
	for _, w := range c.nodes {
		w.in.Close()
	}
	for _, w := range c.nodes {
		if err := errors.Join(<-w.ended, w.cmd.Wait()); err != nil {
			return o, err
		}
		o.add(w.shift)
	}
	slices.Sort(o.PickupMillis)
	slices.Sort(o.ClaimMillis)
	if err := c.site.lab.meter.Settle(ctx, database); err != nil {
		return o, err
	}
	if _, err := meter.Flush(ctx, c.site.pool); err != nil {
		return o, err
	}
	after, err := c.site.lab.meter.Read(ctx, database)
	o.server, o.others = after.Since(c.before), after.OthersShare(c.before, o.CPUSeconds)
	return o, err
}

// kill ends the processes of a crew that never went to work.
func (c *crew) kill() error {
	var errs []error
	for _, w := range c.nodes {
		errs = append(errs, w.cmd.Process.Kill())
		_ = w.cmd.Wait() // it says that it was killed
	}
	return errors.Join(errs...)
}

func (s *Shift) add(o Shift) {
	s.Handled += o.Handled
	s.Seconds = max(s.Seconds, o.Seconds)
	s.CPUSeconds += o.CPUSeconds
	s.RSSMaxBytes, s.HeldBytes = max(s.RSSMaxBytes, o.RSSMaxBytes), max(s.HeldBytes, o.HeldBytes)
	s.Mallocs += o.Mallocs
	s.AllocBytes += o.AllocBytes
	s.Claims += o.Claims
	s.Settles += o.Settles
	s.Settled += o.Settled
	s.PickupMillis = append(s.PickupMillis, o.PickupMillis...)
	s.ClaimMillis = append(s.ClaimMillis, o.ClaimMillis...)
}

// The columns of figures, in the order in which tables show them.
const (
	rateTitle     = "entries/s"
	pushTitle     = "pushes/s"
	claim50       = "claim p50 ms"
	claim99       = "claim p99 ms"
	pick50        = "pick-up p50 ms"
	pick99        = "pick-up p99 ms"
	pickMax       = "pick-up max ms"
	lookTitle     = "look ms"
	clientTitle   = "client us"
	serverTitle   = "server us"
	walTitle      = "WAL B"
	commitTitle   = "commits"
	bufferTitle   = "buffers"
	rssTitle      = "node MB"
	allocsTitle   = "allocs"
	allocBTitle   = "alloc B"
	inFlightTitle = "in flight B"
	handler50     = "claim to handler p50 ms"
	handler99     = "claim to handler p99 ms"
	settleTitle   = "endings/settle"
	diskTitle     = "disk B"
	othersTitle   = "others %"
)

var columns = []string{
	rateTitle, pushTitle, claim50, claim99, pick50, pick99, pickMax, lookTitle, clientTitle, serverTitle, walTitle,
	commitTitle,
	bufferTitle, diskTitle, rssTitle, allocsTitle, allocBTitle, inFlightTitle, handler50, handler99, settleTitle,
	othersTitle,
}

// costs are the rate and what an entry took.
func (o outcome) costs() Figures {
	each := func(v float64) float64 { return v / float64(max(1, o.Handled)) }
	return Figures{
		rateTitle:   float64(o.Handled) / o.Seconds,
		clientTitle: each(o.CPUSeconds * 1e6),
		serverTitle: each(o.server.CPUSeconds * 1e6),
		walTitle:    each(float64(o.server.WALBytes)),
		commitTitle: each(float64(o.server.Commits)),
		bufferTitle: each(float64(o.server.Buffers)),
		rssTitle:    float64(o.RSSMaxBytes) / (1 << 20),
		othersTitle: o.others * 100,
	}
}

// pickups are the times from the call of a push to its handler.
func (o outcome) pickups() Figures {
	return Figures{
		pick50: meter.Quantile(o.PickupMillis, 0.5), pick99: meter.Quantile(o.PickupMillis, 0.99),
		pickMax: meter.Quantile(o.PickupMillis, 1),
	}
}
