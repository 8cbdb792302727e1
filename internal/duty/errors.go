package duty

import (
	"context"
	"log/slog"
	"sync/atomic"
)

// Errors counts, by duty, the errors that duties log, or that Failing notes, and go on with. Such an error ends no term
// and no process: without a count it is seen in the log alone. Its zero value is ready to use.
type Errors struct {
	counts Tally[map[string]*atomic.Int64]
}

// Log returns the log of a duty: its lines have the attribute duty, and those of level ERROR are counted. The count of
// a duty begins with the first call and goes on with later ones, across the terms of a leader.
func (e *Errors) Log(duty string, log *slog.Logger) *slog.Logger {
	var count *atomic.Int64
	e.counts.Add(func(counts *map[string]*atomic.Int64) {
		if *counts == nil {
			*counts = map[string]*atomic.Int64{}
		}
		if count = (*counts)[duty]; count == nil {
			count = new(atomic.Int64)
			(*counts)[duty] = count
		}
	})
	return slog.New(counting{log.Handler(), count}).With("duty", duty)
}

// Counts returns the number of errors of each duty.
func (e *Errors) Counts() map[string]int64 {
	now := map[string]int64{}
	e.counts.Add(func(counts *map[string]*atomic.Int64) {
		for duty, count := range *counts {
			now[duty] = count.Load()
		}
	})
	return now
}

// counting is a handler that counts errors, whether or not the one below it has them written.
type counting struct {
	slog.Handler
	errors *atomic.Int64
}

// countError counts an error of the duty that has the log, without a line.
func countError(log *slog.Logger, level slog.Level) {
	if c, ok := log.Handler().(counting); ok && level >= slog.LevelError {
		c.errors.Add(1)
	}
}

// Enabled implements slog.Handler.
func (c counting) Enabled(ctx context.Context, level slog.Level) bool {
	return level >= slog.LevelError || c.Handler.Enabled(ctx, level)
}

// Handle implements slog.Handler.
func (c counting) Handle(ctx context.Context, r slog.Record) error {
	if r.Level >= slog.LevelError {
		c.errors.Add(1)
	}
	if !c.Handler.Enabled(ctx, r.Level) {
		return nil
	}
	return c.Handler.Handle(ctx, r)
}

// WithAttrs implements slog.Handler.
func (c counting) WithAttrs(attrs []slog.Attr) slog.Handler {
	return counting{c.Handler.WithAttrs(attrs), c.errors}
}

// WithGroup implements slog.Handler.
func (c counting) WithGroup(name string) slog.Handler {
	return counting{c.Handler.WithGroup(name), c.errors}
}
