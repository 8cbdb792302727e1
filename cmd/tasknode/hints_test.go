package main

import (
	"context"
	"encoding/json"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
)

const hintsSQL = `SELECT count(*) = 1 FROM penstock.node WHERE load->>'hints' = $1`

func idle(context.Context, *invalidation.Run) (json.RawMessage, error) { return nil, nil }

// A pooler in transaction mode cannot carry LISTEN: the direct address can, and the node's heartbeats tell whether
// hints are heard, so that a listener which went deaf is seen without a look into the node's log.
func TestANodeBehindAPoolerHearsHintsOnTheDirectAddress(t *testing.T) {
	t.Parallel()
	x := startBehindProxy(t, idle, func(c *Config) {
		c.TaskNode.Hints, c.Database.Pooled, c.Database.DirectURL = true, true, c.Database.URL
	})
	x.eventually(time.Minute, "hints are heard", hintsSQL, "heard")
}

func TestANodeThatHearsNoHintsReportsIt(t *testing.T) {
	t.Parallel()
	x := startBehindProxy(t, idle, func(c *Config) {
		c.TaskNode.Hints, c.Database.DirectURL = true, "postgres://127.0.0.1:1/nowhere"
	})
	x.eventually(time.Minute, "the lost listener is reported", hintsSQL+` AND load->>'hints_error' <> ''`, "lost")
}

func TestANodeBehindAPoolerWithoutADirectAddressSaysThatItPolls(t *testing.T) {
	t.Parallel()
	x := startBehindProxy(t, idle, func(c *Config) { c.TaskNode.Hints, c.Database.Pooled = true, true })
	x.eventually(time.Minute, "it polls", hintsSQL, "pooler")
}
