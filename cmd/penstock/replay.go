package main

import (
	"bufio"
	"context"
	"encoding/csv"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"github.com/penstock/penstock/pkg/invalidation"
)

const replayHelp = `Push the requests of a recorded trace at the pace at which they were made: one entry for each row
of FILE (- for standard input), which is CSV with a line of titles, or JSON objects, one a line. The whole row is the
payload; columns have the time, the flow, the lock key and the cost. Rows are in the order of time; a row that is
earlier than the one before it is pushed at once.`

// trace has the names of the columns of a recorded row.
type trace struct {
	at, flow, lockKey, cost string
	speed                   float64
	limit                   int
}

func replayCommand(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "replay QUEUE FILE", Short: "Push the requests of a recorded trace, at its own pace or faster",
		Long: replayHelp,
		Args: cobra.ExactArgs(2), ValidArgsFunction: a.completeQueues(),
		Example: "  penstock replay thumbnails requests.csv --at created --flow tenant --speed 10\n  penstock " +
			"replay thumbnails requests.csv --at created --dry-run",
	}
	var t trace
	var dry bool
	flags := c.Flags()
	flags.StringVar(&t.at, "at", "at", "column with the time: RFC 3339, 2006-01-02 15:04:05, or seconds")
	flags.StringVar(&t.flow, "flow", "", "column with the flow")
	flags.StringVar(&t.lockKey, "lock-key", "", "column with the lock key")
	flags.StringVar(&t.cost, "cost", "", "column with the cost")
	flags.Float64Var(&t.speed, "speed", 1, "so many times as fast as recorded; 0: as fast as it goes")
	flags.IntVar(&t.limit, "limit", 0, "rows at most; 0: all")
	flags.BoolVar(&dry, "dry-run", false, "read the trace and say what is in it")
	c.RunE = func(c *cobra.Command, args []string) error {
		if t.speed < 0 || t.limit < 0 {
			return usagef("--speed and --limit want 0 or more")
		}
		source := a.in
		if args[1] != "-" {
			file, err := os.Open(args[1])
			if err != nil {
				return fmt.Errorf("read trace: %w", err)
			}
			defer file.Close()
			source = file
		}
		if dry {
			return a.readTrace(c.Context(), t, source)
		}
		return a.replay(c.Context(), t, source, args[0])
	}
	return c
}

// readTrace reads a trace, pushes nothing, and prints what is in it.
func (a *app) readTrace(ctx context.Context, t trace, source io.Reader) error {
	t.speed = 0
	none := func(context.Context, ...invalidation.Push) error { return nil }
	report, err := t.replay(ctx, bufio.NewReader(source), none)
	if err != nil {
		return err
	}
	return printOne(a, report, func(w io.Writer) { fmt.Fprintln(w, report.recorded()) })
}

// replay pushes the entries of a trace to a queue. An error says how many were pushed before it.
func (a *app) replay(ctx context.Context, t trace, source io.Reader, queue string) error {
	api, err := a.connect(ctx)
	if err != nil {
		return err
	}
	bar := a.progress(-1, "replay")
	defer bar.end()
	pushed := int64(0)
	push := func(ctx context.Context, pushes ...invalidation.Push) error {
		entries := make([]newEntry, len(pushes)) // without times
		for i, p := range pushes {
			entries[i].Push = p
		}
		_, err := api.push(ctx, queue, entries...)
		if err == nil {
			pushed += int64(len(pushes))
		}
		bar.set(pushed)
		return err
	}
	report, err := t.replay(ctx, bufio.NewReader(source), push)
	if err != nil && pushed > 0 {
		err = partialError{fmt.Errorf("%w; %d entries were pushed before", err, pushed)}
	}
	if err != nil {
		return err
	}
	return printOne(a, report, func(w io.Writer) {
		fmt.Fprintf(w, "%s, pushed in %s, at most %s late\n", report.recorded(), age(report.TookSeconds),
			age(report.LateSeconds))
	})
}

// replayed is the report of a replay.
type replayed struct {
	Entries         int     `json:"entries"`
	Flows           int     `json:"flows"`
	RecordedSeconds float64 `json:"recorded_seconds"`
	TookSeconds     float64 `json:"took_seconds"`
	LateSeconds     float64 `json:"late_seconds"` // how far a push was behind its time, at most
}

// recorded says what is in the trace.
func (r replayed) recorded() string {
	return fmt.Sprintf("%d entries of %d flows, recorded over %s", r.Entries, r.Flows, age(r.RecordedSeconds))
}

// replay pushes the rows of a trace when they are due. Rows that are due together go in one statement.
func (t trace) replay(ctx context.Context, source *bufio.Reader,
	push func(context.Context, ...invalidation.Push) error,
) (replayed, error) {
	var report replayed
	next, err := rows(source)
	if err != nil {
		return report, err
	}
	start, flows := time.Now(), map[string]bool{}
	var first time.Time
	var due time.Time // of the oldest row in the batch
	var batch []invalidation.Push
	flush := func() error {
		if len(batch) == 0 {
			return nil
		}
		if err := push(ctx, batch...); err != nil {
			return err
		}
		report.Entries += len(batch)
		if t.speed > 0 {
			report.LateSeconds = max(report.LateSeconds, time.Since(due).Seconds())
		}
		batch = batch[:0]
		return nil
	}
	for n := 1; t.limit == 0 || n <= t.limit; n++ {
		row, err := next()
		if errors.Is(err, io.EOF) {
			break
		}
		var p invalidation.Push
		var at time.Time
		if err == nil {
			p, at, err = t.read(row)
		}
		if err != nil {
			return report, usagef("row %d: %w", n, err)
		}
		if first.IsZero() {
			first = at
		}
		flows[p.Flow] = true
		report.RecordedSeconds = max(report.RecordedSeconds, at.Sub(first).Seconds())
		on := start
		if t.speed > 0 {
			on = start.Add(time.Duration(float64(at.Sub(first)) / t.speed))
		}
		if time.Until(on) > 0 || len(batch) == pushBatch {
			if err := flush(); err != nil {
				return report, err
			}
		}
		select {
		case <-ctx.Done():
			return report, ctx.Err()
		case <-time.After(time.Until(on)):
		}
		if len(batch) == 0 {
			due = on
		}
		batch = append(batch, p)
	}
	err = flush()
	report.Flows, report.TookSeconds = len(flows), time.Since(start).Seconds()
	return report, err
}

// read turns a row into a push, and says when it came.
func (t trace) read(row map[string]any) (p invalidation.Push, at time.Time, err error) {
	text := func(column string) string {
		if v := row[column]; column != "" && v != nil {
			return fmt.Sprint(v)
		}
		return ""
	}
	p.Flow, p.LockKey = text(t.flow), text(t.lockKey)
	if cost := text(t.cost); cost != "" {
		if p.Cost, err = strconv.ParseFloat(cost, 64); err != nil {
			return p, at, fmt.Errorf("column %s is %q: want a number", t.cost, cost)
		}
	}
	if p.Payload, err = json.Marshal(row); err != nil {
		return p, at, err
	}
	at, err = instant(text(t.at))
	if err != nil {
		err = fmt.Errorf("column %s is %q: want RFC 3339, 2006-01-02 15:04:05, or seconds; --at names the column", t.at,
			text(t.at))
	}
	return p, at, err
}

func instant(text string) (time.Time, error) {
	if seconds, err := strconv.ParseFloat(text, 64); err == nil {
		return time.UnixMicro(int64(seconds * 1e6)), nil
	}
	if at, err := time.Parse(time.RFC3339, text); err == nil {
		return at, nil
	}
	return time.Parse(time.DateTime, text)
}

// rows reads CSV, or JSON objects if the first byte is a brace, and returns what reads the next row.
func rows(source *bufio.Reader) (next func() (map[string]any, error), err error) {
	head, err := source.Peek(1)
	if err != nil {
		return nil, usagef("the trace is empty")
	}
	if head[0] == '{' {
		decoder := json.NewDecoder(source)
		decoder.UseNumber()
		return func() (row map[string]any, err error) { err = decoder.Decode(&row); return row, err }, nil
	}
	reader := csv.NewReader(source)
	titles, err := reader.Read()
	if err != nil {
		return nil, usagef("the line of titles: %v", err)
	}
	return func() (map[string]any, error) {
		fields, err := reader.Read()
		if err != nil {
			return nil, err
		}
		row := make(map[string]any, len(titles))
		for i, title := range titles {
			row[strings.TrimSpace(title)] = cell(fields[i])
		}
		return row, nil
	}, nil
}

// cell is a number if it reads as JSON writes one, null if it is empty, else text.
func cell(text string) any {
	var number json.Number
	if text = strings.TrimSpace(text); text == "" {
		return nil
	} else if json.Unmarshal([]byte(text), &number) == nil && text[0] != '"' {
		return number
	}
	return text
}
