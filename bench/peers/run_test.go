package peers

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/bench/meter"
	"github.com/penstock/penstock/internal/devpostgres"
)

// TestMain lets the test's own program be a contender's process.
func TestMain(m *testing.M) {
	if len(os.Args) == 4 && os.Args[1] == "child" {
		os.Exit(childMain(os.Args[2], os.Args[3]))
	}
	os.Exit(m.Run())
}

func childMain(dsn, text string) int {
	var step Step
	err := json.Unmarshal([]byte(text), &step)
	if err == nil {
		err = RunChild(context.Background(), &table{}, dsn, step, os.Stdin, os.Stdout)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// table is a contender that pushes rows into a table and deletes them.
// Under a held snapshot it claims more than it deletes, to be caught.
type table struct {
	Contender // what the tests do not call
	conn      *pgx.Conn
}

func (t *table) Setup(ctx context.Context, dsn string, _ Payload) (err error) {
	if t.conn, err = pgx.Connect(ctx, dsn); err != nil {
		return err
	}
	_, err = t.conn.Exec(ctx, `CREATE TABLE IF NOT EXISTS entry (n int)`)
	return err
}

func (t *table) Close() { _ = t.conn.Close(context.Background()) }

func (t *table) BulkPush(ctx context.Context, n, groupSize int) (Work, error) {
	if groupSize > 1 {
		return Work{}, ErrUnsupported
	}
	_, err := t.conn.Exec(ctx, `INSERT INTO entry SELECT generate_series(1, $1)`, n)
	return Work{Entries: n, Seconds: 1}, err
}

func (t *table) DrainSolo(ctx context.Context, tally *Tally) (Work, error) {
	if tally.shared {
		return t.drainTogether(ctx, tally)
	}
	n := int(tally.expected.Load())
	var snapshots int
	err := t.conn.QueryRow(ctx, `SELECT count(*) FROM pg_stat_activity
		WHERE datname = current_database() AND state = 'idle in transaction' AND backend_xid IS NOT NULL`).Scan(&snapshots)
	if err != nil {
		return Work{}, err
	}
	_, err = t.conn.Exec(ctx, `DELETE FROM entry WHERE n <= $1`, n)
	return Work{Entries: n + snapshots, Seconds: 2}, err
}

// drainTogether deletes rows that no other process has locked, until all are gone.
func (t *table) drainTogether(ctx context.Context, tally *Tally) (Work, error) {
	for {
		select {
		case <-tally.Over():
			return Work{Entries: tally.Handled(), Seconds: 2}, nil
		default:
		}
		deleted, err := t.conn.Exec(ctx, `DELETE FROM entry WHERE ctid = ANY (ARRAY(
			SELECT ctid FROM entry LIMIT 10 FOR UPDATE SKIP LOCKED))`)
		if err != nil {
			return Work{}, err
		}
		tally.Add(int(deleted.RowsAffected()))
	}
}

func (t *table) Left(ctx context.Context) (n int, err error) {
	err = t.conn.QueryRow(ctx, `SELECT count(*) FROM entry`).Scan(&n)
	return n, err
}

func newRunner(t *testing.T) *Runner {
	t.Helper()
	server, err := devpostgres.Start(t.Context(), devpostgres.Config{Fast: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = server.Stop(context.Background()) })
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	contender := Command{Name: "table", Args: func(dsn string, step Step) []string {
		text, _ := json.Marshal(step)
		return []string{self, "child", dsn, string(text)}
	}}
	return &Runner{
		Server: server.Config(), Contenders: []Command{contender}, Rounds: 2,
		StepTimeout: time.Minute, Log: slog.New(slog.DiscardHandler),
	}
}

func TestEveryEntryIsAccountedFor(t *testing.T) {
	runner := newRunner(t)
	drain := Scenario{Name: "solo", Fill: 5000, Measured: Step{Verb: "drain", Entries: 4000}}
	groups := Scenario{Name: "groups", Fill: 10, Measured: Step{Verb: "drain", Entries: 10, GroupSize: 5}}

	runs, err := runner.Run(t.Context(), []Scenario{drain, groups})
	if err != nil {
		t.Fatal(err)
	}
	if len(runs) != 4 || runs[0].Unsupported || !runs[3].Unsupported {
		t.Fatalf("got %d runs, want two supported and two not: %+v", len(runs), runs)
	}
	first := runs[0]
	if first.Rate() != 2000 || first.ClientRSSBytes == 0 {
		t.Errorf("rate %v, memory %d; want 2000 entries/s and some memory", first.Rate(), first.ClientRSSBytes)
	}
	// A DELETE of 4,000 rows is one commit, visits each row's page and logs some 50 bytes a row.
	if first.WALBytes < 4000*30 || first.WALBytes > 4000*500 || first.Buffers < 4000 || first.Commits < 1 {
		t.Errorf("the server spent %+v on deleting 4,000 rows", first.Spent)
	}

	drain.Held = true
	if _, err := runner.Run(t.Context(), []Scenario{drain}); err == nil || !strings.Contains(err.Error(), "5000 entries accepted, 4001 finished, 1000 left") {
		t.Errorf("a figure with an entry too many was let through: %v", err)
	}
}

func TestSummaryTakesNearestRank(t *testing.T) {
	var hundred []int
	for i := range 100 {
		hundred = append(hundred, 100-i)
	}
	for _, test := range []struct {
		values []int
		want   Latency
	}{
		{nil, Latency{}},
		{[]int{7}, Latency{P50: 7, P95: 7, P99: 7, Max: 7}},
		{[]int{3, 1, 2}, Latency{P50: 2, P95: 3, P99: 3, Max: 3}},
		{hundred, Latency{P50: 50, P95: 95, P99: 99, Max: 100}},
	} {
		if got := summary(test.values); got != test.want {
			t.Errorf("summary of %d values = %+v, want %+v", len(test.values), got, test.want)
		}
	}
}

func TestTableShowsMediansAndWhatIsNotSupported(t *testing.T) {
	run := func(seconds float64) Run {
		return Run{Scenario: "solo", Contender: "a", Report: Report{Work: Work{Entries: 1000, Seconds: seconds}}, Spent: meter.Spent{WALBytes: 500_000}}
	}
	runs := []Run{run(1), run(4), run(2), {Scenario: "solo", Contender: "b", Report: Report{Unsupported: true}}}

	var out strings.Builder
	err := WriteTable(&out, []Scenario{{Name: "solo", About: "x"}}, []Command{{Name: "a", Version: "1.0"}, {Name: "b"}}, runs)
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(out.String(), "\n")
	if fields := strings.Fields(lines[3]); fields[0] != "a" || fields[2] != "500" || fields[3] != "250" || fields[4] != "1000" || fields[7] != "500" {
		t.Errorf("row of a is %q, want median 500, min 250, max 1000 and 500 B of WAL", lines[3])
	}
	if !strings.Contains(lines[4], "not supported") {
		t.Errorf("row of b is %q", lines[4])
	}
}

func TestPickUpsOfAnInferenceQueueAreComparedInTheSameRun(t *testing.T) {
	run := func(contender string, latency, fromPush Latency) Run {
		return Run{Scenario: "pickup", Contender: contender, Latency: latency, FromPush: fromPush}
	}
	var out strings.Builder
	err := WriteTargets(&out, []Run{
		run("penstock-inference", Latency{P50: 900, P99: 4000}, Latency{P50: 1500, P99: 4500}),
		run("graphile", Latency{P50: 1000, P99: 2000}, Latency{P50: 2000, P99: 3000}),
	})
	if err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	want := []string{"0.90  reached", "2.00  missed", "0.75  reached", "1.50  missed"}
	if len(lines) != 1+len(want) {
		t.Fatalf("want %d lines below the heading:\n%s", len(want), out.String())
	}
	for i, end := range want {
		if !strings.HasSuffix(lines[1+i], end) {
			t.Errorf("line %d is %q, want one that ends with %q", 1+i, lines[1+i], end)
		}
	}
}

func TestTargetsAreJudgedByMedians(t *testing.T) {
	run := func(scenario, contender string, seconds float64) Run {
		return Run{Scenario: scenario, Contender: contender, Report: Report{Work: Work{Entries: 1000, Seconds: seconds}}}
	}
	runs := []Run{
		run("solo", "penstock", 1), run("solo", "penstock", 0.1), run("solo", "penstock", 1), run("solo", "river", 2), run("solo", "graphile", 1.2),
		{Scenario: "groups", Contender: "graphile", Report: Report{Unsupported: true}},
		run("groups", "penstock", 1),
	}
	var out strings.Builder
	if err := WriteTargets(&out, runs); err != nil {
		t.Fatal(err)
	}
	lines := strings.Split(strings.TrimSpace(out.String()), "\n")
	if len(lines) != 3 || !strings.HasSuffix(lines[1], "1.20  missed") || !strings.HasSuffix(lines[2], "2.00  reached") {
		t.Errorf("want 1.20 x graphile-worker missed and 2.00 x River reached, and nothing of what was not run:\n%s", out.String())
	}
}

func TestProcessesShareADrain(t *testing.T) {
	runner := newRunner(t)
	runner.Contenders[0].Processes, runner.Rounds = 3, 1
	drain := Scenario{Name: "solo", Fill: 3001, Measured: Step{Verb: "drain", Entries: 3001}}
	push := Scenario{Name: "bulk", Measured: Step{Verb: "push", Entries: 10}}

	runs, err := runner.Run(t.Context(), []Scenario{push, drain})
	if err != nil {
		t.Fatal(err)
	}
	if len(runs) != 1 || runs[0].Entries != 3001 || runs[0].Seconds != 2 {
		t.Fatalf("got %+v, want the drain alone, with all 3,001 entries in 2 s", runs)
	}
	const oneProcess = 5 << 20 // bytes, of any Go program with a connection
	if runs[0].ClientRSSBytes < 3*oneProcess {
		t.Errorf("three processes had %d bytes of memory", runs[0].ClientRSSBytes)
	}
}
