package server

import (
	"cmp"
	"log/slog"
	"os"
	"time"
)

// Config says how much a worker takes at once and how long it remembers. Its zero value is useful.
type Config struct {
	Slots        int           // runs at once; 2
	DirectQueue  int           // direct callers that may wait; 10
	BodyBytes    int64         // largest request body; 1 MiB
	Keep         time.Duration // how long an asynchronous result can be fetched; 10 min
	KeepRuns     int           // and how many of them, the oldest go first; 4096
	FenceEntries int           // how many entries' tokens are remembered, at least; 100,000
	Linger       time.Duration // how long Drain waits for results that nobody has fetched yet; 5 s

	Async       []string // models that always answer with a job id
	Faults      Faults   // delays and faults from the start
	AllowFaults bool     // whether /faults may change them
	Seed        uint64   // of the faults' dice

	Exit func(code int) // what a crash calls; os.Exit
	Log  *slog.Logger   // slog.Default
}

func (c Config) withDefaults() Config {
	c.Slots = cmp.Or(c.Slots, 2)
	c.DirectQueue = cmp.Or(c.DirectQueue, 10)
	c.BodyBytes = cmp.Or(c.BodyBytes, 1<<20)
	c.Keep = cmp.Or(c.Keep, 10*time.Minute)
	c.KeepRuns = cmp.Or(c.KeepRuns, 4096)
	c.FenceEntries = cmp.Or(c.FenceEntries, 100_000)
	c.Linger = cmp.Or(c.Linger, 5*time.Second)
	c.Log = cmp.Or(c.Log, slog.Default())
	if c.Exit == nil {
		c.Exit = os.Exit
	}
	return c
}
