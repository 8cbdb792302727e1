package election

import (
	"cmp"
	"fmt"
	"log/slog"
	"os"
	"time"
)

// Config says how to take part in an election. Its zero value means the defaults.
type Config struct {
	// Name of the election. Default "leader".
	Name string
	// Holder is what people read about this process. Default: host name and process id.
	Holder string
	// Spectator never leads; it only watches who does.
	Spectator bool
	// Lease is how long a term lasts without renewal. Default 4 s. Renewals come every quarter of it.
	Lease time.Duration
	// Poll is the longest pause between a follower's looks; the shortest is half of it. Default 300 ms.
	Poll time.Duration
	// HoldOff is how long a process stands back after its duties failed, doubled each time up to ten times as
	// long. Default 5 s. It ends early once nobody else has taken the lease for four times Poll.
	HoldOff time.Duration
	// Log is where changes and errors go. Default: nowhere.
	Log *slog.Logger
}

func (c Config) withDefaults() Config {
	c.Name = cmp.Or(c.Name, "leader")
	c.Lease = cmp.Or(c.Lease, 4*time.Second)
	c.Poll = cmp.Or(c.Poll, 300*time.Millisecond)
	c.HoldOff = cmp.Or(c.HoldOff, 5*time.Second)
	c.Log = cmp.Or(c.Log, slog.New(slog.DiscardHandler))
	if c.Holder == "" {
		host, _ := os.Hostname() // empty is as good as unknown
		c.Holder = fmt.Sprintf("%s/%d", host, os.Getpid())
	}
	return c
}

// trust is how long after the start of a renewal the leader believes in it.
func (c Config) trust() time.Duration { return c.Lease * 3 / 4 }

func (c Config) renewEvery() time.Duration { return c.Lease / 4 }
