package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"os/exec"
	"text/tabwriter"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/schollz/progressbar/v3"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// sample is one line of `worker samples --jsonl`: a real picture or text.
type sample struct {
	Model   string          `json:"model"`
	Payload json.RawMessage `json:"payload"`
}

// work pushes the first batch, shows how it goes and what came of it, and then keeps work flowing.
func (p *platform) work(ctx context.Context, o devOptions) error {
	samples, err := readSamples(ctx, o.entries)
	if err != nil {
		return err
	}
	ids, err := p.pushAll(ctx, samples)
	if err != nil {
		return err
	}
	start := time.Now()
	if err := p.await(ctx, ids, start); err != nil {
		return err
	}
	if err := p.report(ctx, ids, time.Since(start)); err != nil || o.once {
		return err
	}
	fmt.Fprintln(p.out, "\nCtrl-C stops everything. Kill any of the processes and watch.")
	if o.every <= 0 {
		<-ctx.Done()
		return nil
	}
	return p.trickle(ctx, samples, o.every)
}

func readSamples(ctx context.Context, n int) ([]sample, error) {
	path, err := beside("worker")
	if err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, path, "samples", "--jsonl", "--count", fmt.Sprint(n)) //nolint:gosec // ours
	text, err := cmd.Output()
	if err != nil {
		return nil, fmt.Errorf("make samples: %w", err)
	}
	var samples []sample
	for lines := json.NewDecoder(bytes.NewReader(text)); lines.More(); {
		var s sample
		if err := lines.Decode(&s); err != nil {
			return nil, fmt.Errorf("read samples: %w", err)
		}
		samples = append(samples, s)
	}
	if len(samples) == 0 {
		return nil, fmt.Errorf("make samples: %s made none", path)
	}
	return samples, nil
}

// pushAll pushes the samples: every fifth text belongs to a group, every tenth entry is urgent, every twentieth not
// due for three seconds, and three are such that the worker must refuse them.
func (p *platform) pushAll(ctx context.Context, samples []sample) ([]int64, error) {
	pushes := map[string][]invalidation.Push{}
	urgent := int16(9)
	for i, s := range samples {
		push := invalidation.Push{Payload: s.Payload, Flow: fmt.Sprintf("tenant-%d", i%3)}
		switch {
		case s.Model == "language" && i%5 == 0:
			push.LockKey = fmt.Sprintf("document-%d", i%4)
		case i%10 == 3:
			push.Priority = &urgent
		case i%20 == 7:
			push.DueAt = time.Now().Add(3 * time.Second)
		}
		pushes[s.Model] = append(pushes[s.Model], push)
	}
	for range 3 {
		pushes["faces"] = append(pushes["faces"],
			invalidation.Push{Name: "broken", Payload: json.RawMessage(`{"image": "no picture"}`)})
	}
	var ids []int64
	for model, list := range pushes {
		q, err := invalidation.Open(ctx, p.pool, p.queues[model])
		if err != nil {
			return nil, err
		}
		pushed, err := q.Push(ctx, list...)
		if err != nil {
			return nil, err
		}
		for _, one := range pushed {
			ids = append(ids, int64(one.ID))
		}
	}
	fmt.Fprintf(p.out, "pushed %d entries: grouped, urgent, delayed and three that must fail\n", len(ids))
	return ids, nil
}

// endedSQL counts which of entries $1 have ended.
const endedSQL = `
SELECT (SELECT count(*) FROM penstock.result WHERE entry_id = ANY ($1::bigint[])),
       (SELECT count(*) FROM penstock.failure WHERE entry_id = ANY ($1::bigint[]))`

// await shows progress until every entry has ended: a bar on a terminal, a line every two seconds elsewhere.
func (p *platform) await(ctx context.Context, ids []int64, start time.Time) error {
	bar := progressbar.NewOptions(len(ids), progressbar.OptionSetWriter(p.out),
		progressbar.OptionSetDescription("entries"),
		progressbar.OptionSetWidth(40), progressbar.OptionShowCount(), progressbar.OptionClearOnFinish(),
		progressbar.OptionSetVisibility(terminal(p.out)))
	shown := time.Now()
	for tick := time.NewTicker(100 * time.Millisecond); ; {
		var done, failed int64
		if err := p.pool.QueryRow(ctx, endedSQL, ids).Scan(&done, &failed); err != nil {
			return fmt.Errorf("count outcomes: %w", err)
		}
		if !terminal(p.out) && time.Since(shown) > 2*time.Second {
			shown = time.Now()
			fmt.Fprintf(p.out, "%5.1f s  %d of %d entries have ended\n", time.Since(start).Seconds(), done+failed,
				len(ids))
		}
		if err := bar.Set64(done + failed); err != nil {
			return fmt.Errorf("show progress: %w", err)
		}
		if done+failed == int64(len(ids)) {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
	}
}

// reportSQL is some outcomes of entries $1, two of each kind.
const reportSQL = `
SELECT name, entry_id, outcome, detail FROM (
    SELECT q.name, r.entry_id, r.outcome::text, coalesce(left(r.result::text, 90), '') AS detail,
           row_number() OVER (PARTITION BY r.queue_id, r.outcome ORDER BY length(r.result::text) DESC, r.entry_id) AS n
      FROM penstock.result r JOIN penstock.queue q ON q.id = r.queue_id WHERE r.entry_id = ANY ($1::bigint[])
    UNION ALL
    SELECT q.name, f.entry_id, 'failed', left(f.error, 90), row_number() OVER (ORDER BY f.entry_id)
      FROM penstock.failure f JOIN penstock.queue q ON q.id = f.queue_id WHERE f.entry_id = ANY ($1::bigint[])) x
 WHERE n <= 3
 ORDER BY outcome, name, entry_id`

func (p *platform) report(ctx context.Context, ids []int64, took time.Duration) error {
	var done, failed int64
	if err := p.pool.QueryRow(ctx, endedSQL, ids).Scan(&done, &failed); err != nil {
		return fmt.Errorf("count outcomes: %w", err)
	}
	fmt.Fprintf(p.out, "\n%d accepted = %d done + %d failed, in %.1f s\n\n", len(ids), done, failed, took.Seconds())
	table := tabwriter.NewWriter(p.out, 0, 4, 2, ' ', 0)
	fmt.Fprintln(table, "queue\tentry\toutcome\tresult or error")
	var queue, outcome, detail string
	var id int64
	_, err := pgx.ForEachRow(postgres.Query(ctx, p.pool, reportSQL, ids), []any{&queue, &id, &outcome, &detail},
		func() error {
			_, err := fmt.Fprintf(table, "%s\t%d\t%s\t%s\n", queue, id, outcome, detail)
			return err
		})
	if err != nil {
		return fmt.Errorf("read outcomes: %w", err)
	}
	return table.Flush()
}

// trickle pushes one more entry after the other until ctx ends.
func (p *platform) trickle(ctx context.Context, samples []sample, every time.Duration) error {
	tick := time.NewTicker(every)
	defer tick.Stop()
	for i := 0; ; i++ {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		s := samples[i%len(samples)]
		q, err := invalidation.Open(ctx, p.pool, p.queues[s.Model])
		if err == nil {
			_, err = q.Push(ctx, invalidation.Push{Payload: s.Payload})
		}
		if err != nil && ctx.Err() == nil {
			fmt.Fprintln(p.out, err)
		}
	}
}
