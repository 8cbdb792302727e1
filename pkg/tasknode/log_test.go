package tasknode

import (
	"bytes"
	"context"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
)

// logged returns the lines of a node's log about a step.
func logged(text *bytes.Buffer, step string) (lines []string) {
	for line := range strings.Lines(text.String()) {
		if strings.Contains(line, step) {
			lines = append(lines, line)
		}
	}
	return lines
}

// At night the first question about a missed heartbeat is how long ago the last one was, and when the lease ends.
func TestAMissedHeartbeatSaysHowMuchOfTheLeaseIsLeft(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var text bytes.Buffer
		n := New(Config{Name: "n1", Log: slog.New(slog.NewTextHandler(&text, nil))}, unreachable{}, unreachable{})
		n.lease.renew(time.Now().Add(-3 * time.Second))
		done := make(chan struct{})
		ctx, stop := context.WithCancel(t.Context())
		go func() { defer close(done); n.heartbeat(ctx) }()
		time.Sleep(time.Minute)
		stop()
		<-done
		const want = `node=n1 step=heartbeat error="connection refused" renewed_ago=3s lease_ends_in=7s`
		if lines := logged(&text, "step=heartbeat"); len(lines) != 1 || !strings.Contains(lines[0], want) {
			t.Errorf("a minute of missed heartbeats logs %s, want one line with %s", lines, want)
		}
	})
}

// The queues are read with each heartbeat until that succeeds.
func TestQueuesThatCannotBeReadHaveOneLine(t *testing.T) {
	var text bytes.Buffer
	n := New(Config{Log: slog.New(slog.NewTextHandler(&text, nil))}, unreachable{}, unreachable{})
	for range 10 {
		n.obey(t.Context(), invalidation.Orders{RegistryVersion: 1})
	}
	if lines := logged(&text, "read queues"); len(lines) != 1 || n.registry != 0 {
		t.Errorf("ten heartbeats whose queues cannot be read log %s, want one line", lines)
	}
}
