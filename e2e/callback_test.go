package e2e_test

import (
	"context"
	"fmt"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/worker"
)

// The node that follows a run dies, and the leader to which the worker reports dies as well. What the worker reports to the
// other leader is what the next node settles; the worker is asked once.
func TestWorkersReportOutlivesTheNodeAndALeader(t *testing.T) {
	t.Parallel()
	p := &plant{site: newSite(t, 0)}
	key := filepath.Join(t.TempDir(), "key")
	p.must(os.WriteFile(key, []byte("key of the installation"), 0o600))
	for i := range 2 {
		l := &leader{program: start(t, "leader", fmt.Sprint("leader ", i), "--listen", "127.0.0.1:0", "--debug-listen", "127.0.0.1:0", "--open",
			"--database-url", p.dsn, "--inference-callback-key", "file:"+key)}
		l.address = "http://" + value(l.says("leader started"), "listen")
		p.leaders = append(p.leaders, l)
	}
	asked := make(chan string, 10)
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		switch r.Method + r.URL.Path {
		case "POST/generate":
			asked <- r.Header.Get("Penstock-Callback")
			fmt.Fprint(w, `{"status":"processing","job_id":"job-1"}`)
		case "GET/status/job-1":
			fmt.Fprint(w, `{"status":"processing"}`)
		default:
			fmt.Fprint(w, `{}`)
		}
	}))
	t.Cleanup(server.Close)
	model := worker.Model{Name: "slow", Type: worker.TypeAsync, PollPath: "/status/{id}", PollInterval: worker.Seconds(time.Minute)}
	p.queue = p.register(model, 1, server.URL+"/generate")
	p.settled()
	args := []string{"--inference-callback-url", p.leaders[0].address, "--inference-callback-key", "file:" + key}
	first := p.startNode("node_a", args...)
	p.push(p.queue, 1)
	var at *url.URL
	select {
	case address := <-asked:
		var err error
		at, err = url.Parse(address)
		p.must(err)
	case <-time.After(time.Minute):
		t.Fatal("the worker was not asked")
	}
	eventually(t, time.Minute, "the accepted run is stored", func() bool { return p.query(`SELECT count(*) FROM penstock.remote_run`) == 1 })
	first.kill()
	p.leaders[0].signal(syscall.SIGKILL)
	p.leaders[0].exit()

	report := func(to, body string) (int, error) {
		u := *at
		u.Host = strings.TrimPrefix(to, "http://")
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		r, err := http.NewRequestWithContext(ctx, http.MethodPost, u.String(), strings.NewReader(body))
		p.must(err)
		r.Header.Set("Content-Type", "application/json")
		answer, err := http.DefaultClient.Do(r)
		if err != nil {
			return 0, err
		}
		return answer.StatusCode, answer.Body.Close()
	}
	if status, err := report(at.Host, `{}`); err == nil {
		t.Fatalf("the dead leader answered %d", status)
	}
	const good = `{"status":"success","job_id":"job-1","result":{"n":1}}`
	for range 2 { // the answer to the first may have been lost
		if status, err := report(p.leaders[1].address, good); err != nil || status != http.StatusOK {
			t.Fatalf("the other leader answered %d (%v)", status, err)
		}
	}
	p.startNode("node_b", args...)
	p.ended(time.Minute)
	if len(asked) != 0 {
		t.Errorf("the worker was asked %d times more", len(asked))
	}
	if n := p.query(`SELECT count(*) FROM penstock.result WHERE outcome = 'done'`); n != 1 {
		t.Errorf("the entry was done %d times", n)
	}
	if n := p.query(`SELECT count(*) FROM penstock.result WHERE result = '{"n": 1}'`); n != 1 {
		t.Errorf("%d results are what the worker reported", n)
	}
	if status, err := report(p.leaders[1].address, good); err != nil || status != http.StatusConflict {
		t.Errorf("a report on an entry that has ended was answered %d (%v)", status, err)
	}
	at.RawQuery = strings.Replace(at.RawQuery, "token=", "token=1", 1)
	if status, err := report(p.leaders[1].address, good); err != nil || status != http.StatusNotFound {
		t.Errorf("a report with the key of another token was answered %d (%v)", status, err)
	}
}
