package main

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/pkg/invalidation"
)

var update = flag.Bool("update", false, "write what the commands print into the golden files")

// session is a person at a terminal, and a worker beside, on one database with no leader.
type session struct {
	*testing.T
	pool  *pgxpool.Pool
	dsn   string
	api   map[string]string // the environment of who goes through the API
	locks []*invalidation.Lock
}

// TestUnracedSessionWithoutALeader runs the commands of testdata/session.txt and compares what they print and how they end.
// Lines that begin with $ are commands; what stands between them was printed. Lines that begin with % are what the
// world does meanwhile: claim QUEUE NODE N, done, fail TEXT, sql STATEMENT. [exit N] is an exit code other than 0.
func TestUnracedSessionWithoutALeader(t *testing.T) {
	compare(t, sessionPath, newSession(t).play())
}

const sessionPath = "testdata/session.txt"

func newSession(t *testing.T) *session {
	s := &session{T: t, dsn: pgtest.DSN(t)}
	var err error
	if s.pool, err = pgxpool.New(t.Context(), s.dsn); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(s.pool.Close)
	return s
}

// play runs the script and returns it with what was printed.
func (s *session) play() string {
	s.Helper()
	script, err := os.ReadFile(sessionPath)
	if err != nil {
		s.Fatal(err)
	}
	var got strings.Builder
	for line := range strings.Lines(string(script)) {
		switch {
		case strings.HasPrefix(line, "$ penstock "):
			got.WriteString(line + s.penstock(strings.TrimPrefix(line, "$ penstock ")))
		case strings.HasPrefix(line, "% "):
			s.world(strings.Fields(line)[1:])
			got.WriteString(line)
		case strings.HasPrefix(line, "#"), strings.TrimSpace(line) == "" && strings.HasSuffix(got.String(), "\n"):
			if strings.HasPrefix(line, "#") {
				got.WriteString("\n" + line)
			}
		}
	}
	return strings.TrimPrefix(got.String(), "\n")
}

func compare(t *testing.T, path, got string) {
	t.Helper()
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	same(t, path, got, string(want))
}

func same(t *testing.T, path, got, want string) {
	t.Helper()
	if got == want {
		return
	}
	g, w := strings.Split(got, "\n"), strings.Split(want, "\n")
	for i := range max(len(g), len(w)) {
		if i >= len(g) || i >= len(w) || g[i] != w[i] {
			t.Fatalf("%s differs from line %d on; if the change is meant, run go test -update\ngot:\n%s\nwant:\n%s", path, i+1,
				strings.Join(g[min(i, len(g)):min(i+12, len(g))], "\n"), strings.Join(w[min(i, len(w)):min(i+12, len(w))], "\n"))
		}
	}
}

// penstock runs one command line as the program does, without a terminal.
func (s *session) penstock(line string) string {
	var out bytes.Buffer
	env, args := map[string]string{"PENSTOCK_DATABASE_URL": s.dsn}, append(words(line), "--actor", "ada@ops")
	if s.api != nil && !onlyOnTheDatabase.MatchString(line) {
		env, args = s.api, words(line)
	}
	a := newApp(strings.NewReader(`{"from": "stdin"}`), &out, &out, func(name string) string { return env[name] })
	code := run(s.Context(), a, args)
	text := settled(out.String())
	if code != 0 {
		text += fmt.Sprintf("[exit %d]\n", code)
	}
	return text
}

// words splits a command line as a shell does, as far as the sessions need it.
func words(line string) []string {
	var all []string
	for _, m := range regexp.MustCompile(`'([^']*)'|(\S+)`).FindAllStringSubmatch(strings.TrimSpace(line), -1) {
		if strings.HasPrefix(m[0], "'") {
			all = append(all, m[1])
		} else {
			all = append(all, m[2])
		}
	}
	return all
}

// unsettled is what differs from run to run.
var unsettled = []struct {
	pattern *regexp.Regexp
	with    string
}{
	{regexp.MustCompile(`\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(\.\d+)?(Z|[+-]\d\d(:\d\d)?)`), "<time>"},
	{regexp.MustCompile(`"(\w+_seconds)": [0-9.e-]+`), `"$1": <seconds>`},
	{regexp.MustCompile(`(\w+_seconds): [0-9.e-]+`), `$1: <seconds>`},
	{regexp.MustCompile(`\b(\d+m)?\d+(\.\d+)?m?s\b`), "<age>"},
	{regexp.MustCompile(`\b(\d+ m )?\d+ s\b`), "<age>"},
	{regexp.MustCompile(`\b[0-9a-f]{64}\b`), "<digest>"},
	{regexp.MustCompile(`\bpst_[0-9a-f]{72}\b`), "<secret>"},
	{regexp.MustCompile(`go1\.\S+`), "<go>"},
	{regexp.MustCompile(`(?m)^(penstock|commit)  +\S+$`), "$1  <build>"},
	{regexp.MustCompile(`schema  +\d{5}_\w+\.sql\b`), "schema  <migration>"},
	{regexp.MustCompile(`Postgres \d+[^\n]*`), "Postgres <version>"},
	{regexp.MustCompile(`\d+ of \d+ in use`), "<n> of <n> in use"},
	{regexp.MustCompile(`connections \d+/\d+`), "connections <n>/<n>"},
	{regexp.MustCompile(`about \d+ rows`), "about <n> rows"},
	{regexp.MustCompile(`dead rows \d+`), "dead rows <n>"},
	{regexp.MustCompile(`\d+\.\d million`), "<n> million"},
	{regexp.MustCompile(`(result|failure) has [^\n]*`), "$1 has <partitions>"},
	{regexp.MustCompile(`(?m)^ *\d+  <time>`), "<id>  <time>"}, // of the audit, which migrations may write as well
	{regexp.MustCompile(`--before \d+`), "--before <id>"},
	{regexp.MustCompile(`(\S)  +`), "$1  "},
}

func settled(text string) string {
	for _, u := range unsettled {
		text = u.pattern.ReplaceAllString(text, u.with)
	}
	return text
}

// world is what happens beside the operator: a worker claims and ends entries, time passes.
func (s *session) world(args []string) {
	s.Helper()
	var err error
	switch args[0] {
	case "claim":
		err = s.claim(args[1], args[2], args[3])
	case "done", "fail":
		err = s.end(args[0] == "fail", strings.Join(args[1:], " "))
	case "sql":
		_, err = s.pool.Exec(s.Context(), strings.Join(args[1:], " "))
	default:
		err = fmt.Errorf("the world does not know how to %s", args[0])
	}
	if err != nil {
		s.Fatal(err)
	}
}

func (s *session) claim(queue, node, count string) error {
	ctx := s.Context()
	q, err := invalidation.Open(ctx, s.pool, queue)
	if err != nil {
		return err
	}
	id, err := strconv.ParseInt(node, 10, 64)
	if err != nil {
		return err
	}
	n, err := strconv.Atoi(count)
	if err != nil {
		return err
	}
	if err := invalidation.Register(ctx, s.pool, invalidation.Node{
		ID: invalidation.NodeID(id), Name: "gpu-" + node, Application: "default", Lease: time.Hour, Threads: 4, Queues: []int32{q.ID},
	}); err != nil {
		return err
	}
	c, err := q.Claim(ctx, invalidation.ClaimRequest{Node: invalidation.NodeID(id), Lane: invalidation.Lane{Priority: 1}, Limit: n})
	if err != nil {
		return err
	}
	s.locks = c.Locks
	return nil
}

// end ends what was claimed last.
func (s *session) end(failed bool, text string) error {
	ctx := s.Context()
	for _, l := range s.locks {
		var queue string
		if err := s.pool.QueryRow(ctx, `SELECT queue FROM penstock.lock_status WHERE token = $1`, l.Token).Scan(&queue); err != nil {
			return err
		}
		q, err := invalidation.Open(ctx, s.pool, queue)
		if err != nil {
			return err
		}
		var node invalidation.NodeID
		if err := s.pool.QueryRow(ctx, `SELECT node_id FROM penstock.lock WHERE token = $1`, l.Token).Scan(&node); err != nil {
			return err
		}
		var endings []invalidation.Ending
		for i, e := range l.Entries {
			ending := invalidation.Done(l, e.ID, []byte(`{"ok": true}`), time.Second)
			if failed {
				ending = invalidation.Fail(l, e.ID, invalidation.Failure{Class: "input", Error: fmt.Sprintf("%s %d", text, e.ID)}, time.Second)
			}
			ending.Last = i == len(l.Entries)-1
			endings = append(endings, ending)
		}
		if _, err := q.Settle(ctx, node, endings); err != nil {
			return err
		}
	}
	s.locks = nil
	return nil
}
