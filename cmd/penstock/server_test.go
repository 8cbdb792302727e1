package main

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"

	"go.yaml.in/yaml/v3"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/api"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
	"github.com/penstock/penstock/pkg/webhook"
)

// onlyOnTheDatabase are the commands that the API has not.
var onlyOnTheDatabase = regexp.MustCompile(`^(migrate|doctor)\b|--database-url`)

// differences are where the session through a server reads otherwise, and why.
var differences = []struct{ why, database, api string }{
	{
		"the token that is used is listed as well",
		"TOKEN  STATE  SCOPES  APPLICATIONS  QUEUES  USED  EXPIRES\n",
		"TOKEN  STATE  SCOPES  APPLICATIONS  QUEUES  USED  EXPIRES\nada@ops  live  admin  all  all  <time>  never\n",
	},
}

// TestSessionThroughTheAPI plays the session of TestUnracedSessionWithoutALeader again, on a server.
func TestSessionThroughTheAPI(t *testing.T) {
	s := newSession(t)
	s.serve()
	text, err := os.ReadFile(sessionPath)
	if err != nil {
		t.Fatal(err)
	}
	want := string(text)
	for _, d := range differences {
		if !strings.Contains(want, d.database) {
			t.Errorf("the session does not have %q any more, which differs because %s", d.database, d.why)
		}
		want = strings.ReplaceAll(want, d.database, d.api)
	}
	same(t, sessionPath+" through the API", s.play(), want)
}

// serve makes a server and a token that bears the person's name, as the audit wants it. In the place of an elected
// leader, an operation makes a step whenever somebody has looked at it.
func (s *session) serve() *httptest.Server {
	s.Helper()
	db, err := postgres.Open(s.Context(), postgres.Config{DSN: s.dsn})
	if err != nil {
		s.Fatal(err)
	}
	s.Cleanup(db.Close)
	seat := operator.New(db)
	secret, err := seat.CreateToken(s.Context(), operator.Grant{Name: "ada@ops", Scopes: []string{"admin"}}, invalidation.By{Actor: "test", Reason: "test"})
	if err != nil {
		s.Fatal(err)
	}
	keeper := webhook.Keeper{DB: db, Vault: webhook.Vault{Key: "a key that nobody can guess"}}
	served, looked := api.New(db, api.Config{Webhooks: keeper}), regexp.MustCompile(`^/v1/operations/(\d+)$`)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		served.ServeHTTP(w, r)
		if m := looked.FindStringSubmatch(r.URL.Path); m != nil {
			if _, err := db.Exec(r.Context(), `SELECT penstock.step_operation($1::text::bigint)`, m[1]); err != nil {
				s.Error(err)
			}
		}
	}))
	s.Cleanup(server.Close)
	s.api = map[string]string{"PENSTOCK_SERVER": server.URL, "PENSTOCK_TOKEN": secret}
	return server
}

// TestEveryRouteOfTheCommandsIsInTheDescription looks the routes in the source of the commands up in docs/openapi.yaml.
func TestEveryRouteOfTheCommandsIsInTheDescription(t *testing.T) {
	known := addresses(t)
	sources, err := filepath.Glob("*.go")
	if err != nil {
		t.Fatal(err)
	}
	routes := map[string]string{}
	for _, source := range sources {
		text, err := os.ReadFile(source)
		if err != nil {
			t.Fatal(err)
		}
		for _, m := range regexp.MustCompile(`"(/v1/[^"?]*)"`).FindAllStringSubmatch(string(text), -1) {
			if !strings.HasSuffix(source, "_test.go") {
				routes[strings.ReplaceAll(m[1], "%v", "x")] = source
			}
		}
	}
	for route, source := range routes {
		if !slices.ContainsFunc(known, func(a *regexp.Regexp) bool {
			return a.MatchString("GET "+route) || a.MatchString("POST "+route) || a.MatchString("PUT "+route)
		}) {
			t.Errorf("%s calls %s, which is no route of the API", source, route)
		}
	}
	if len(routes) < 50 {
		t.Errorf("only %d routes were found in the source", len(routes))
	}
}

// addresses reads docs/openapi.yaml into patterns.
func addresses(t *testing.T) (patterns []*regexp.Regexp) {
	t.Helper()
	text, err := os.ReadFile("../../docs/openapi.yaml")
	if err != nil {
		t.Fatal(err)
	}
	var document struct {
		Paths map[string]map[string]any `yaml:"paths"`
	}
	if err := yaml.Unmarshal(text, &document); err != nil {
		t.Fatal(err)
	}
	for path, methods := range document.Paths {
		for method := range methods {
			pattern := regexp.MustCompile(`\{\w+\}`).ReplaceAllString(path, `[^/]+`)
			patterns = append(patterns, regexp.MustCompile("^"+strings.ToUpper(method)+" "+pattern+"$"))
		}
	}
	return patterns
}

func TestListsFollowTheCursorAsFarAsTheLimit(t *testing.T) {
	s := newSession(t)
	s.serve()
	if got := s.penstock("queue create mails --reason test"); got != "create queue mails: done\n" {
		t.Fatal(got)
	}
	lines := filepath.Join(t.TempDir(), "lines")
	if err := os.WriteFile(lines, []byte(strings.Repeat("{}\n", 2300)), 0o600); err != nil {
		t.Fatal(err)
	}
	if got := s.penstock("entry push mails --idempotency-key lists --lines " + lines); got != "2300 entries, ids 1 to 2300\n" {
		t.Fatal(got)
	}
	for _, c := range []struct {
		flags       string
		first, last int
	}{{"", 1, 50}, {"--limit 2100", 1, 2100}, {"--limit 9000", 1, 2300}, {"--after 2250", 2251, 2300}, {"--after 40 --limit 3", 41, 43}} {
		got := regexp.MustCompile(`"id":(\d+)`).FindAllStringSubmatch(s.penstock("entry list mails -o jsonl "+c.flags), -1)
		if len(got) != c.last-c.first+1 || got[0][1] != fmt.Sprint(c.first) || got[len(got)-1][1] != fmt.Sprint(c.last) {
			t.Errorf("%q lists %d entries, want %d to %d", c.flags, len(got), c.first, c.last)
		}
	}
}

// TestUnracedTheWayMakesNoDifference runs what the session does not touch both ways.
func TestUnracedTheWayMakesNoDifference(t *testing.T) {
	straight, through := newSession(t), newSession(t)
	through.serve()
	for _, line := range []string{
		"queue create mails --set capacity=3 --set payload_limit=40 --reason r",
		"queue alter mails --set max_concurrent=4 --unset run_timeout --reason r",
		`entry push mails '{"n": 1}' --idempotency-key a --flow acme --name news --cost 2 --priority 3`,
		`entry push mails '{"n": 1}' --idempotency-key a --flow acme --name news --cost 2 --priority 3`,
		`entry push mails '{"n": 2}' --idempotency-key a --flow acme`,
		`entry push mails '{"n": "0123456789012345678901234567890123456789"}'`,
		`entry push mails '{}' --unique-key u --unique-policy while_queued --due 1h --start-by 2h --finish-by 3h`,
		`entry push mails '{}' --unique-key u --unique-policy while_queued`,
		`entry push mails '{}' --unique-key u --unique-policy now_and_then`,
		`entry push mails '{}' --flow 0 --name 0`,
		`entry push mails '{}'`,
		"entry list mails --flow acme -o yaml", "entry list mails --name 0 -o wide", "entry list nobody",
		"entry show 1 -o json", "entry show 3 -o yaml", "entry show 99",
		"entry cancel 1 --reason r", "entry cancel 1 --reason r --yes", "entry explain 1", "entry cancel 1 --reason r --yes", "entry show 1 -o json", "entry explain 1 -o jsonl",
		"entry disable 3 --reason r", "entry list mails --state disabled", "entry enable 3 --reason r", "entry enable 3 --reason r",
		"entry cancel --queue mails --older-than 1h --per-second 5 --dry-run", "entry cancel --queue mails --flow 0 --reason r --yes",
		"operation list --queue mails", "operation follow 99",
		"audit list --since 1h --limit 2", "audit list --since 1ms --verb cancel",
		"queue history mails --over 90s", "queue list mails nobody", "queue list -o wide", "lock list --node nobody",
		"limit set provider --max-units 5 --reason r", "limit set provider --max-units 6 --reason r", "limit use mails provider --units 2 --reason r",
		"limit use nobody provider --units 2 --reason r", "limit use mails nothing --units 2 --reason r", "limit list -o wide",
		"flow weight acme 2 --queue mails --reason r", "flow weight acme 0 --queue mails --reason r", "flow list",
		"application quota default --rate 5 --reason r", "application quota default --max-units 3 --reason r", "application list -o wide",
		"pause set flow 0 --queue mails --until 1h --reason r", "pause list -o wide", "pause end flow 0 --queue mails --reason r",
		`model register org/llama '{"protocol": "openai"}' --reason r`, `model register org/llama '{"protocol": "oip"}' --reason r`, "model list",
		`model override org/llama '{"batch": {"items": 4}}' --reason r`,
		`model register org/llama '{"protocol": "openai"}' --reason r`, `model override org/llama --clear --reason r`,
		"instance register org/llama gpu/1 http://127.0.0.1:1 --slots 2 --reason r", "instance register org/llama gpu/1 http://127.0.0.1:2 --slots 3 --reason r",
		"instance register nothing gpu/1 http://127.0.0.1:1 --slots 2 --reason r",
		"instance list org/llama -o yaml", "instance drain org/llama gpu/1 --reason r", "instance remove org/llama gpu/1 --yes --reason r",
		"model remove org/llama --yes --reason r", "model remove org/llama --yes --reason r",
		"queue create reports --kind cron --reason r", "cron create 'week ly?' reports '@every 5m' --reason r", "cron pause 'week ly?' --until 1h --reason r",
		"cron list", "cron show 'week ly?'", "cron create 'week ly?' reports '@every 5m' --reason r", "cron drop 'week ly?' --yes --reason r",
		"group list mails -o json", "group list nobody", "failure list nobody", "failure causes nobody", "failure show 3", "failure retry 3 --reason r",
		"node list", "lock verify", "batch list",
		"queue drop mails --yes --force --reason r", "queue drop mails --yes --force --reason r",
	} {
		if d, a := straight.penstock(line), through.penstock(line); d != a {
			t.Errorf("%s\non the database:\n%s\nthrough the API:\n%s", line, d, a)
		}
	}
}

// TestARedirectIsNoAnswer keeps a POST from arriving as a GET that succeeds.
func TestARedirectIsNoAnswer(t *testing.T) {
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodGet {
			_, _ = io.WriteString(w, "{}")
			return
		}
		http.Redirect(w, r, r.URL.Path, http.StatusMovedPermanently)
	}))
	defer server.Close()
	out, errs, code := command(t, nil, "queue", "create", "mails", "--reason", "r", "--server", server.URL)
	if code != exitUnavailable || out != "" || !strings.Contains(errs, "301") {
		t.Errorf("exit %d: %s%s", code, out, errs)
	}
}

func TestTopThroughTheAPI(t *testing.T) {
	s := newSession(t)
	s.serve()
	s.penstock("queue create mails --reason test")
	s.penstock("entry push mails {}")
	if got := s.penstock("top --once --interval 100ms"); !strings.Contains(got, "waiting 1 ") || !strings.Contains(got, "\nmails  task  no node") {
		t.Error(got)
	}
}

func TestWhyTheServerCannotBeUsed(t *testing.T) {
	s := newSession(t)
	server := s.serve()
	db := operator.New(s.pool)
	token := func(name, scope string) string {
		secret, err := db.CreateToken(t.Context(), operator.Grant{Name: name, Scopes: []string{scope}}, invalidation.By{Actor: "test", Reason: "test"})
		if err != nil {
			t.Fatal(err)
		}
		return secret
	}
	good, reader, expired := s.api["PENSTOCK_TOKEN"], token("reader", "read"), token("lapsed", "admin")
	if _, err := s.pool.Exec(t.Context(), `UPDATE penstock.api_token SET expires_at = clock_timestamp() WHERE name = 'lapsed'`); err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(t.TempDir(), "token")
	if err := os.WriteFile(file, []byte(good+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	odd := httptest.NewServer(http.NotFoundHandler())
	defer odd.Close()
	moved := httptest.NewServer(http.RedirectHandler("https://penstock.example.com/v1/queues", http.StatusPermanentRedirect))
	defer moved.Close()
	proxy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		http.Error(w, "<html>bad gateway</html>", http.StatusBadGateway)
	}))
	defer proxy.Close()
	silent := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body) // until then the server does not see that the client has gone
		<-r.Context().Done()
	}))
	defer silent.Close()
	type env map[string]string
	for what, c := range map[string]struct {
		env  env
		line string
		code int
		says string
	}{
		"a token in the environment":  {env{"PENSTOCK_SERVER": server.URL, "PENSTOCK_TOKEN": good}, "queue list", exitDone, "QUEUE"},
		"a token in a file":           {nil, "queue list --server " + server.URL + " --token-file " + file, exitDone, "QUEUE"},
		"a flag beats the variable":   {env{"PENSTOCK_DATABASE_URL": "postgres://nobody@127.0.0.1:1/none"}, "queue list --server " + server.URL + " --token " + good, exitDone, "QUEUE"},
		"no token":                    {nil, "queue list --server " + server.URL, exitUnavailable, "has no token"},
		"an invented token":           {nil, "queue list --token " + operator.NewSecret() + " --server " + server.URL, exitUnavailable, "not known"},
		"no token at all":             {nil, "queue list --token secret --server " + server.URL, exitUnavailable, "next: check the token"},
		"an expired token":            {nil, "queue list --token " + expired + " --server " + server.URL, exitUnavailable, "has expired"},
		"too little of a token":       {nil, "queue create q --reason r --token " + reader + " --server " + server.URL, exitUnavailable, "it needs scope admin and has read"},
		"a token twice":               {nil, "queue list --token x --token-file " + file + " --server " + server.URL, exitUsage, "not both"},
		"a file that is not there":    {nil, "queue list --token-file /nowhere/token --server " + server.URL, exitUsage, "read token"},
		"nobody listens":              {nil, "queue list --server http://127.0.0.1:1", exitUnavailable, "next: check --server"},
		"a proxy redirects":           {nil, "queue list --server " + moved.URL, exitUnavailable, "not followed, to https://penstock.example.com/v1/queues\nnext: give the address that it redirects to"},
		"a proxy without a leader":    {nil, "queue list --server " + proxy.URL, exitUnavailable, "check that leaders run"},
		"something else answers":      {nil, "queue list --server " + odd.URL, exitUnavailable, "no leader of this version"},
		"nothing is answered":         {nil, "queue list --timeout 50ms --server " + silent.URL, exitTimeout, "--timeout"},
		"a change is not answered":    {nil, "queue create q --reason r --timeout 50ms --server " + silent.URL, exitTimeout, "next: whether it was done is not known: penstock queue show prints its state; look"},
		"a change is not sent":        {nil, "queue create q --reason r --server http://127.0.0.1:1", exitUnavailable, "next: check --server"},
		"not an address":              {nil, "queue list --server localhost:8420", exitUsage, "http://host:port"},
		"a password in the address":   {nil, "queue list --server http://u:secret@h", exitUsage, "http://host:port"},
		"two ways":                    {nil, "queue list --server http://x --database-url postgres://x", exitUsage, "--server (PENSTOCK_SERVER) and --database-url (PENSTOCK_DATABASE_URL) are both given"},
		"two ways in the environment": {env{"PENSTOCK_SERVER": "http://x", "PENSTOCK_DATABASE_URL": "postgres://x"}, "queue list", exitUsage, "both given"},
		"no way":                      {nil, "queue list", exitUsage, "Give --server (PENSTOCK_SERVER) to go through its API, or --database-url"},
		"an actor":                    {nil, "queue list --actor ada --server http://x", exitUsage, "the actor is that of the token"},
		"doctor":                      {nil, "doctor --deep --server http://x", exitUsage, "it works only on the database"},
		"migrate":                     {nil, "migrate up --server http://x", exitUsage, "penstock migrate up works only on the database: use --database-url"},
	} {
		t.Run(what, func(t *testing.T) {
			var out bytes.Buffer
			a := newApp(strings.NewReader(""), &out, &out, func(name string) string { return c.env[name] })
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			if code := run(ctx, a, strings.Fields(c.line)); code != c.code || !strings.Contains(out.String(), c.says) {
				t.Errorf("exit %d, want %d with %q: %s", code, c.code, c.says, out.String())
			}
			if strings.Contains(out.String(), "pst_") || strings.Contains(out.String(), "secret") {
				t.Errorf("it prints the token: %s", out.String())
			}
		})
	}
}

func TestConfigThatDoesNotGoWithItsOverrideIsRefused(t *testing.T) {
	s := newSession(t)
	for _, way := range []string{"on the database", "through the API"} {
		if way == "through the API" {
			s.serve()
		}
		s.penstock(`model register m '{"protocol": "oip"}' --reason r`)
		s.penstock(`model override m '{"batch": {"items": 4}}' --reason r`)
		if got := s.penstock(`model register m '{"protocol": "cog"}' --reason r`); !strings.Contains(got, "the override of the model") || !strings.Contains(got, "batch.items") {
			t.Errorf("%s it says %s", way, got)
		}
	}
}

// TestDoctorAndMigrateStatusThroughTheAPI compares the reports of both ways.
func TestDoctorAndMigrateStatusThroughTheAPI(t *testing.T) {
	s := newSession(t)
	s.serve()
	for _, line := range []string{"doctor -o json", "migrate status -o json"} {
		var names [2][]string
		for way, environment := range []map[string]string{{"PENSTOCK_DATABASE_URL": s.dsn}, s.api} {
			var out, problems bytes.Buffer
			a := newApp(strings.NewReader(""), &out, &problems, func(name string) string { return environment[name] })
			if code := run(t.Context(), a, strings.Fields(line)); code != exitDone && code != exitWarning && code != exitCritical {
				t.Fatalf("%s by %v: exit %d: %s", line, environment, code, problems.String())
			}
			var rows []struct{ Check, Name, State string }
			if err := json.Unmarshal(out.Bytes(), &rows); err != nil {
				t.Fatalf("%s: %v in %s", line, err, out.String())
			}
			for _, row := range rows {
				names[way] = append(names[way], row.Check+row.Name+" "+row.State)
			}
		}
		if len(names[0]) == 0 || !slices.Equal(names[0], names[1]) {
			t.Errorf("%s: %q on the database, %q through the API", line, names[0], names[1])
		}
	}
}

func TestARegistrationKeepsWhatItDoesNotName(t *testing.T) {
	s := newSession(t)
	s.penstock(`model register llama '{"protocol": "openai"}' --reason r`)
	for _, c := range []struct{ flags, slots, labels string }{
		{"", "1", "{}"},
		{`--slots 8 --labels '{"zone": "a"}'`, "8", `{"zone": "a"}`},
		{"", "8", `{"zone": "a"}`},
		{"--slots 4", "4", `{"zone": "a"}`},
		{"--labels {}", "4", "{}"},
	} {
		s.penstock("instance register llama gpu-1 http://127.0.0.1:1 --reason r " + c.flags)
		var slots, labels string
		if err := s.pool.QueryRow(t.Context(), `SELECT slots::text, labels::text FROM penstock.instance`).Scan(&slots, &labels); err != nil {
			t.Fatal(err)
		}
		if slots != c.slots || labels != c.labels {
			t.Errorf("%q: %s slots and labels %s, want %s and %s", c.flags, slots, labels, c.slots, c.labels)
		}
	}
}
