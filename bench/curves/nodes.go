package curves

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync/atomic"
	"time"

	"github.com/penstock/penstock/bench/child"
	"github.com/penstock/penstock/bench/meter"
)

// nodes are task nodes at work, each a process, between two readings of the meter.
type nodes struct {
	bed       *testbed
	processes []*nodeProcess
	handled   atomic.Int64
	before    meter.Reading
}

// nodeProcess is the process of one node.
type nodeProcess struct {
	*child.Process
	report NodeReport
	ended  chan error
}

// outcome is what the nodes did and what it cost.
type outcome struct {
	NodeReport // sums; the memory is the largest of one node, the seconds are the longest
	server     meter.Spent
	others     float64
}

// startNodes starts as many nodes as wanted, and lets all begin when all are ready.
func (s *testbed) startNodes(ctx context.Context, config NodeConfig, processes int) (*nodes, error) {
	if config.DSN == "" {
		config.DSN = s.dsn
	}
	argument, err := json.Marshal(config)
	if err != nil {
		return nil, err
	}
	n := &nodes{bed: s}
	for range processes {
		p, err := child.Start(ctx, append(slices.Clone(s.harness.Program), string(argument)))
		if err != nil {
			n.kill()
			return nil, err
		}
		n.processes = append(n.processes, &nodeProcess{Process: p, ended: make(chan error, 1)})
	}
	if err := n.begin(ctx); err != nil {
		n.kill()
		return nil, err
	}
	return n, nil
}

// begin reads the meter when all nodes are ready, and lets them begin.
func (n *nodes) begin(ctx context.Context) (err error) {
	for _, p := range n.processes {
		if err := p.Ready(); err != nil {
			return err
		}
	}
	if _, err := meter.Flush(ctx, n.bed.pool); err != nil {
		return err
	}
	if n.before, err = n.bed.harness.meter.Read(ctx, database); err != nil {
		return err
	}
	for _, p := range n.processes {
		p.Tell("go")
		go func() { p.ended <- p.follow(&n.handled) }()
	}
	return nil
}

// follow adds up what the node says it handled, until its report.
func (p *nodeProcess) follow(handled *atomic.Int64) error {
	for last := int64(0); ; {
		var line json.RawMessage
		if err := p.Read(&line); err != nil {
			return err
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
			return json.Unmarshal(line, &p.report)
		}
	}
}

// await waits until the nodes have handled count entries, or d has passed.
func (n *nodes) await(ctx context.Context, count int, d time.Duration) error {
	tick := time.NewTicker(time.Millisecond)
	defer tick.Stop()
	for end := time.Now().Add(d); n.handled.Load() < int64(count) && time.Now().Before(end); {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
	}
	return nil
}

// stop stops the nodes gracefully and says what they did.
func (n *nodes) stop(ctx context.Context) (outcome, error) {
	var o outcome
	for _, p := range n.processes {
		p.EndInput()
	}
	for _, p := range n.processes {
		if err := errors.Join(<-p.ended, p.Wait()); err != nil {
			return o, err
		}
		o.add(p.report)
	}
	slices.Sort(o.PickupMillis)
	slices.Sort(o.ClaimMillis)
	if err := n.bed.harness.meter.Settle(ctx, database); err != nil {
		return o, err
	}
	if _, err := meter.Flush(ctx, n.bed.pool); err != nil {
		return o, err
	}
	after, err := n.bed.harness.meter.Read(ctx, database)
	o.server, o.others = after.Since(n.before), after.OthersShare(n.before, o.CPUSeconds)
	return o, err
}

// kill ends the processes of nodes that never began.
func (n *nodes) kill() {
	for _, p := range n.processes {
		p.Kill()
		_ = p.Wait() // it says that it was killed
	}
}

func (r *NodeReport) add(o NodeReport) {
	r.Handled += o.Handled
	r.Seconds = max(r.Seconds, o.Seconds)
	r.CPUSeconds += o.CPUSeconds
	r.RSSMaxBytes, r.HeldBytes = max(r.RSSMaxBytes, o.RSSMaxBytes), max(r.HeldBytes, o.HeldBytes)
	r.Mallocs += o.Mallocs
	r.AllocBytes += o.AllocBytes
	r.Claims += o.Claims
	r.Settles += o.Settles
	r.Settled += o.Settled
	r.PickupMillis = append(r.PickupMillis, o.PickupMillis...)
	r.ClaimMillis = append(r.ClaimMillis, o.ClaimMillis...)
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
