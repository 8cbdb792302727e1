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
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"
	"unicode/utf8"
)

// hostile are texts as JSON strings: they end headers and lines, steer terminals, or look like something
// else.
var hostile = []string{
	`"\r\nX-Injected: yes"`, `"a\nb\tc"`, `"\u001b[2J\u001b]0;owned\u0007"`, `"\u009b31m"`, `"\u202egnp.exe"`,
	`"\uffff\ufeff"`,
	`"'; DROP TABLE penstock.entry; --"`, `"${env:HOME} {{.}} %s $1"`, `"../../../etc/passwd"`,
	`"<script>alert(1)</script>"`,
	`"CUDA error: device-side assert triggered Xid 79"`, `"` + strings.Repeat("x\\u001b", 300) + `"`,
}

// TestHostileTextsGoThroughNodeWorkerAndWebhook pushes such texts in every field that takes a text. The
// worker answers
// half of them with an error that repeats the payload. Each entry ends, headers are what Penstock wrote,
// the receiver
// gets valid JSON, no instance is quarantined, and the commands print no control characters.
func TestHostileTextsGoThroughNodeWorkerAndWebhook(t *testing.T) {
	t.Parallel()
	p := &plant{site: newSite(t, 0)}
	var mu sync.Mutex
	delivered := map[string]bool{}
	injected := func(r *http.Request) {
		for name, values := range r.Header {
			if name == "X-Injected" || strings.ContainsAny(strings.Join(values, ""), "\r\n\x1b\u009b") {
				t.Errorf("%s %s has the header %s: %q", r.Method, r.URL.Path, name, values)
			}
		}
	}
	worker := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		injected(r)
		body, _ := io.ReadAll(r.Body)
		w.Header().Set("Content-Type", "application/json")
		switch {
		case r.Method != http.MethodPost:
			fmt.Fprint(w, `{}`)
		case bytes.Contains(body, []byte(`"fails":true`)) || bytes.Contains(body, []byte(`"fails": true`)):
			w.WriteHeader(http.StatusBadRequest)
			text, _ := json.Marshal("bad input: " + string(body))
			fmt.Fprintf(w, `{"error": %s}`, text)
		default:
			fmt.Fprintf(w, `{"status": "success", "result": %s}`, body)
		}
	}))
	t.Cleanup(worker.Close)
	receiver := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		injected(r)
		body, _ := io.ReadAll(r.Body)
		if !json.Valid(body) || !utf8.Valid(body) {
			t.Errorf("a callback is not JSON: %q", body)
		}
		mu.Lock()
		defer mu.Unlock()
		delivered[r.Header.Get("Webhook-Id")] = true
	}))
	t.Cleanup(receiver.Close)
	l := start(t, "leader", "leader", "--listen", "127.0.0.1:0", "--debug-listen", "127.0.0.1:0", "--open",
		"--database-url", p.dsn,
		"--callback-allow-networks", "127.0.0.0/8")
	address := "http://" + value(l.says("leader started"), "listen")
	p.exec(`SELECT penstock.register_model('m', '{"protocol": "dispatcher"}'),
	               penstock.register_instance('m', 'gpu', '` + worker.URL + `/run', 4)`)
	p.login("node_h", "node")
	at, err := url.Parse(p.dsn)
	p.must(err)
	at.User = url.User("node_h")
	n := startWith(t, []string{"HOOKS=a key for tests alone"}, "tasknode", "tasknode", "--database-url", at.String(),
		"--listen",
		"127.0.0.1:0", "--governor=false", "--webhook-key", "env:HOOKS", "--webhook-allow-networks", "127.0.0.0/8")
	n.says("task node started")
	pushed := int64(0)
	for i, text := range hostile {
		for _, fails := range []bool{false, true} {
			body := fmt.Sprintf(`{"payload": {"n": %d, "fails": %v, "text": %s}, "callback": {"url": "%s/hook", "context": %s}, "name": %s, "flow": %s, "lock_key": %s}`,
				i, fails, text, receiver.URL, text, text, text, text)
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			r, err := http.NewRequestWithContext(ctx, http.MethodPost, address+"/v1/queues/m/entries",
				strings.NewReader(body))
			p.must(err)
			r.Header.Set("Content-Type", "application/json")
			r.Header.Set("Idempotency-Key", fmt.Sprint(i, fails))
			answer, err := http.DefaultClient.Do(r)
			p.must(err)
			said, _ := io.ReadAll(answer.Body)
			answer.Body.Close()
			cancel()
			switch answer.StatusCode {
			case http.StatusCreated:
				pushed++
			case http.StatusUnprocessableEntity: // a field refuses such texts, or as many characters
			default:
				t.Errorf("push of %.60s: %d %s", text, answer.StatusCode, said)
			}
		}
	}
	if pushed < int64(len(hostile)) {
		t.Errorf("%d of %d entries were accepted", pushed, 2*len(hostile))
	}
	for deadline := time.Now().Add(2 * time.Minute); p.query(`SELECT count(*) FROM penstock.entry`) > 0; time.Sleep(50 * time.Millisecond) {
		if time.Now().After(deadline) {
			p.complain("%d entries have not ended", `
SELECT e.id, format('%s attempt %s: %s %s', q.name, e.attempt, left(e.payload::text, 300),
                    (SELECT jsonb_agg(x) FROM penstock.explain_entry(e.id) x))
  FROM penstock.entry e JOIN penstock.queue q ON q.id = e.queue_id`)
			t.FailNow()
		}
	}
	mu.Lock()
	callbacks := int64(len(delivered))
	mu.Unlock()
	if callbacks != pushed {
		t.Errorf("%d callbacks of %d entries", callbacks, pushed)
	}
	p.complain("%d instances are quarantined: the text of an input was taken for evidence against one", `
SELECT id, state || ': ' || coalesce(quarantine_reason, '') FROM penstock.instance WHERE quarantined_until IS NOT NULL`)
	p.consistent()
	dir, err := binaries()
	p.must(err)
	for _, args := range [][]string{
		{"entry", "list", "--queue", "m", "--state", "done"},
		{"failure", "list", "--queue", "m"},
		{"failure", "list", "--queue", "m", "-o", "wide"},
		{"failure", "list", "--queue", "m", "-o", "json"},
		{"entry", "show", "1"},
		{"entry", "show", "2"},
		{"flow", "usage", "--queue", "m"},
		{"queue", "show", "m"},
		{"top", "--once"},
	} {
		command := exec.CommandContext(t.Context(), filepath.Join(dir, "penstock"),
			append([]string{"--database-url", p.dsn}, args...)...)
		out, _ := command.CombinedOutput()
		if bytes.ContainsAny(out, "\x1b\x07\r\u009b\u202e") {
			t.Errorf("penstock %s prints control characters: %q", strings.Join(args, " "), out)
		}
	}
	for _, said := range [][]string{l.said(), n.said()} {
		if text := strings.Join(said, ""); strings.ContainsAny(text, "\x1b\u009b\r") {
			t.Error("a log has control characters")
		}
	}
}
