package main

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
	"github.com/penstock/penstock/pkg/tasknode"
)

// phase is one measurement of the bench.
type phase struct {
	Phase     string  `json:"phase"`
	Entries   int     `json:"entries"`
	Seconds   float64 `json:"seconds"`
	PerSecond float64 `json:"per_second"`
	P50MS     float64 `json:"p50_ms,omitempty"` // of one statement
	P99MS     float64 `json:"p99_ms,omitempty"`
}

func newPhase(name string, entries int, took time.Duration, each []time.Duration) phase {
	p := phase{Phase: name, Entries: entries, Seconds: took.Seconds(), PerSecond: float64(entries) / took.Seconds()}
	if len(each) > 0 {
		slices.Sort(each)
		p.P50MS = each[len(each)/2].Seconds() * 1000
		p.P99MS = each[min(len(each)-1, len(each)*99/100)].Seconds() * 1000
	}
	return p
}

const benchHelp = `Measure what this database and this machine do: push entries one by one and in batches, and drain them with one task
node whose handler does nothing. It makes a queue of its own, bench_<random>, and drops it at the end; other queues are
left alone, but they share the machine. For comparisons over time; the repository's bench/ measures against other queues.`

func benchCommand(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "bench", Short: "A short measurement: single pushes, bulk pushes, drain", Long: benchHelp,
		Args: cobra.NoArgs,
	}
	var n, single, batch int
	var yes bool
	flags := c.Flags()
	flags.IntVar(&n, "entries", 20_000, "entries to push in batches and drain, at most a million")
	flags.IntVar(&single, "single", 500, "entries to push one by one")
	flags.IntVar(&batch, "batch", 1000, "entries a batch")
	flags.BoolVarP(&yes, "yes", "y", false, "do not ask")
	c.RunE = func(c *cobra.Command, _ []string) error {
		if n < 1 || n > 1_000_000 || single < 1 || single > 1_000_000 || batch < 1 || batch > 10_000 {
			return usagef("want 1 to 1,000,000 entries, and batches of 1 to 10,000")
		}
		if !yes {
			if err := a.confirm(change{
				does:   "load the database for some seconds",
				detail: fmt.Sprintf("%d entries in a queue of its own", n+single),
			}); err != nil {
				return err
			}
		}
		phases, err := a.bench(c.Context(), n, single, batch)
		if err != nil {
			return err
		}
		return printList(a, []column[phase]{
			{title: "PHASE", text: func(p phase) string { return p.Phase }},
			{title: "ENTRIES", right: true, text: func(p phase) string { return fmt.Sprint(p.Entries) }},
			{title: "SECONDS", right: true, text: func(p phase) string { return fmt.Sprintf("%.2f", p.Seconds) }},
			{title: "PER SECOND", right: true, text: func(p phase) string { return fmt.Sprintf("%.0f", p.PerSecond) }},
			{title: "P50 MS", right: true, text: func(p phase) string { return milliseconds(p.P50MS) }},
			{title: "P99 MS", right: true, text: func(p phase) string { return milliseconds(p.P99MS) }},
		}, phases)
	}
	return c
}

func milliseconds(ms float64) string {
	if ms == 0 {
		return "-"
	}
	return fmt.Sprintf("%.2f", ms)
}

// bench measures in a queue of its own, which it drops whatever happens.
func (a *app) bench(ctx context.Context, n, single, batch int) (phases []phase, err error) {
	db, err := a.database(ctx)
	if err != nil {
		return nil, err
	}
	name := "bench_" + strings.ToLower(rand.Text()[:8])
	by := invalidation.By{Actor: a.actor, Reason: "penstock bench"}
	ops := operator.New(db)
	// An application of its own keeps other nodes away; outcomes are not kept.
	if err := ops.CreateQueue(ctx, name, map[string]any{"application": name, "result_retention": "0"},
		by); err != nil {
		return nil, err
	}
	defer func() {
		late, cancel := context.WithTimeout(context.WithoutCancel(ctx), 30*time.Second)
		defer cancel()
		if dropped := ops.DropQueue(late, name, true, by); dropped != nil && err == nil {
			err = fmt.Errorf("%w; drop it by hand: penstock queue drop %s --force", dropped, name)
		}
	}()
	q, err := invalidation.Open(ctx, db, name)
	if err != nil {
		return nil, err
	}
	for _, step := range []struct {
		name       string
		total, per int
	}{{"push, one by one", single, 1}, {"push, batches", n, batch}} {
		p, err := benchPush(ctx, q, step.name, step.total, step.per)
		if err != nil {
			return nil, err
		}
		phases = append(phases, p)
	}
	drained, err := benchDrain(ctx, db, name, single+n)
	return append(phases, drained), err
}

func benchPush(ctx context.Context, q *invalidation.Queue, name string, total, per int) (phase, error) {
	batch := make([]invalidation.Push, per)
	for i := range batch {
		batch[i].Payload = json.RawMessage(`{"bench": true}`)
	}
	var each []time.Duration
	start := time.Now()
	for left := total; left > 0; left -= per {
		began := time.Now()
		if _, err := q.Push(ctx, batch[:min(per, left)]...); err != nil {
			return phase{}, err
		}
		each = append(each, time.Since(began))
	}
	return newPhase(name, total, time.Since(start), each), nil
}

// benchDrain runs a task node until it has ended every entry.
func benchDrain(ctx context.Context, db postgres.DB, name string, total int) (phase, error) {
	node := tasknode.New(tasknode.Config{Name: name, Application: name, Log: slog.New(slog.DiscardHandler)}, db, db)
	node.Handle(name, invalidation.HandlerFunc(func(context.Context, *invalidation.Run) (json.RawMessage,
		error,
	) {
		return nil, nil
	}))
	running, stop := context.WithCancel(ctx)
	defer stop()
	ended := make(chan error, 1)
	start := time.Now()
	go func() { ended <- node.Run(running) }()
	var took time.Duration
	for ticker := time.NewTicker(2 * time.Millisecond); took == 0; {
		select {
		case err := <-ended:
			if err == nil {
				err = ctx.Err()
			}
			return phase{}, fmt.Errorf("drain %d entries, %d are done: %w", total, node.Stats().Settled.Load(), err)
		case <-ticker.C:
			if node.Stats().Settled.Load() >= int64(total) {
				took = time.Since(start)
				ticker.Stop()
			}
		}
	}
	stop()
	return newPhase("drain", total, took, nil), <-ended
}
