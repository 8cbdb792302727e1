package e2e_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"
)

// planted are secrets that the programs are given. None of them may come out anywhere but where it belongs.
var planted = map[string]string{
	"password of the database":      "planted-database-7f3a",
	"header of a model":             "planted-header-91bc",
	"password in an endpoint":       "planted-endpoint-22de",
	"key of callbacks of workers":   "planted-callback-key-53ff",
	"key that seals secrets":        "planted-webhook-key-08aa",
	"password of the trace address": "planted-collector-64cd",
	"query of a callback address":   "planted-query-77ee",
}

// gathered keeps what comes out of the programs, by its source.
type gathered struct {
	mu   sync.Mutex
	from map[string][]byte
}

func (g *gathered) add(source string, text []byte) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.from[source] = append(g.from[source], text...)
}

// TestPlantedSecretsComeOutNowhere gives the programs every kind of secret, makes them fail and succeed,
// and then
// searches logs, metrics, traces, answers of the API, output of the commands, errors and the audit.
func TestPlantedSecretsComeOutNowhere(t *testing.T) {
	t.Parallel()
	p := &plant{site: newSite(t, 0)}
	out := &gathered{from: map[string][]byte{}}
	collector := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		out.add("traces", body)
	}))
	t.Cleanup(collector.Close)
	// The worker fails every second call, with a text that has nothing of the request.
	var calls atomic.Int32
	worker := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		if r.Method != http.MethodPost {
			fmt.Fprint(w, `{}`)
			return
		}
		if got := r.Header.Get("X-Model-Key"); got != planted["header of a model"] {
			t.Errorf("the worker got the header %q", got)
		}
		if calls.Add(1)%2 == 0 {
			http.Error(w, `{"error": "the kernel failed"}`, http.StatusInternalServerError)
			return
		}
		fmt.Fprint(w, `{"status": "success", "result": {"n": 1}}`)
	}))
	t.Cleanup(worker.Close)

	key := filepath.Join(t.TempDir(), "key")
	p.must(os.WriteFile(key, []byte(planted["key of callbacks of workers"]), 0o600))
	env := []string{
		"PENSTOCK_SECRET_MODEL=" + planted["header of a model"], "HOOKS=" + planted["key that seals secrets"],
	}
	launch := func(name, duty string, args ...string) *program {
		role := "secret_" + duty
		p.login(role, duty)
		at, err := url.Parse(p.dsn)
		p.must(err)
		at.User = url.UserPassword(role, planted["password of the database"])
		traces, err := url.Parse(collector.URL + "/v1/traces")
		p.must(err)
		traces.User = url.UserPassword("u", planted["password of the trace address"])
		args = append([]string{
			"--database-url", at.String(), "--log-level", "debug", "--listen", "127.0.0.1:0",
			"--trace-endpoint", traces.String(),
		}, args...)
		return startWith(t, env, name, name, args...)
	}
	l := launch("leader", "leader", "--debug-listen", "127.0.0.1:0", "--inference-callback-key", "file:"+key,
		"--callback-allow-networks", "127.0.0.0/8")
	started := l.says("leader started")
	address, debug := "http://"+value(started, "listen"), "http://"+value(started, "debug")
	command := func(args ...string) []byte {
		dir, err := binaries()
		p.must(err)
		cmd := exec.CommandContext(t.Context(), filepath.Join(dir, "penstock"),
			append([]string{"--database-url", p.dsn}, args...)...)
		cmd.Env = env
		text, _ := cmd.CombinedOutput() // the doctor ends with its verdict
		return text
	}
	endpoint := strings.Replace(worker.URL, "http://", "http://user:"+planted["password in an endpoint"]+"@",
		1) + "/run"
	for _, args := range [][]string{
		{
			"model", "register", "m",
			`{"protocol": "dispatcher", "headers": {"X-Model-Key": "env:PENSTOCK_SECRET_MODEL"}}`,
		},
		{"instance", "register", "m", "other", endpoint, "--slots", "2"}, // refused: a header is the place for it
		{"instance", "register", "m", "gpu", worker.URL + "/run", "--slots", "2"},
	} {
		out.add(strings.Join(args[:2], " "), command(append(args, "--yes", "--reason", "test")...))
	}
	if n := p.query(`SELECT count(*) FROM penstock.instance`); n != 1 {
		t.Fatalf("no instance was made: %s", out.from)
	}
	receiver := "http://127.0.0.1:9/hook"
	var secrets []string
	secrets = append(secrets,
		strings.TrimSpace(string(command("webhook", "register", receiver, "--internal", "--key", "env:HOOKS",
			"--yes", "--reason", "test"))))
	admin := strings.TrimSpace(string(command("token", "create", "root", "--scope", "admin", "--yes", "--reason", "test")))
	admin = admin[strings.LastIndexAny(admin, " \n")+1:]
	secrets = append(secrets, admin)
	n := launch("tasknode", "node", "--governor=false", "--webhook-key", "env:HOOKS", "--webhook-allow-networks",
		"127.0.0.0/8",
		"--inference-callback-key", "file:"+key, "--inference-callback-url", address)
	probes := "http://" + value(n.says("task node started"), "listen")

	send := func(source, method, to, body, token string) []byte {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		r, err := http.NewRequestWithContext(ctx, method, to, strings.NewReader(body))
		p.must(err)
		r.Header.Set("Content-Type", "application/json")
		r.Header.Set("Authorization", "Bearer "+token)
		answer, err := http.DefaultClient.Do(r)
		p.must(err)
		defer answer.Body.Close()
		text, _ := io.ReadAll(answer.Body)
		out.add(source+" "+to, text)
		return text
	}
	for i := range 6 {
		accepted := send("push", "POST", address+"/v1/queues/m/entries",
			fmt.Sprintf(`{"payload": {"n": %d}, "callback": {"url": %q}}`,
				i, receiver+"?key="+planted["query of a callback address"]), admin)
		if !bytes.Contains(accepted, []byte("inserted")) {
			t.Fatalf("push: %s", accepted)
		}
	}
	eventually(t, time.Minute, "each entry was called and a callback was tried", func() bool {
		return p.query(`SELECT count(*) FROM penstock.result WHERE outcome = 'done'`) >= 3 &&
			p.query(`SELECT count(*) FROM penstock.entry e WHERE e.attempt > 0`) >= 1
	})
	// Requests that are refused: with a secret of another token's form, a secret as a name, and none.
	send("refused", "GET", address+"/v1/queues", "", admin[:len(admin)-1]+"0")
	for _, path := range []string{
		"/v1/queues", "/v1/entries?queue=m", "/v1/entries/1", "/v1/failures?queue=m", "/v1/models", "/v1/models/m",
		"/v1/instances?model=m",
		"/v1/nodes", "/v1/audit", "/v1/tokens", "/v1/doctor", "/v1/snapshot", "/v1/usage?queue=m", "/v1/slots?model=m",
		"/readyz",
	} {
		send("api", "GET", address+path, "", admin)
	}
	for _, at := range []string{
		debug + "/metrics", debug + "/debug/pprof/cmdline", probes + "/metrics",
		probes + "/readyz",
	} {
		send("probe", "GET", at, "", "")
	}
	for _, args := range [][]string{
		{"doctor"},
		{"audit"},
		{"model", "show", "m"},
		{"instance", "list"},
		{"webhook", "list"},
		{"entry", "show", "1"},
		{"entry", "explain", "1"},
		{"queue", "show", "m"},
		{"failure", "list", "--queue", "m"},
		{"model", "show", "m", "-o", "json"},
		{"instance", "list", "-o", "json"},
	} {
		out.add("penstock "+strings.Join(args, " "), command(args...))
	}
	for _, table := range []string{"audit", "failure", "result"} {
		var text []byte
		p.must(p.pool.QueryRow(t.Context(),
			`SELECT coalesce(jsonb_agg(to_jsonb(x))::text, '') FROM penstock.`+table+` x`).Scan(&text))
		out.add("table "+table, text)
	}
	var stored []byte // sealed, or a hash
	p.must(p.pool.QueryRow(t.Context(), `SELECT (SELECT jsonb_agg(to_jsonb(x)) FROM penstock.webhook_endpoint x)::text
		|| (SELECT jsonb_agg(to_jsonb(x)) FROM penstock.api_token x)::text`).Scan(&stored))
	out.add("stored secrets", stored)
	for _, one := range []*program{n, l} { // which sends the traces that are left
		one.signal(syscall.SIGTERM)
		one.exit()
	}
	out.add("log of the leader", []byte(strings.Join(l.said(), "\n")))
	out.add("log of the node", []byte(strings.Join(n.said(), "\n")))

	for what, secret := range planted {
		for source, text := range out.from {
			if !bytes.Contains(text, []byte(secret)) && !bytes.Contains(text, []byte(url.QueryEscape(secret))) {
				continue
			}
			if what == "query of a callback address" && (strings.HasPrefix(source, "api") || strings.HasPrefix(source,
				"table result") ||
				strings.HasPrefix(source, "penstock entry")) {
				continue // the entry is shown with its callback to those that may read it
			}
			at := bytes.Index(text, []byte(secret))
			t.Errorf("%s is in %s: ...%s", what, source, text[max(0, at-100):min(len(text), at+60)])
		}
	}
	for _, secret := range secrets {
		for source, text := range out.from {
			if len(secret) < 20 || bytes.Contains(text, []byte(secret)) {
				t.Errorf("a secret of %d characters that was made is in %s", len(secret), source)
			}
		}
	}
	for _, source := range []string{
		"traces", "log of the leader", "log of the node", "table audit",
		"api " + address + "/v1/audit",
	} {
		if len(out.from[source]) == 0 {
			t.Errorf("nothing was gathered from %s", source)
		}
	}
	var kept struct{ Items []json.RawMessage }
	if err := json.Unmarshal(out.from["api "+address+"/v1/instances?model=m"],
		&kept); err != nil || len(kept.Items) != 1 {
		t.Errorf("instances: %s (%v)", out.from["api "+address+"/v1/instances?model=m"], err)
	}
}
