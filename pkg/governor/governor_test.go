package governor

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

// script answers each Sample with the next of its steps, and the last one for ever.
type script struct {
	steps []func() (Measurement, error)
	calls int
}

func (s *script) Sample(context.Context) (Measurement, error) {
	step := s.steps[min(s.calls, len(s.steps)-1)]
	s.calls++
	return step()
}

func memory(fraction float64) func() (Measurement, error) {
	return func() (Measurement, error) {
		return Measurement{Cores: 4, MemoryLimitBytes: 10 * gibi, MemoryUsedBytes: int64(fraction * 10 * gibi)}, nil
	}
}

func broken() (Measurement, error) { return Measurement{}, errors.New("proc is not mounted") }

func started(t *testing.T, source Source) (*Governor, *bytes.Buffer) {
	var log bytes.Buffer
	g, err := New(Config{}, source, slog.New(slog.NewTextHandler(&log, nil)))
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- g.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	synctest.Wait()
	return g, &log
}

func allow(g *Governor) int { return g.Ask("mail", 8).Allow }

func TestNothingIsAllowedBeforeTheFirstReading(t *testing.T) {
	g, err := New(Config{}, &script{}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	if v := g.Ask("mail", 8); v.Allow != 0 || v.Reasons[0].String() != "no reading of CPU and memory yet" {
		t.Errorf("verdict %+v", v)
	}
}

func TestRunFollowsTheReadings(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, _ := started(t, &script{steps: []func() (Measurement, error){memory(0.5), memory(0.95), memory(0.5)}})
		if n := allow(g); n != 8 {
			t.Errorf("allow %d after the first reading, want 8", n)
		}
		time.Sleep(500 * time.Millisecond)
		synctest.Wait()
		if n := allow(g); n != 0 {
			t.Errorf("allow %d at 95%% memory, want 0", n)
		}
		// Nobody asks meanwhile: the loop alone opens the gate.
		time.Sleep(3500 * time.Millisecond)
		synctest.Wait()
		if n := allow(g); n != 8 {
			t.Errorf("allow %d after calm, want 8", n)
		}
	})
}

func TestFailedReadingsAreLoggedOnceAndGoStale(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		steps := []func() (Measurement, error){memory(0.5)}
		for range 20 {
			steps = append(steps, broken)
		}
		g, log := started(t, &script{steps: append(steps, memory(0.5))})
		time.Sleep(4 * time.Second)
		synctest.Wait()
		if n := allow(g); n != 8 {
			t.Errorf("allow %d with a reading 4 s old, want 8", n)
		}
		time.Sleep(2 * time.Second)
		synctest.Wait()
		if v := g.Ask("mail", 8); v.Allow != 0 || v.Reasons[0].Code != Stale {
			t.Errorf("verdict %+v with a reading 6 s old", v)
		}
		time.Sleep(5 * time.Second)
		synctest.Wait()
		if n := allow(g); n != 8 {
			t.Errorf("allow %d when readings are back, want 8", n)
		}
		if lines := strings.Count(log.String(), "\n"); lines != 2 {
			t.Errorf("logged %d lines, want 2:\n%s", lines, log)
		}
	})
}

func TestTakenMemoryIsNotTakenTwice(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, _ := started(t, &script{steps: []func() (Measurement, error){memory(0.1)}})
		if err := g.Declare("video", Need{MemoryBytes: 2 * gibi}); err != nil {
			t.Fatal(err)
		}
		first, hold := g.Take("video", 8, 2) // 7 GiB of room: three would fit, two are wanted
		second, _ := g.Take("video", 8, 8)
		third, _ := g.Take("video", 8, 8)
		if first.Allow != 2 || second.Allow != 1 || third.Allow != 0 {
			t.Fatalf("took %d, %d, %d, want 2, 1, 0", first.Allow, second.Allow, third.Allow)
		}
		g.Release(hold, 2)
		if v := g.Ask("video", 8); v.Allow != 2 {
			t.Errorf("allow %d after release, want 2", v.Allow)
		}
	})
}

func TestNewNeedLeavesRunningEntriesAlone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, _ := started(t, &script{steps: []func() (Measurement, error){memory(0)}})
		if err := g.Declare("video", Need{MemoryBytes: gibi, CPU: 0.1}); err != nil {
			t.Fatal(err)
		}
		v, hold := g.Take("video", 3, 3)
		if err := g.Declare("video", Need{MemoryBytes: 2 * gibi, CPU: 0.3}); err != nil {
			t.Fatal(err)
		}
		g.Release(hold, v.Allow)
		if running := g.Status().Readings.Running; running != (Need{}) {
			t.Errorf("%+v left after release", running)
		}
		if err := g.Declare("video", Need{MemoryBytes: -1}); err == nil {
			t.Error("a negative need is accepted")
		}
	})
}

// Queues come and go: the needs of those that the node serves no more are not remembered.
func TestNeedsOfOtherQueuesAreForgotten(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, _ := started(t, &script{steps: []func() (Measurement, error){memory(0)}})
		for _, queue := range []string{"gone", "served"} {
			if err := g.Declare(queue, Need{MemoryBytes: 2 * gibi}); err != nil {
				t.Fatal(err)
			}
		}
		v, hold := g.Take("gone", 8, 1)
		g.Keep(map[string]bool{"served": true})
		if len(g.needs) != 1 || g.needs["served"].MemoryBytes != 2*gibi {
			t.Errorf("the needs are %v, want that of served", g.needs)
		}
		g.Release(hold, v.Allow)
		if running := g.Status().Readings.Running; running != (Need{}) {
			t.Errorf("%+v left after release", running)
		}
	})
}

// A report names the queues that were refused a moment ago, and not those that were taken from since.
func TestTheReportNamesQueuesThatAreRefused(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, _ := started(t, &script{steps: []func() (Measurement, error){memory(0.1)}})
		if err := g.Declare("large", Need{MemoryBytes: 64 * gibi}); err != nil {
			t.Fatal(err)
		}
		refused := func() map[string]string { return g.Report().Refused }
		g.Take("large", 8, 1)
		g.Take("mail", 0, 1) // for threads, which explain has already
		const want = "memory: an entry needs 64.0 GiB, this node gives at most 8.0 GiB; run the queue on a larger node"
		if got := refused(); len(got) != 1 || got["large"] != want {
			t.Errorf("refused: %v", got)
		}
		if err := g.Declare("large", Need{MemoryBytes: gibi}); err != nil {
			t.Fatal(err)
		}
		g.Take("large", 8, 1)
		if got := refused(); len(got) != 0 {
			t.Errorf("one was taken, and the report has %v", got)
		}
		if err := g.Declare("large", Need{MemoryBytes: 64 * gibi}); err != nil {
			t.Fatal(err)
		}
		g.Take("large", 8, 1)
		time.Sleep(2 * refusedFor)
		if got := refused(); len(got) != 0 {
			t.Errorf("no claim asks any more, and the report has %v", got)
		}
	})
}

// fixed measures nothing and allocates nothing.
type fixed struct{ calls atomic.Int64 }

func (f *fixed) Sample(context.Context) (Measurement, error) {
	f.calls.Add(1)
	return Measurement{Cores: 4, MemoryLimitBytes: 64 * gibi, MemoryUsedBytes: gibi}, nil
}

func TestTakeAllocatesNothingAndReadsNoFile(t *testing.T) {
	source := &fixed{}
	g, err := New(Config{}, source, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	if err := g.read(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := g.Declare("mail", Need{CPU: 0.01, MemoryBytes: 1 << 20}); err != nil {
		t.Fatal(err)
	}
	allocations := testing.AllocsPerRun(100, func() {
		v, hold := g.Take("mail", 8, 8)
		g.Release(hold, v.Allow)
	})
	if allocations != 0 || source.calls.Load() != 1 {
		t.Errorf("%.0f allocations, %d readings; want 0 and 1", allocations, source.calls.Load())
	}
}

func BenchmarkTake(b *testing.B) {
	g, err := New(Config{}, &fixed{}, slog.New(slog.DiscardHandler))
	if err != nil {
		b.Fatal(err)
	}
	if err := g.read(b.Context()); err != nil {
		b.Fatal(err)
	}
	if err := g.Declare("mail", Need{CPU: 0.01, MemoryBytes: 1 << 20}); err != nil {
		b.Fatal(err)
	}
	for b.Loop() {
		v, hold := g.Take("mail", 8, 8)
		g.Release(hold, v.Allow)
	}
}
