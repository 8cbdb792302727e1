package peers

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/url"
	"slices"
	"strconv"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/bench/meter"
)

// Command starts a contender's process for a step against a database; see child.go for what it must say.
type Command struct {
	Name, Version string
	Processes     int // that share each drain, and push and work at once; 0 is 1
	Args          func(dsn string, step Step) []string
}

// Run is the outcome of one scenario for one contender in one round.
type Run struct {
	Scenario  string `json:"scenario"`
	Contender string `json:"contender"`
	Round     int    `json:"round"`
	Report
	meter.Spent
	Latency     Latency `json:"latency"`
	FromPush    Latency `json:"from_push"`
	OthersShare float64 `json:"others_share"` // of the machine's CPU time, taken by neither client nor server
}

// Latency sums up the latencies of a run, in microseconds; all zero where none were taken.
type Latency struct {
	P50 int `json:"p50_us"`
	P95 int `json:"p95_us"`
	P99 int `json:"p99_us"`
	Max int `json:"max_us"`
}

// summary takes the percentile p as the smallest value that at least a share p of values do not exceed.
func summary(values []int) Latency {
	if len(values) == 0 {
		return Latency{}
	}
	sorted := slices.Sorted(slices.Values(values))
	at := func(percent int) int { return sorted[(len(sorted)*percent+99)/100-1] }
	return Latency{P50: at(50), P95: at(95), P99: at(99), Max: at(100)}
}

// Runner runs scenarios on one server that does nothing else.
type Runner struct {
	Server      *pgx.ConnConfig // its superuser, any database
	Contenders  []Command
	Rounds      int
	StepTimeout time.Duration
	Log         *slog.Logger
}

// Run measures each scenario for all contenders in turn, A B A B, so that what the machine does meanwhile
// meets them alike. Every measurement gets a new database. One that fails does not keep the others from running.
func (r *Runner) Run(ctx context.Context, scenarios []Scenario) (runs []Run, err error) {
	for _, scenario := range scenarios {
		for round := range r.Rounds {
			for _, contender := range r.Contenders {
				if contender.Processes > 1 && !scenario.Measured.shareable() {
					continue
				}
				run, failed := r.measure(ctx, scenario, contender)
				if failed != nil {
					failed = fmt.Errorf("%s of %s, round %d: %w", scenario.Name, contender.Name, round+1, failed)
					r.Log.Error("not measured", "err", failed)
					err = errors.Join(err, failed)
					if ctx.Err() != nil {
						return runs, err
					}
					continue
				}
				run.Scenario, run.Contender, run.Round = scenario.Name, contender.Name, round+1
				r.Log.Info("measured", "scenario", scenario.Name, "contender", contender.Name, "round", run.Round,
					"entries", run.Entries, "seconds", run.Seconds, "unsupported", run.Unsupported)
				runs = append(runs, run)
			}
		}
	}
	return runs, err
}

const database = "bench"

func (r *Runner) measure(ctx context.Context, scenario Scenario, contender Command) (run Run, err error) {
	admin, err := pgx.ConnectConfig(ctx, r.Server.Copy())
	if err != nil {
		return run, fmt.Errorf("connect: %w", err)
	}
	defer admin.Close(ctx)
	for _, sql := range []string{`DROP DATABASE IF EXISTS bench WITH (FORCE)`, `CREATE DATABASE bench`, `CHECKPOINT`} {
		if _, err := admin.Exec(ctx, sql); err != nil {
			return run, fmt.Errorf("prepare database: %w", err)
		}
	}
	m, err := meter.New(ctx, admin)
	if err != nil {
		return run, err
	}
	trial := trial{runner: r, contender: contender, meter: m}

	if scenario.Fill > 0 {
		fill := scenario.Measured
		fill.Verb, fill.Entries = "push", scenario.Fill
		if run, err = trial.step(ctx, fill); err != nil || run.Unsupported {
			return run, err
		}
	}
	other, err := r.analyzed(ctx)
	if err != nil {
		return run, err
	}
	defer other.Close(ctx)
	if scenario.Held {
		if _, err := other.Exec(ctx, `BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT pg_current_xact_id()`); err != nil {
			return run, fmt.Errorf("hold a snapshot: %w", err)
		}
	}
	if run, err = trial.step(ctx, scenario.Measured); err != nil || run.Unsupported {
		return run, err
	}
	return run, trial.check(ctx, scenario, run)
}

// analyzed gives the planner statistics, which autovacuum would do at a moment of its own choosing.
func (r *Runner) analyzed(ctx context.Context) (*pgx.Conn, error) {
	config := r.Server.Copy()
	config.Database = database
	config.RuntimeParams["application_name"] = meter.Bystander
	conn, err := pgx.ConnectConfig(ctx, config)
	if err != nil {
		return nil, fmt.Errorf("connect: %w", err)
	}
	if _, err := conn.Exec(ctx, `ANALYZE`); err != nil {
		return nil, errors.Join(fmt.Errorf("analyze: %w", err), conn.Close(ctx))
	}
	return conn, nil
}

// trial is one contender in one new database.
type trial struct {
	runner    *Runner
	contender Command
	meter     *meter.Meter
}

// check refuses a figure whose entries are not accounted for: all that were accepted are finished or still there.
func (t *trial) check(ctx context.Context, scenario Scenario, run Run) error {
	accepted, finished := scenario.Fill, run.Entries
	switch scenario.Measured.Verb {
	case "push", "single":
		accepted, finished = run.Entries, 0
	case "sustained", "pickup":
		accepted = run.Entries
	}
	left, err := t.step(ctx, Step{Verb: "left"})
	if err != nil {
		return err
	}
	if accepted != finished+left.Entries {
		return fmt.Errorf("%d entries accepted, %d finished, %d left", accepted, finished, left.Entries)
	}
	return nil
}

// step runs a process of the contender, or several that share the step, between two readings of the meter.
func (t *trial) step(ctx context.Context, step Step) (Run, error) {
	ctx, cancel := context.WithTimeout(ctx, t.runner.StepTimeout)
	defer cancel()
	if step.Verb == "pickup" {
		worker, err := newInstantWorker(ctx, step.Entries)
		if err != nil {
			return Run{}, err
		}
		defer worker.server.Close()
		step.Worker = worker.url
	}
	n := 1
	if step.shareable() {
		n = max(1, t.contender.Processes)
	}
	started, err := startProcesses(ctx, t.contender, t.runner.dsn(), step, n)
	var run Run
	if err == nil {
		run, err = t.measure(ctx, started)
	}
	if err != nil {
		cancel()
	}
	if waitErr := started.wait(); waitErr != nil {
		return Run{}, fmt.Errorf("%s: %w", step.Verb, errors.Join(err, waitErr))
	}
	return run, err
}

// measure reads the meters before and after the step, which the processes do meanwhile.
func (t *trial) measure(ctx context.Context, started *processes) (run Run, err error) {
	before, err := t.meter.Read(ctx, database)
	if err != nil {
		return run, err
	}
	if run.Report, err = started.work(); err != nil {
		return run, err
	}
	run.Latency, run.FromPush = summary(run.LatencyMicros), summary(run.FromPushMicros)
	run.LatencyMicros, run.FromPushMicros = nil, nil
	if err := t.meter.Settle(ctx, database); err != nil {
		return run, err
	}
	after, err := t.meter.Read(ctx, database)
	run.Spent = after.Since(before)
	run.OthersShare = after.OthersShare(before, run.ClientCPUSeconds)
	return run, err
}

// dsn names the bench database in the form that both pgx and node-postgres read.
func (r *Runner) dsn() string {
	query := url.Values{"host": {r.Server.Host}, "port": {strconv.Itoa(int(r.Server.Port))}, "user": {r.Server.User}}
	return "postgres:///" + database + "?" + query.Encode()
}
