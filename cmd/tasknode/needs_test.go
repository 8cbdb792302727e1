package main

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/governor"
	"github.com/penstock/penstock/pkg/invalidation"
)

// still is a machine of four cores and 4 GiB that nobody uses.
type still struct{}

func (still) Sample(context.Context) (governor.Measurement, error) {
	return governor.Measurement{Cores: 4, MemoryLimitBytes: 4 << 30}, nil
}

// The need of a queue's entries is its setting, unless this node's options say otherwise, and a setting that goes is gone.
func TestNeedsAreSettingsOfTheQueue(t *testing.T) {
	g, err := governor.New(governor.Config{}, still{}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	n := &node{governor: g, log: slog.New(slog.DiscardHandler)}
	go func() { _ = g.Run(t.Context()) }()
	for g.Report().Levels == nil {
		time.Sleep(time.Millisecond)
	}
	declare := n.declare(map[string]governor.Need{"own": {CPU: 2}})
	queue := func(name string, needs invalidation.Needs) *invalidation.Queue {
		return &invalidation.Queue{Name: name, Config: invalidation.Config{Needs: needs}}
	}
	fits := func(queue string) int {
		v, hold := g.Take(queue, 100, 100)
		g.Release(hold, v.Allow)
		return v.Allow
	}
	declare([]*invalidation.Queue{queue("own", invalidation.Needs{CPU: 1}), queue("set", invalidation.Needs{MemoryMiB: 1024}), queue("none", invalidation.Needs{})})
	if own, set, none := fits("own"), fits("set"), fits("none"); own != 2 || set != 3 || none != 100 {
		t.Errorf("%d, %d and %d entries fit, want 2, 3 and 100", own, set, none)
	}
	declare([]*invalidation.Queue{queue("set", invalidation.Needs{})})
	if n := fits("set"); n != 100 {
		t.Errorf("%d entries fit without the setting, want 100", n)
	}
}
