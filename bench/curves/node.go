package curves

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime"
	"runtime/pprof"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/penstock/penstock/bench/meter"
	"github.com/penstock/penstock/bench/node"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/tasknode"
)

// NodeConfig is the configuration of the process of a node. The zero value, but for the DSN, is a node by default
// settings.
type NodeConfig struct {
	DSN     string `json:"dsn"`
	Threads int    `json:"threads,omitempty"`
	NoHints bool   `json:"no_hints,omitempty"`
	Pooled  bool   `json:"pooled,omitempty"`
	Hold    bool   `json:"hold,omitempty"`    // handlers do not return before the end
	Profile string `json:"profile,omitempty"` // folder for profiles of CPU and allocations
	Micros  int    `json:"us,omitempty"`      // that a handler takes, asleep
}

// body is the payload of an entry.
type body struct {
	At     int64 `json:"at,omitempty"` // when its push was called, in Unix nanoseconds: its pick-up is measured
	Micros int   `json:"us,omitempty"` // that its handler takes, asleep
}

// NodeReport is what the process of a node did.
type NodeReport struct {
	Handled      int       `json:"handled"`
	Seconds      float64   `json:"seconds"`
	CPUSeconds   float64   `json:"cpu_seconds"`
	RSSMaxBytes  int64     `json:"rss_max_bytes"`
	HeldBytes    int64     `json:"held_bytes"` // heap and stacks in use after a collection, before the end
	Mallocs      int64     `json:"mallocs"`
	AllocBytes   int64     `json:"alloc_bytes"`
	Claims       int64     `json:"claims"`
	Settles      int64     `json:"settles"`
	Settled      int64     `json:"settled"`
	PickupMillis []float64 `json:"pickup_ms"` // from the call of the push to the handler
	ClaimMillis  []float64 `json:"claim_ms"`  // from the start of the claim to the handler, of every 16th entry
}

// RunNode is the body of a node's process, whose configuration is a NodeConfig in JSON: connect, say so, wait for a
// line, work, tell how many entries were handled, and at the end of in stop and report.
func RunNode(ctx context.Context, config string, in io.Reader, out io.Writer) error {
	var c NodeConfig
	if err := json.Unmarshal([]byte(config), &c); err != nil {
		return fmt.Errorf("read the configuration of the node: %w", err)
	}
	h := &handler{config: c, end: make(chan struct{})}
	node, err := node.New(ctx, node.Config{
		DSN: c.DSN, Pooled: c.Pooled, NoHints: c.NoHints,
		Task: tasknode.Config{Name: fmt.Sprint("bench-", os.Getpid()), Threads: c.Threads},
	})
	if err != nil {
		return err
	}
	defer node.Close()
	node.Handle("bench", h)

	fmt.Fprintln(out, `{"ready":true}`)
	lines := bufio.NewReader(in)
	if _, err := lines.ReadString('\n'); err != nil {
		return fmt.Errorf("wait for the line to begin: %w", err)
	}
	stopProfile, err := profile(c.Profile)
	if err != nil {
		return err
	}
	before, memory := meter.Self(), memStats()
	start := time.Now()
	running, cancel := context.WithCancel(ctx)
	defer cancel()
	ended := make(chan error, 1)
	go func() {
		defer cancel()
		ended <- node.Run(running)
	}()
	told := make(chan struct{})
	go func() {
		_, _ = lines.ReadString('\n') // only the end comes
		close(told)
	}()
	h.tell(running, told, out)
	report := NodeReport{HeldBytes: h.held()}
	close(h.end)
	cancel()
	err = <-ended
	report.Seconds = time.Since(start).Seconds()
	after, memoryAfter := meter.Self(), memStats()
	report.CPUSeconds, report.RSSMaxBytes = after.CPUSeconds-before.CPUSeconds, after.RSSMaxBytes
	report.Mallocs, report.AllocBytes = int64(memoryAfter.Mallocs-memory.Mallocs),
		int64(memoryAfter.TotalAlloc-memory.TotalAlloc)
	report.Claims, report.Settles, report.Settled = node.Stats().Claims.Load(), node.Stats().Settles.Load(),
		node.Stats().Settled.Load()
	h.report(&report)
	return errors.Join(err, stopProfile(), json.NewEncoder(out).Encode(report))
}

func memStats() (m runtime.MemStats) {
	runtime.ReadMemStats(&m)
	return m
}

func profile(folder string) (stop func() error, err error) {
	if folder == "" {
		return func() error { return nil }, nil
	}
	file, err := os.Create(filepath.Join(folder, fmt.Sprintf("node-%d.cpu.pprof", os.Getpid())))
	if err != nil {
		return nil, fmt.Errorf("write profile: %w", err)
	}
	if err := pprof.StartCPUProfile(file); err != nil {
		return nil, errors.Join(fmt.Errorf("write profile: %w", err), file.Close())
	}
	return func() error {
		pprof.StopCPUProfile()
		return errors.Join(file.Close(), allocations(folder))
	}, nil
}

func allocations(folder string) error {
	file, err := os.Create(filepath.Join(folder, fmt.Sprintf("node-%d.allocs.pprof", os.Getpid())))
	if err != nil {
		return fmt.Errorf("write profile: %w", err)
	}
	return errors.Join(pprof.Lookup("allocs").WriteTo(file, 0), file.Close())
}

// handler counts, and takes the times that are asked for.
type handler struct {
	config  NodeConfig
	end     chan struct{}
	handled atomic.Int64

	mu      sync.Mutex
	pickups []float64
	claims  []float64
}

func (h *handler) Handle(_ context.Context, r *invalidation.Run) (json.RawMessage, error) {
	var b body
	if len(r.Entry.Payload) < 100 { // larger ones are ballast
		if err := json.Unmarshal(r.Entry.Payload, &b); err != nil {
			return nil, err
		}
	}
	if b.At > 0 {
		h.record(&h.pickups, time.Duration(time.Now().UnixNano()-b.At))
	}
	if h.handled.Add(1)%16 == 1 {
		h.record(&h.claims, time.Since(r.Lock.ClaimedAt))
	}
	if micros := max(b.Micros, h.config.Micros); micros > 0 {
		time.Sleep(time.Duration(micros) * time.Microsecond)
	}
	if h.config.Hold {
		<-h.end
	}
	return nil, nil
}

func (h *handler) record(into *[]float64, d time.Duration) {
	h.mu.Lock()
	*into = append(*into, d.Seconds()*1000)
	h.mu.Unlock()
}

// tell writes how many entries were handled, until it is told to stop.
func (h *handler) tell(ctx context.Context, told <-chan struct{}, out io.Writer) {
	tick := time.NewTicker(2 * time.Millisecond)
	defer tick.Stop()
	for last := int64(0); ; {
		select {
		case <-told:
			return
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		if n := h.handled.Load(); n != last {
			fmt.Fprintf(out, "{\"handled\":%d}\n", n)
			last = n
		}
	}
}

// held is the memory in use, if the node was to hold entries.
func (h *handler) held() int64 {
	if !h.config.Hold {
		return 0
	}
	runtime.GC()
	m := memStats()
	return int64(m.HeapInuse + m.StackInuse)
}

func (h *handler) report(s *NodeReport) {
	h.mu.Lock()
	defer h.mu.Unlock()
	s.Handled = int(h.handled.Load())
	s.PickupMillis, s.ClaimMillis = slices.Sorted(slices.Values(h.pickups)), slices.Sorted(slices.Values(h.claims))
}
