package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
	"unicode"

	"github.com/jackc/pgx/v5/pgconn"
	"github.com/spf13/cobra"
	"go.yaml.in/yaml/v3"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/migrations"
	"github.com/penstock/penstock/pkg/client"
	"github.com/penstock/penstock/pkg/doctor"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
)

var noon = time.Date(2026, 11, 21, 12, 0, 0, 0, time.UTC)

// fake is an API with fixed content, as far as the tests need one.
type fake struct {
	snapshots []*operator.Snapshot
	pushed    []invalidation.Push
	refuse    int // the push with this number fails, from 1
	pushes    int
	done      []string
}

func (f *fake) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /v1/queues", func(w http.ResponseWriter, _ *http.Request) {
		writeAnswer(w, http.StatusOK, listed[operator.Queue]{Items: queuesNow()})
	})
	mux.HandleFunc("GET /v1/queues/{queue}", func(w http.ResponseWriter, r *http.Request) {
		for _, q := range queuesNow() {
			if q.Name == r.PathValue("queue") {
				writeAnswer(w, http.StatusOK, operator.QueueDetail{Queue: q})
				return
			}
		}
		writeAnswer(w, http.StatusNotFound, client.Error{Code: client.QueueNotFound, Detail: "there is no such queue"})
	})
	mux.HandleFunc("POST /v1/queues/{queue}/pause", func(w http.ResponseWriter, r *http.Request) {
		var in struct {
			Reason string
			Until  string
		}
		if err := json.NewDecoder(r.Body).Decode(&in); err != nil {
			panic(err)
		}
		f.done = append(f.done, fmt.Sprintf("pause %s because %s until %s", r.PathValue("queue"), in.Reason, in.Until))
		w.WriteHeader(http.StatusNoContent)
	})
	mux.HandleFunc("GET /v1/snapshot", func(w http.ResponseWriter, _ *http.Request) {
		next := f.snapshots[0]
		if len(f.snapshots) > 1 {
			f.snapshots = f.snapshots[1:]
		}
		writeAnswer(w, http.StatusOK, next)
	})
	mux.HandleFunc("POST /v1/queues/{queue}/entries", f.push)
	mux.ServeHTTP(w, r)
}

func (f *fake) push(w http.ResponseWriter, r *http.Request) {
	if f.pushes++; f.pushes == f.refuse {
		writeAnswer(w, http.StatusTooManyRequests, client.Error{Code: client.QueueFull, Detail: "the queue is full"})
		return
	}
	var entries []newEntry
	if err := json.NewDecoder(r.Body).Decode(&entries); err != nil {
		panic(err)
	}
	var answers []invalidation.Pushed
	for _, e := range entries {
		f.pushed = append(f.pushed, e.Push)
		answers = append(answers, invalidation.Pushed{ID: invalidation.EntryID(len(f.pushed)), Verdict: invalidation.Inserted})
	}
	writeAnswer(w, http.StatusCreated, map[string]any{"entries": answers})
}

func writeAnswer(w http.ResponseWriter, status int, body any) {
	w.WriteHeader(status)
	if err := json.NewEncoder(w).Encode(body); err != nil {
		panic(err)
	}
}

func queuesNow() []operator.Queue {
	head := []float64{0.42, 93}
	capacity, most := int64(100_000), int32(8)
	until := noon.Add(time.Hour)
	return []operator.Queue{
		{
			Name: "embed", Kind: "inference", Application: "gpu", Pending: 1_200_000, Computing: 64, AwaitingCompute: 1_199_936, Estimated: true,
			Serving: 4, HeadAgeSeconds: &head[1], Capacity: &capacity, QueueID: 1,
		},
		{Name: "mails", Kind: "task", Application: "default", Initial: 3, Pending: 2, AwaitingCompute: 5, Failed: 7, Serving: 1, HeadAgeSeconds: &head[0], MaxConcurrent: &most, QueueID: 2},
		{
			Name: "reports", Kind: "cron", Application: "default", Pending: 1, AwaitingCompute: 1, Paused: true, PausedBy: "ada@ops",
			PausedReason: "books are closed\n\x1b[2J", PausedUntil: &until, QueueID: 3,
		},
		{Name: "thumbs", Kind: "task", Application: "default", Disabled: 2, OutOfService: true, QueueID: 4},
	}
}

func snapshotNow() *operator.Snapshot {
	head := 93.0
	queues := queuesNow()
	for i, rates := range [][2]float64{{120.25, 118}, {0, 0}} {
		queues[i].InPerSecond, queues[i].OutPerSecond = &rates[0], &rates[1]
	}
	return &operator.Snapshot{
		At: noon, Queues: queues, Waiting: 1_199_942,
		Lanes: []operator.Lane{{Queue: "embed", Priority: 1, Flow: "acme", Keys: 1000, HeadAgeSeconds: &head}, {Queue: "mails", Priority: 5, Keys: 2}},
		Nodes: []operator.Node{
			{ID: 7001, Name: "gpu-1", Kind: "task", Application: "gpu", State: "live", Threads: 32, Locks: 64, SilentSeconds: 0.8, Queues: []string{"embed"}, StartedAt: noon.Add(-50 * time.Hour)},
			{ID: 7002, Name: "gpu-2", Kind: "task", Application: "gpu", State: "dead", Threads: 32, Locks: 2, SilentSeconds: 75, Queues: []string{"embed"}, StartedAt: noon.Add(-time.Hour)},
		},
		Locks:  []operator.Lock{{Queue: "embed", LockKey: "#17", Entries: 1, Token: 99, NodeID: 7002, Node: "gpu-2", AgeSeconds: 200}},
		Rates:  []operator.Rate{{Queue: "embed", In: 120.25, Out: 118}, {Queue: "mails"}},
		Leader: &operator.Leader{Holder: "leader-a", Term: 3, Live: true},
		Server: operator.Server{Connections: 12, MaxConnections: 100, HorizonSeconds: 0.3, DeadTuples: 1200},
	}
}

// command runs one command line on an API handler, nil for that of the database, and returns output, errors and exit code.
func command(t *testing.T, api http.Handler, args ...string) (out, errs string, code int) {
	t.Helper()
	var o, e bytes.Buffer
	a := newApp(strings.NewReader(""), &o, &e, func(string) string { return "" })
	a.handler, a.now, a.completionMax = api, func() time.Time { return noon }, 30*time.Second
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	code = run(ctx, a, args)
	return o.String(), e.String(), code
}

func TestListsInEachFormat(t *testing.T) {
	for _, format := range formats {
		out, errs, code := command(t, &fake{}, "queue", "list", "-o", format)
		if code != 0 || errs != "" {
			t.Fatalf("-o %s: exit %d, %s", format, code, errs)
		}
		compare(t, "testdata/queues."+format, out)
	}
}

func TestTopOnce(t *testing.T) {
	out, errs, code := command(t, &fake{snapshots: []*operator.Snapshot{snapshotNow()}}, "top", "--once", "--interval", "100ms")
	if code != 0 {
		t.Fatalf("exit %d: %s", code, errs)
	}
	compare(t, "testdata/top.txt", out)
}

func TestFindingsSayWhatToDo(t *testing.T) {
	var out bytes.Buffer
	a := newApp(nil, &out, &out, os.Getenv)
	a.format = "table"
	findings := []doctor.Finding{
		{Check: "version", Severity: doctor.Fine, Summary: "Postgres 17.2"},
		{Check: "horizon", Severity: doctor.Critical, Summary: "1 hold the horizon", Details: []string{"session 4711: SELECT pg_terminate_backend(4711)"}, Advice: "End it."},
		{Check: "leader", Severity: doctor.Warning, Summary: "no leader leads", Advice: "Start a leader."},
		{Check: "invariants", Severity: doctor.Skipped, Summary: "not checked: about 9000000 rows would be read", Advice: "Run penstock doctor --deep."},
	}
	for _, quiet := range []bool{false, true} {
		if err := a.writeFindings(findings, quiet); err != nil {
			t.Fatal(err)
		}
	}
	compare(t, "testdata/doctor.txt", out.String())
}

func TestDoctorExitsBySeverity(t *testing.T) {
	dsn := pgtest.DSN(t)
	findings := func() (map[string]doctor.Finding, int) {
		out, errs, code := command(t, nil, "doctor", "-o", "json", "--database-url", dsn)
		var all []doctor.Finding
		if err := json.Unmarshal([]byte(out), &all); err != nil {
			t.Fatalf("%v: %s%s", err, out, errs)
		}
		byName := map[string]doctor.Finding{}
		for _, f := range all {
			byName[f.Check] = f
		}
		return byName, code
	}
	found, code := findings()
	if found["schema"].Severity != doctor.Fine || found["leader"].Severity != doctor.Warning || code < exitWarning {
		t.Fatalf("exit %d, %+v", code, found)
	}
	if _, _, code := command(t, nil, "migrate", "verify", "--database-url", dsn); code != 0 {
		t.Errorf("verify of a fresh schema exits with %d", code)
	}
	if _, _, code := command(t, nil, "doctor", "--database-url", "postgres://nobody@127.0.0.1:1/none"); code != exitUnavailable {
		t.Errorf("a database that is away: exit %d, want %d", code, exitUnavailable)
	}
}

func TestMigrateFromNothing(t *testing.T) {
	dsn := pgtest.Empty(t)
	out, _, code := command(t, nil, "queue", "list", "--database-url", dsn)
	if code != exitState || out != "" {
		t.Errorf("list without a schema: exit %d, want %d", code, exitState)
	}
	if out, _, code := command(t, nil, "migrate", "verify", "--database-url", dsn); code != exitWarning || !strings.Contains(out, "migrations are pending") {
		t.Errorf("verify without a schema: exit %d, %s", code, out)
	}
	if out, _, _ := command(t, nil, "migrate", "status", "--database-url", dsn, "-o", "jsonl"); strings.Contains(out, "applied") || !strings.Contains(out, "pending") {
		t.Errorf("status without a schema: %s", out)
	}
	if _, errs, code := command(t, nil, "migrate", "up", "--database-url", dsn, "--database-pooled"); code != exitUsage || !strings.Contains(errs, "past a pooler") {
		t.Errorf("up through a pooler: exit %d, %s", code, errs)
	}
	if out, errs, code := command(t, nil, "migrate", "up", "--database-url", dsn); code != 0 || !strings.Contains(out, "applied") {
		t.Fatalf("up: exit %d, %s%s", code, out, errs)
	}
	if out, _, _ := command(t, nil, "migrate", "status", "--database-url", dsn, "-o", "jsonl"); strings.Contains(out, "pending") || !strings.Contains(out, `"applied"`) {
		t.Errorf("status after up: %s", out)
	}
	if out, _, _ := command(t, nil, "migrate", "up", "--database-url", dsn); out != "nothing is pending\n" {
		t.Errorf("a second up: %s", out)
	}
	if _, errs, code := command(t, nil, "grants", "--apply", "--database-url", dsn, "--database-pooled"); code != exitUsage || !strings.Contains(errs, "past a pooler") {
		t.Errorf("grants through a pooler: exit %d, %s", code, errs)
	}
}

func TestEveryErrorHasItsExitCodeAndANextStep(t *testing.T) {
	for _, c := range []struct {
		err  error
		want int
	}{
		{nil, exitDone},
		{errors.New("who knows"), exitError},
		{usagef("wrong"), exitUsage},
		{fmt.Errorf("x: %w", invalidation.ErrInvalid), exitUsage},
		{fmt.Errorf("x: %w", invalidation.ErrQueueNotFound), exitNotFound},
		{fmt.Errorf("x: %w", invalidation.ErrEntryNotFound), exitNotFound},
		{fmt.Errorf("x: %w", invalidation.ErrNotFound), exitNotFound},
		{fmt.Errorf("x: %w", invalidation.ErrState), exitState},
		{fmt.Errorf("x: %w", invalidation.ErrIdempotencyConflict), exitState},
		{&pgconn.PgError{Code: "42P01"}, exitState},
		{fmt.Errorf("x: %w", &invalidation.FullError{}), exitFull},
		{&pgconn.PgError{Code: "57P01"}, exitUnavailable},
		{&pgconn.PgError{Code: "08P01"}, exitUnavailable}, // of a pooler
		{&pgconn.PgError{Code: "28P01"}, exitUnavailable},
		{&pgconn.PgError{Code: "42501"}, exitUnavailable},
		{&migrations.OldError{Missing: migrations.FunctionsName}, exitState},
		{&migrations.OwnerError{User: "ann"}, exitUnavailable},
		{errUnconfirmed, exitUnconfirmed},
		{errTimeout, exitTimeout},
		{&pgconn.PgError{Code: "57014"}, exitTimeout},
		{exitStatus{exitEndedBadly}, exitEndedBadly},
	} {
		var errs bytes.Buffer
		a := newApp(nil, &errs, &errs, os.Getenv)
		if got := a.report(t.Context(), c.err); got != c.want {
			t.Errorf("%v: exit %d, want %d", c.err, got, c.want)
		}
		if silent := c.want == exitDone || c.want == exitError || c.want == exitEndedBadly; !silent && !strings.Contains(errs.String(), "next: ") {
			t.Errorf("%v: nothing about what to do next: %s", c.err, errs.String())
		}
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	a := newApp(nil, &bytes.Buffer{}, &bytes.Buffer{}, os.Getenv)
	if got := a.report(ctx, ctx.Err()); got != exitInterrupted {
		t.Errorf("interrupted: exit %d, want %d", got, exitInterrupted)
	}
}

// An error of a change says whether it leaves open that the change was made.
func TestErrorsThatLeaveAChangeUndecided(t *testing.T) {
	for _, c := range []struct {
		err  error
		want bool
	}{
		{nil, false},
		{fmt.Errorf("commit: %w", context.DeadlineExceeded), true},
		{fmt.Errorf("commit: %w", context.Canceled), true}, // Ctrl-C
		{fmt.Errorf("commit: %w", io.ErrUnexpectedEOF), true},
		{&pgconn.PgError{Code: "57P01"}, true}, // the session was ended, perhaps while its commit waited for a standby
		{&pgconn.PgError{Code: "57014"}, false},
		{&pgconn.PgError{Code: "42501"}, false},
		{&pgconn.ConnectError{}, false},
		{fmt.Errorf("x: %w", invalidation.ErrInvalid), false},
		{refused{&client.Error{Code: "timeout"}}, true},
		{refused{&client.Error{Code: client.QueueNotFound}}, false},
	} {
		if got := undecided(c.err); got != c.want {
			t.Errorf("%v: %t, want %t", c.err, got, c.want)
		}
	}
}

// Each code that docs/api.md lists has its exit code and a next step, and only internal is unforeseen.
func TestEveryCodeOfTheAPIHasItsExitCode(t *testing.T) {
	manual, err := os.ReadFile("../../docs/api.md")
	if err != nil {
		t.Fatal(err)
	}
	want := map[string]int{
		"rate_exceeded": exitFull, "queue_full": exitFull, "loop": exitState, "precondition_required": exitState,
		"body_too_slow": exitTimeout, "timeout": exitTimeout, "internal": exitError, "unavailable": exitUnavailable,
	}
	codes := 0
	for _, row := range regexp.MustCompile("(?m)^\\| (`[a-z_`, ]+`) \\| [45][0-9]{2} \\|").FindAllSubmatch(manual, -1) {
		for name := range strings.SplitSeq(strings.ReplaceAll(string(row[1]), "`", ""), ", ") {
			if name == "client_gone" { // no client gets it
				continue
			}
			codes++
			var errs bytes.Buffer
			a := newApp(nil, &errs, &errs, os.Getenv)
			got := a.report(t.Context(), refused{&client.Error{Code: client.Code(name), Detail: "no", RetryAfter: 42 * time.Second}})
			if exit, listed := want[name]; (listed && got != exit) || (!listed && got == exitError) {
				t.Errorf("%s: exit %d, want %d", name, got, exit)
			}
			if text := errs.String(); !strings.Contains(text, "next: ") || !strings.Contains(text, "42s") {
				t.Errorf("%s: nothing about what to do next, or when: %s", name, text)
			}
		}
	}
	if codes < 25 {
		t.Errorf("docs/api.md lists %d codes", codes)
	}
}

// A priority is sent as it was given, for the server to refuse, and none if none was given.
func TestPriorityOfAPushIsThatOfItsFlag(t *testing.T) {
	lines := filepath.Join(t.TempDir(), "lines")
	if err := os.WriteFile(lines, []byte("{}\n{}"), 0o600); err != nil {
		t.Fatal(err)
	}
	priority := func(args ...string) *int16 {
		s := &fake{}
		args = append([]string{"entry", "push", "mails", "--lines", lines}, args...)
		if _, errs, code := command(t, s, args...); code != 0 {
			t.Fatalf("exit %d: %s", code, errs)
		}
		return s.pushed[0].Priority
	}
	for _, n := range []int16{0, 7, 12} {
		if got := priority("--priority", fmt.Sprint(n)); got == nil || *got != n {
			t.Errorf("--priority %d: got %v", n, got)
		}
	}
	if got := priority(); got != nil {
		t.Errorf("without the flag: got %d", *got)
	}
}

// The end of an entry is printed although another one is late, or is not known.
func TestWaitPrintsWhatHasEnded(t *testing.T) {
	api := http.NewServeMux()
	api.HandleFunc("GET /v1/entries/{id}", func(w http.ResponseWriter, r *http.Request) {
		switch r.PathValue("id") {
		case "1":
			writeAnswer(w, http.StatusOK, map[string]any{"id": 1, "state": "failed", "ended_at": noon, "error": "out of memory"})
		case "2":
			writeAnswer(w, http.StatusOK, map[string]any{"id": 2, "state": "pending"})
		default:
			writeAnswer(w, http.StatusNotFound, client.Error{Code: client.EntryNotFound, Detail: "there is no such entry"})
		}
	})
	for _, c := range []struct {
		ids  []string
		code int
	}{{[]string{"1", "2", "--for", "300ms"}, exitTimeout}, {[]string{"1", "3"}, exitNotFound}, {[]string{"1"}, exitEndedBadly}} {
		out, errs, code := command(t, api, append([]string{"entry", "wait"}, c.ids...)...)
		if code != c.code || !strings.Contains(out, "failed") || !strings.Contains(out, "out of memory") {
			t.Errorf("%v: exit %d, want %d: %s%s", c.ids, code, c.code, out, errs)
		}
	}
	if out, _, code := command(t, api, "entry", "wait", "2", "1", "--for", "300ms"); code != exitTimeout || out != "" {
		t.Errorf("the first is late: exit %d, %s", code, out)
	}
}

// leaves are the commands that do something, by their path.
func leaves(c *cobra.Command) map[string]*cobra.Command {
	found := map[string]*cobra.Command{}
	for _, child := range c.Commands() {
		if child.HasSubCommands() {
			for path, leaf := range leaves(child) {
				found[path] = leaf
			}
		} else if child.Name() != "help" {
			found[child.CommandPath()] = child
		}
	}
	return found
}

func TestWhateverChangesBehaviourNeedsAReasonAndCanBeTriedFirst(t *testing.T) {
	root := newRoot(newApp(nil, &bytes.Buffer{}, &bytes.Buffer{}, os.Getenv))
	changes := 0
	for path, leaf := range leaves(root) {
		if leaf.Flags().Lookup("reason") == nil {
			continue
		}
		changes++
		if leaf.Flags().Lookup("dry-run") == nil || leaf.Flags().Lookup("yes") == nil {
			t.Errorf("%s takes a reason, but not --dry-run and --yes", path)
		}
		args := strings.Fields(path)[1:]
		for range strings.Count(strings.ReplaceAll(leaf.Use, "[", ""), " ") {
			args = append(args, "1")
		}
		if out, errs, code := command(t, &fake{}, args...); code != exitUsage || !strings.Contains(errs, "--reason") || out != "" {
			t.Errorf("%s without a reason: exit %d, %s%s", path, code, out, errs)
		}
	}
	if changes < 20 {
		t.Errorf("only %d commands need a reason", changes)
	}
}

func TestTheManualNamesEveryCommand(t *testing.T) {
	manual, err := os.ReadFile("../../docs/cli.md")
	if err != nil {
		t.Fatal(err)
	}
	for path := range leaves(newRoot(newApp(nil, &bytes.Buffer{}, &bytes.Buffer{}, os.Getenv))) {
		if !bytes.Contains(manual, []byte("`"+path)) {
			t.Errorf("docs/cli.md does not name `%s`", path)
		}
	}
	for _, line := range strings.Split(exitHelp, "\n")[1:] {
		for _, part := range regexp.MustCompile(` {5,}`).Split(strings.TrimSpace(line), -1) {
			code, meaning, _ := strings.Cut(part, " ")
			if want := fmt.Sprintf("| %s | %s |", code, strings.TrimSpace(meaning)); !bytes.Contains(manual, []byte(want)) {
				t.Errorf("docs/cli.md does not say %q", want)
			}
		}
	}
}

// commandInText matches a command that a text for operators names, such as `penstock node list`.
var commandInText = regexp.MustCompile(`penstock ([a-z]+)(?: ([a-z]+))?`)

func TestCommandsThatTheDashboardNamesExist(t *testing.T) {
	pages, err := filepath.Glob("../../web/templates/*.html")
	if err != nil || len(pages) == 0 {
		t.Fatalf("found no pages: %v", err)
	}
	root, named := newRoot(newApp(nil, &bytes.Buffer{}, &bytes.Buffer{}, os.Getenv)), 0
	for _, page := range pages {
		text, err := os.ReadFile(page)
		if err != nil {
			t.Fatal(err)
		}
		for _, at := range commandInText.FindAllStringSubmatchIndex(string(text), -1) {
			match := commandInText.FindStringSubmatch(string(text[at[0]:at[1]]))
			named++
			found, rest, err := root.Find(match[1:])
			if err != nil || found == root || (found.HasSubCommands() && len(rest) > 0 && rest[0] != "") {
				t.Errorf("%s names %q, which is no command", page, match[0])
				continue
			}
			said := string(text[at[1]:])
			said = said[:strings.IndexAny(said+"\n", "<\";`\n")]
			said, _, _ = strings.Cut(said, "penstock ")
			for _, flag := range regexp.MustCompile(`--([a-z-]+)`).FindAllStringSubmatch(said, -1) {
				if found.Flag(flag[1]) == nil {
					t.Errorf("%s names %s --%s, a flag that does not exist", page, match[0], flag[1])
				}
			}
			if found.Flag("reason") != nil && !strings.Contains(said, "--reason") {
				t.Errorf("%s names %s without --reason", page, match[0])
			}
		}
	}
	if named == 0 {
		t.Error("found no command")
	}
}

func TestTopCountsGatewaysApartFromTaskNodes(t *testing.T) {
	s := &operator.Snapshot{Nodes: []operator.Node{
		{Kind: "task", State: "live"}, {Kind: "task", State: "dead"}, {Kind: "gateway", State: "live"},
	}}
	line := newApp(nil, &bytes.Buffer{}, &bytes.Buffer{}, os.Getenv).headline(s)
	if want := "nodes 1 live, 1 dead  gateways 1 live"; !strings.Contains(line, want) {
		t.Errorf("got %q, want it to contain %q", line, want)
	}
}

func TestADryRunChangesNothing(t *testing.T) {
	s := &fake{}
	out, _, code := command(t, s, "queue", "pause", "mails", "--until", "1h", "--dry-run")
	if code != 0 || len(s.done) > 0 || !strings.HasPrefix(out, "would pause queue mails: waiting: 5, computing: 0, for 1h0m0s") {
		t.Errorf("exit %d, did %q, said %s", code, s.done, out)
	}
	if _, _, code = command(t, s, "queue", "pause", "mails", "--until", "1h", "--reason", "why"); code != 0 {
		t.Errorf("exit %d", code)
	}
	if want := "pause mails because why until 1h0m0s"; len(s.done) != 1 || s.done[0] != want {
		t.Errorf("did %q, want %q", s.done, want)
	}
}

func TestHelpKeepsTheDatabasePasswordToItself(t *testing.T) {
	var out bytes.Buffer
	a := newApp(strings.NewReader(""), &out, &out, func(string) string { return "postgres://u:secret@h/d" })
	if code := run(t.Context(), a, []string{"queue", "list", "--help"}); code != 0 || strings.Contains(out.String(), "secret") {
		t.Errorf("exit %d: %s", code, out.String())
	}
}

func TestQueueNamesAreCompleted(t *testing.T) {
	dsn := pgtest.DSN(t)
	for _, name := range []string{"mails", "maps", "thumbs"} {
		if _, errs, code := command(t, nil, "queue", "create", name, "--reason", "test", "--database-url", dsn); code != 0 {
			t.Fatal(errs)
		}
	}
	for _, args := range [][]string{{"queue", "show"}, {"entry", "list"}, {"lock", "list", "--queue"}, {"queue", "list", "thumbs"}} {
		args = append([]string{"__complete", "--database-url", dsn}, append(args, "ma")...)
		if out, _, code := command(t, nil, args...); code != 0 || !strings.HasPrefix(out, "mails\nmaps\n:") {
			t.Errorf("%v completes to exit %d, %s", args[3:], code, out)
		}
	}
	if out, _, _ := command(t, nil, "__complete", "--database-url", "postgres://nobody@127.0.0.1:1/none", "queue", "show", ""); !strings.HasPrefix(out, ":") {
		t.Errorf("completion without a database offers %s", out)
	}
}

func TestLinesArePushedInBatchesAndTheFirstBadOneIsNamed(t *testing.T) {
	write := func(lines ...string) string {
		path := filepath.Join(t.TempDir(), "lines")
		if err := os.WriteFile(path, []byte(strings.Join(lines, "\n")), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	many := make([]string, 2500)
	for i := range many {
		many[i] = fmt.Sprintf(`{"n": %d}`, i)
	}
	s := &fake{}
	out, errs, code := command(t, s, "entry", "push", "mails", "--lines", write(many...), "--flow", "acme")
	if code != 0 || out != "2500 entries, ids 1 to 2500\n" || s.pushes != 3 {
		t.Fatalf("exit %d after %d batches: %s%s", code, s.pushes, out, errs)
	}
	if last := s.pushed[2499]; string(last.Payload) != `{"n":2499}` || last.Flow != "acme" || string(s.pushed[0].Payload) != `{"n":0}` {
		t.Errorf("the last push is %+v", last)
	}
	for _, c := range []struct {
		fake  *fake
		lines []string
		code  int
		says  string
	}{
		{&fake{}, append(many[:1100:1100], "nonsense"), exitUsage, "line 1101 is not JSON; 1000 entries before line 1001 were accepted"},
		{&fake{refuse: 2}, many, exitFull, "lines 1001 to 2000 were not accepted, the 1000 entries before them were"},
	} {
		if _, errs, code := command(t, c.fake, "entry", "push", "mails", "--lines", write(c.lines...)); code != c.code || !strings.Contains(errs, c.says) {
			t.Errorf("exit %d, %s; want %q", code, errs, c.says)
		}
	}
}

func TestTextOfOthersCannotSteerTheTerminal(t *testing.T) {
	out, _, _ := command(t, &fake{}, "queue", "list", "-o", "wide")
	if strings.ContainsAny(out, "\x1b\x07") {
		t.Errorf("an escape sequence got through: %q", out)
	}
	if strings.Count(out, "\n") != len(queuesNow())+1 {
		t.Errorf("a line break got through:\n%s", out)
	}
}

func TestColoursAreForTerminalsAndDoNotShiftColumns(t *testing.T) {
	a := newApp(nil, &bytes.Buffer{}, &bytes.Buffer{}, os.Getenv)
	g := columns2text(queueColumns(), queuesNow(), false)
	plain := a.table(g)
	a.colours = true
	coloured := a.table(g)
	if plain == coloured || strings.Contains(plain, "\x1b") {
		t.Error("colours do not differ from none")
	}
	for _, colour := range []string{bold, dim, red, green, yellow, "0"} {
		coloured = strings.ReplaceAll(coloured, "\x1b["+colour+"m", "")
	}
	if plain != coloured {
		t.Errorf("colours change the layout:\n%s\n%s", plain, coloured)
	}
}

func TestWatchPrintsUntilItIsInterrupted(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	var out bytes.Buffer
	a := newApp(nil, &out, &out, os.Getenv)
	pictures := 0
	err := a.watch(ctx, time.Millisecond, func() error {
		if pictures++; pictures == 3 {
			cancel()
		}
		return exitStatus{exitCritical} // what is found does not end a watch
	})
	if err != nil || pictures != 3 {
		t.Errorf("%d pictures (%v)", pictures, err)
	}
	if err := a.watch(t.Context(), time.Millisecond, func() error { return errTimeout }); !errors.Is(err, errTimeout) {
		t.Errorf("an error does not end a watch: %v", err)
	}
}

func TestAgesAreSaidAsPeopleSayThem(t *testing.T) {
	for seconds, want := range map[float64]string{
		-1: "0.0s", 0.04: "0.0s", 9.94: "9.9s", 9.96: "9s", 59.9: "59s", 60: "1m0s", 3599: "59m59s", 3600: "1h0m", 86400: "1d0h", 1e6: "11d13h",
	} {
		if got := age(seconds); got != want {
			t.Errorf("%v seconds: %s, want %s", seconds, got, want)
		}
	}
}

// TestControlCharactersOfPayloadsDoNotReachTheTerminal: U+009B begins an escape sequence as ESC [ does, and U+202E has the rest
// of the line read from right to left.
func TestControlCharactersOfPayloadsDoNotReachTheTerminal(t *testing.T) {
	s := newSession(t)
	s.penstock("queue create mails --reason test")
	s.penstock("entry push mails '{\"a\": \"x\u009b2J\u007f\", \"b\": \"to \u202eada\"}' --name n\u009bm --flow f\u202eg")
	steers := func(r rune) bool {
		return r != '\n' && r < ' ' || r >= 0x7f && r < 0xa0 || unicode.Is(unicode.Bidi_Control, r)
	}
	for _, format := range formats {
		got := s.penstock("entry show 1 -o " + format)
		if strings.ContainsFunc(got, steers) || !strings.Contains(got, "2J") {
			t.Errorf("-o %s prints %q", format, got)
		}
		if format == "yaml" {
			var e struct{ Entry struct{ Flow string } }
			if err := yaml.Unmarshal([]byte(got), &e); err != nil || e.Entry.Flow != "f\u202eg" {
				t.Errorf("-o yaml prints %s, which is read as %+v (%v)", got, e, err)
			}
		}
	}
}

func TestAWaitSaysWhyAnEntryDoesNotRun(t *testing.T) {
	s := newSession(t)
	s.penstock("queue create mails --reason test")
	if got := s.penstock("entry push mails '{}'"); !strings.Contains(got, "inserted") {
		t.Fatal(got)
	}
	ctx, interrupt := context.WithCancel(t.Context())
	defer interrupt()
	said := &untilSaid{text: regexp.MustCompile(`entry 1 waits: .*node`), then: interrupt}
	env := map[string]string{"PENSTOCK_DATABASE_URL": s.dsn}
	a := newApp(strings.NewReader(""), io.Discard, said, func(name string) string { return env[name] })
	run(ctx, a, []string{"entry", "wait", "1", "--for", "1m"})
	if got := said.all.String(); !said.text.MatchString(got) {
		t.Errorf("it says %s", got)
	}
}

// untilSaid is an error stream that calls then once it has the text.
type untilSaid struct {
	text *regexp.Regexp
	then func()
	all  bytes.Buffer
}

func (u *untilSaid) Write(b []byte) (int, error) {
	u.all.Write(b)
	if u.text.Match(u.all.Bytes()) {
		u.then()
	}
	return len(b), nil
}
