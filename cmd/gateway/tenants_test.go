package main

import (
	"context"
	"encoding/json"
	"net/http"
	"strings"
	"testing"
)

// token makes a token with the scope call, limited to applications and queues if some are given. Its secret is its name.
func (s *site) token(name, applications, queues string) {
	s.Helper()
	s.exec(`INSERT INTO penstock.api_token (name, hash, scopes, created_by, applications, queues)
	        VALUES ($1, sha256(convert_to($1, 'UTF8')), '{call}', 'test', $2::text[], $3::text[])`, name, applications, queues)
}

// as sends a request with a token, and returns the status and the answer.
func (f *front) as(t *testing.T, token, method, path, kind, body string) (status int, text string) {
	t.Helper()
	request, err := http.NewRequestWithContext(t.Context(), method, f.url+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	request.Header.Set("Authorization", "Bearer "+token)
	request.Header.Set("Content-Type", kind)
	return f.do(t, request, &text), text
}

// made is what is read of the answer to a creation.
type made struct {
	ID   string
	URLs struct{ Stream string }
}

func (f *front) make(t *testing.T, token, path, kind, body string) (m made) {
	t.Helper()
	status, text := f.as(t, token, "POST", path, kind, body)
	if err := json.Unmarshal([]byte(text), &m); err != nil || m.ID == "" || status >= 300 {
		t.Fatalf("%s: %d %s", path, status, text)
	}
	return m
}

// No route gives a client what belongs to another, or says that it is there.
func TestClientsDoNotSeeEachOther(t *testing.T) {
	t.Parallel()
	s := newSite(t, 1)
	s.token("owner", "{}", "{}")
	s.token("other", "{}", "{}")
	f := s.startGateway(func(c *Config) { c.Gateway.Open = false })
	const form = "--x\r\nContent-Disposition: form-data; name=\"purpose\"\r\n\r\nbatch\r\n" +
		"--x\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a\"\r\n\r\nx\r\n--x--\r\n"
	const batch = `{"endpoint":"/v1/chat/completions","completion_window":"24h","input_file_id":"`
	file := f.make(t, "owner", "/v1/files", "multipart/form-data; boundary=x", form).ID
	of := f.make(t, "owner", "/v1/batches", "application/json", batch+file+`"}`).ID
	p := f.make(t, "owner", "/v1/predictions", "application/json", `{"version":"m","input":{}}`)
	for _, c := range []struct {
		method, path, body string
		status             int
	}{
		{"GET", "/v1/files/" + file, "", 404},
		{"GET", "/v1/files/" + file + "/content", "", 404},
		{"DELETE", "/v1/files/" + file, "", 404},
		{"GET", "/v1/files", "", 200},
		{"GET", "/v1/files?after=" + file, "", 400},
		{"POST", "/v1/batches", batch + file + `"}`, 400},
		{"GET", "/v1/batches/" + of, "", 404},
		{"POST", "/v1/batches/" + of + "/cancel", "", 404},
		{"GET", "/v1/batches", "", 200},
		{"GET", "/v1/batches?after=" + of, "", 400},
		{"GET", "/v1/predictions/" + p.ID, "", 404},
		{"POST", "/v1/predictions/" + p.ID + "/cancel", "", 404},
		{"GET", "/v1/predictions", "", 200},
		{"GET", "/v1/predictions?cursor=" + p.ID, "", 422},
		{"GET", "/v1/predictions/" + p.ID + "/stream/another", "", 404},
	} {
		status, text := f.as(t, "other", c.method, c.path, "application/json", c.body)
		var list struct{ Data, Results []any }
		_ = json.Unmarshal([]byte(text), &list) // an error has neither
		if status != c.status || len(list.Data)+len(list.Results) > 0 {
			t.Errorf("%s %s: got %d %s, want %d", c.method, c.path, status, text, c.status)
		}
	}
	for _, path := range []string{"/v1/files/" + file, "/v1/batches/" + of, "/v1/predictions/" + p.ID} {
		if status, text := f.as(t, "owner", "GET", path, "", ""); status != 200 || strings.Contains(text, `"status":"cancel`) {
			t.Errorf("%s: got %d %s", path, status, text)
		}
	}
}

// A token that is limited to applications or queues may use their models alone.
func TestLimitedTokensUseTheModelsOfTheirQueues(t *testing.T) {
	t.Parallel()
	s := newSite(t, 1)
	name := s.queue.Name
	s.exec(`UPDATE penstock.queue SET application = 'shop' WHERE name = $1`, name)
	s.token("any", "{}", "{}")
	s.token("shop", "{shop}", "{}")
	s.token("queue", "{shop}", "{"+name+"}")
	s.token("billing", "{billing}", "{}")
	s.token("elsewhere", "{shop}", "{another}")
	s.token("named", "{shop}", "{}")
	s.exec(`INSERT INTO penstock.gateway_token (name, models) VALUES ('named', '{n}')`)
	f := s.startGateway(func(c *Config) { c.Gateway.Open = false })
	for token, may := range map[string]bool{
		"any": true, "shop": true, "queue": true, "billing": false, "elsewhere": false, "named": false,
	} {
		if status, text := f.as(t, token, "GET", "/v1/models", "", ""); status != 200 || strings.Contains(text, `"m"`) != may {
			t.Errorf("%s: models are %s", token, text)
		}
		status, text := f.as(t, token, "POST", "/v1/predictions", "application/json", `{"version":"m","input":{}}`)
		if (status == 201) != may || (!may && status != 404) {
			t.Errorf("%s: got %d %s", token, status, text)
		}
	}
}

// A token whose budget is spent is refused, and one that is revoked is refused while the use of GPU time cannot be read.
func TestRevokedTokensDoNotWaitForBudgets(t *testing.T) {
	t.Parallel()
	s := newSite(t, 1)
	for _, name := range []string{"spent", "gone"} {
		s.token(name, "{}", "{}")
	}
	s.exec(`UPDATE penstock.api_token SET flows = ARRAY[name], gpu_ms = 1000, gpu_period = 'day'`)
	s.exec(`INSERT INTO penstock.usage_hour (hour, queue_id, model, flow, calls, gpu_ms, wasted_ms, tokens_in, tokens_cached, tokens_out)
	        SELECT date_trunc('hour', now() + v.ahead, 'UTC'), q.id, 'm', 'spent', 1, 1000, 0, 0, 0, 0
	          FROM (SELECT min(id) AS id FROM penstock.queue) q, (VALUES (interval '0'), (interval '1 day')) v(ahead)`)
	f := s.startGateway(func(c *Config) { c.Gateway.Open = false })
	status := func(token, method, path string) int {
		got, _ := f.as(t, token, method, path, "application/json", `{"model":"m","messages":[]}`)
		return got
	}
	s.eventually("the budget is known", func() bool {
		return status("spent", "POST", "/v1/chat/completions") == http.StatusTooManyRequests
	})
	if got := status("gone", "GET", "/v1/models"); got != http.StatusOK {
		t.Errorf("a valid token: %d", got)
	}
	holder, err := s.pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = holder.Rollback(context.WithoutCancel(t.Context())) }()
	if _, err := holder.Exec(t.Context(), `LOCK TABLE penstock.usage_hour`); err != nil {
		t.Fatal(err)
	}
	s.exec(`UPDATE penstock.api_token SET revoked_at = now() WHERE name = 'gone'`)
	s.eventually("the revoked token is refused", func() bool {
		return status("gone", "GET", "/v1/models") == http.StatusUnauthorized
	})
	if got := status("spent", "POST", "/v1/chat/completions"); got != http.StatusTooManyRequests {
		t.Errorf("the budget was forgotten: %d", got)
	}
}

// A token's requests in flight at one gateway count at the others.
func TestLimitsOfATokenHoldOverGateways(t *testing.T) {
	t.Parallel()
	s := newSite(t, 4)
	s.token("shop", "{}", "{}")
	s.exec(`SELECT penstock.set_gateway_token('shop', in_flight => 1, reason => 'test')`)
	guarded := func(c *Config) { c.Gateway.Open = false }
	first, second := s.startGateway(guarded), s.startGateway(guarded)
	status := func(f *front, body string) int {
		status, _ := f.as(t, "shop", http.MethodPost, "/v1/chat/completions", "application/json", body)
		return status
	}
	held := make(chan int)
	go func() { held <- status(first, hold) }()
	// Alone at first: a request of the other gateway that is known here would have this one refused.
	s.eventually("the request is at the worker", func() bool {
		_, _, begun := s.gpu.counts()
		return begun == 1
	})
	s.eventually("the other gateway refuses", func() bool { return status(second, quick) == http.StatusTooManyRequests })
	close(s.gpu.release)
	if got := <-held; got != http.StatusOK {
		t.Errorf("the request in flight got %d", got)
	}
	s.eventually("the other gateway lets it in", func() bool { return status(second, quick) == http.StatusOK })
}

// What a token may push, and how urgently, holds for the entries that a gateway makes of its requests.
func TestLimitsOfATokenOnPushesHoldAtGateways(t *testing.T) {
	t.Parallel()
	s := newSite(t, 1)
	s.token("acme", "{}", "{}")
	s.exec(`UPDATE penstock.api_token SET priority_max = 3, rate = 0.0001, burst = 2`)
	s.exec(`SELECT penstock.set_gateway_token('acme', criticality => 'critical', reason => 'test')`)
	f := s.startGateway(func(c *Config) { c.Gateway.Open = false })
	request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, f.url+"/v1/chat/completions", strings.NewReader(quick))
	if err != nil {
		t.Fatal(err)
	}
	request.Header.Set("Authorization", "Bearer acme")
	request.Header.Set("Prefer", "respond-async")
	request.Header.Set("X-Penstock-Criticality", "critical")
	var text string
	if status := f.do(t, request, &text); status != http.StatusAccepted {
		t.Fatalf("got %d %s", status, text)
	}
	var priority int
	if err := s.pool.QueryRow(t.Context(), `SELECT max(priority) FROM penstock.ready`).Scan(&priority); err != nil || priority != 3 {
		t.Errorf("the entry has priority %d, want 3: %v", priority, err)
	}
	const ask = `{"version":"m","input":{}}`
	if status, text := f.as(t, "acme", "POST", "/v1/predictions", "application/json", ask); status != http.StatusCreated {
		t.Errorf("got %d %s", status, text)
	}
	if status, text := f.as(t, "acme", "POST", "/v1/predictions", "application/json", ask); status != http.StatusTooManyRequests {
		t.Errorf("got %d %s: it is the third entry of two", status, text)
	}
}
