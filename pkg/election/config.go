package election

import (
	"cmp"
	"fmt"
	"log/slog"
	"os"
	"time"
)

// Config sets the election's name, timing and role of this process. Its zero value means the
// defaults.
type Config struct {
	// Name of the election. Default "leader".
	Name string
	// Holder is the name of this process in status output. Default: host name and process id.
	Holder string
	// Spectator processes never lead; they only observe the election.
	Spectator bool
	// Lease is how long a term lasts without renewal. Default 4 s. Renewals come every quarter of it.
	Lease time.Duration
	// Poll is the longest pause between a follower's polls; the shortest is half of it. Default 300
	// ms.
	Poll time.Duration
	// HoldOff is how long a process does not take a free lease after its duties failed, doubled
	// with each failure up to ten times. Default 5 s. It ends early once no other process has taken
	// the lease for four times Poll.
	HoldOff time.Duration
	// Log receives changes of leadership and errors. Default: discarded.
	Log *slog.Logger
}

func (c Config) withDefaults() Config {
	c.Name = cmp.Or(c.Name, "leader")
	c.Lease = cmp.Or(c.Lease, 4*time.Second)
	c.Poll = cmp.Or(c.Poll, 300*time.Millisecond)
	c.HoldOff = cmp.Or(c.HoldOff, 5*time.Second)
	c.Log = cmp.Or(c.Log, slog.New(slog.DiscardHandler))
	if c.Holder == "" {
		host, _ := os.Hostname() // empty if unknown
		c.Holder = fmt.Sprintf("%s/%d", host, os.Getpid())
	}
	return c
}

// trust is the trust window: how long after the start of a successful renewal the leader may act.
func (c Config) trust() time.Duration { return c.Lease * 3 / 4 }

func (c Config) renewEvery() time.Duration { return c.Lease / 4 }
