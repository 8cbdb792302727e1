package e2e_test

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path"
	"path/filepath"
	"regexp"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/pkg/inference"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/scale"
	"github.com/penstock/penstock/pkg/scale/backend"
	"github.com/penstock/penstock/pkg/worker"
)

// Environment of a worker that the leader starts: the binary of this test serves, after a cold start, and notes its calls.
const (
	envWorker = "PENSTOCK_E2E_WORKER"
	envCalls  = "PENSTOCK_E2E_CALLS"
	coldStart = time.Second
)

// workersMax is the most workers that the model of scaled may have.
const workersMax = 3

// serveWorker is a model that answers each request after max_tokens milliseconds, or 50. It ends with its process.
func serveWorker(address string) error {
	time.Sleep(coldStart)
	calls, err := os.OpenFile(os.Getenv(envCalls), os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	note := func(what string) { fmt.Fprintf(calls, "%d %s\n", os.Getpid(), what) } // a line is written whole
	released := func() bool {
		_, err := os.Stat(releaseOf(os.Getenv(envCalls), "http://"+address))
		return err == nil
	}
	model := answering(func() { note("begins") }, func() { note("ends") }, released)
	server := http.Server{Addr: address, ReadHeaderTimeout: time.Minute, Handler: model}
	return server.ListenAndServe()
}

// releaseOf is the file that ends the calls of a worker early, those that come too, for as long as it exists.
func releaseOf(calls, endpoint string) string { return calls + "." + path.Base(endpoint) }

// answering is the handler of a model. It calls begins and ends around each call, ends before the answer. A call takes
// as long as it asks for, or until released.
func answering(begins, ends func(), released func() bool) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodGet {
			return // the probe
		}
		asked := struct {
			MaxTokens int `json:"max_tokens"`
		}{50}
		_ = json.NewDecoder(r.Body).Decode(&asked)
		begins()
		lasts := time.Duration(asked.MaxTokens) * time.Millisecond
		for end := time.Now().Add(lasts); time.Now().Before(end) && !released(); {
			time.Sleep(min(20*time.Millisecond, time.Until(end)))
		}
		ends()
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, `{"choices":[{"message":{"content":"x"},"finish_reason":"stop"}],"usage":{"prompt_tokens":1,"completion_tokens":1}}`)
	}
}

// scaled is a site whose leader may start workers of the model m, which has a template and no deployment. Their calls are
// noted in the file calls beside the one of its commands.
func scaled(t *testing.T, args ...string) *plant {
	t.Helper()
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	commands, err := json.Marshal(map[string]any{"m": map[string]any{
		"command": []string{self, "-test.run=^$"}, "endpoint": "http://127.0.0.1:${PORT}", "slots": 4,
		"env": map[string]string{envWorker: "127.0.0.1:${PORT}", envCalls: filepath.Join(dir, "calls")},
	}})
	if err != nil {
		t.Fatal(err)
	}
	file := filepath.Join(dir, "commands.json")
	if err := os.WriteFile(file, commands, 0o600); err != nil {
		t.Fatal(err)
	}
	p := &plant{site: newSite(t, 0)}
	name, err := inference.RegisterModel(t.Context(), p.pool, worker.Model{Name: "m", Protocol: worker.ProtocolOpenAI}, inference.By{Reason: "test"})
	p.must(err)
	p.queue, err = invalidation.Open(t.Context(), p.pool, name)
	p.must(err)
	p.exec(`SELECT penstock.set_gateway_policy('m', '{"may_start": true, "queue_ttl": 120}', 'test', 'test')`)
	p.exec(fmt.Sprintf(`SELECT penstock.set_deployment_template('m', '{"backend": "local", "target": {"command": "m"},
	         "policy": {"slots": 4, "max": %d, "hold_seconds": 1, "idle_min_seconds": 1, "idle_max_seconds": 2, "online_slo_seconds": 1,
	                    "drain_seconds": 1}}', 'test', 'test')`, workersMax))
	instances := filepath.Join(dir, "instances")
	t.Cleanup(func() { // after the end of the leader, which its workers outlive
		local, err := backend.NewLocal(backend.LocalConfig{Dir: instances, Grace: 5 * time.Second})
		p.must(err)
		p.must(local.StopAll(context.WithoutCancel(t.Context())))
	})
	args = append(args, "--scale-local-dir", instances, "--scale-local-commands", file)
	p.leaders = append(p.leaders, p.startLeader("leader_a", args...))
	p.elected(0)
	p.startNode("n1") // probes the instances
	eventually(t, time.Minute, "the node reports that it hears hints", func() bool {
		return p.query(`SELECT count(*) FROM penstock.node WHERE name = 'n1' AND load->>'hints' = 'heard'`) == 1
	})
	// The leader reports nothing of the kind: what its session that listens does is to test the channel.
	eventually(t, time.Minute, "the leader hears hints", func() bool {
		return p.query(`SELECT count(*) FROM pg_stat_activity
		                 WHERE datname = current_database() AND usename = 'leader_a' AND query LIKE '%pg_notify($1, $2)%'`) > 0
	})
	// The duty of a leader begins up to half a second after the election.
	eventually(t, time.Minute, "the leader has decided once", func() bool { return p.leaders[0].passed() })
	return p
}

// passed says whether the leader has ended a pass over all models.
func (l *leader) passed() bool {
	l.t.Helper()
	r, err := http.NewRequestWithContext(l.t.Context(), http.MethodGet, l.debug+"/metrics", nil)
	if err != nil {
		l.t.Fatal(err)
	}
	response, err := http.DefaultClient.Do(r)
	if err != nil {
		return false
	}
	defer response.Body.Close()
	text, err := io.ReadAll(response.Body)
	return err == nil && passLine.Match(text)
}

// passLine matches the duration of a pass that is not 0, as it is before the first one.
var passLine = regexp.MustCompile(`(?m)^penstock_scale_pass_seconds.* [0-9.e-]*[1-9]`)

// A model with a template and no deployment, and one request at a gateway: a deployment is made, an instance is
// started, the request is answered, and all of it goes again. The leader has the rights of its role and no more.
func TestARequestStartsAModelAtZeroAndItGoesBackToZero(t *testing.T) {
	t.Parallel()
	p := scaled(t)
	g := p.startGateway("g1")
	asked := time.Now()
	if status := askModel(t.Context(), g.url); status != http.StatusOK {
		t.Fatalf("the request is answered with %d", status)
	}
	p.logStart(asked, time.Now())
	if n := p.query(`SELECT count(*) FROM penstock.deployment WHERE model = 'm' AND on_demand`); n != 1 {
		t.Errorf("%d deployments were made", n)
	}
	eventually(t, 3*time.Minute, "the model is at zero again", func() bool {
		return p.query(`SELECT count(*) FROM penstock.instance`) == 0 &&
			p.query(`SELECT count(*) FROM penstock.deployment_state WHERE existing = 0 AND ordered = 0`) == 1
	})
}

// startedSQL has the steps of the first start of a model in their order, as times of the database.
const startedSQL = `
SELECT step, at
  FROM (VALUES (1, 'deployment made', (SELECT min(created_at) FROM penstock.deployment)),
               (2, 'decided', (SELECT min(at) FROM penstock.scale_decision WHERE desired > 0)),
               (3, 'process begun', (SELECT min(created_at) FROM penstock.instance)),
               (4, 'registered', (SELECT min(at) FROM penstock.audit WHERE verb = 'announce_instance')),
               (5, 'found ready', (SELECT min(ready_at) FROM penstock.instance)),
               (6, 'slot leased', (SELECT min(leased_at) FROM penstock.slot))) s(number, step, at)
 WHERE at IS NOT NULL ORDER BY number`

// logStart logs how long each step took from the first request of a model at zero to its answer. Tests and database
// share a clock.
func (p *plant) logStart(asked, answered time.Time) {
	p.t.Helper()
	before := asked
	for _, s := range append(p.started(), step{Name: "answered", At: answered}) {
		p.t.Logf("%-16s after %5d ms, %5d ms after the step before", s.Name, s.At.Sub(asked).Milliseconds(), s.At.Sub(before).Milliseconds())
		before = s.At
	}
}

type step struct {
	Name string
	At   time.Time
}

func (p *plant) started() []step {
	p.t.Helper()
	rows, err := p.pool.Query(p.t.Context(), startedSQL)
	p.must(err)
	steps, err := pgx.CollectRows(rows, pgx.RowToStructByPos[step])
	p.must(err)
	return steps
}

// An entry that is pushed for a model at zero starts it as a request does: the task node gets slots as soon as the
// instance is ready.
func TestAnEntryStartsAModelAtZero(t *testing.T) {
	p := scaled(t)
	hinter := invalidation.NewHinter(p.pool, 0)
	go func() { _ = hinter.Run(t.Context()) }()
	asked := time.Now()
	pushed, err := p.queue.Hinting(hinter).Push(t.Context(), invalidation.Push{Payload: json.RawMessage(`{"messages": []}`)})
	p.must(err)
	eventually(t, time.Minute, "the entry is done", func() bool {
		return p.query(`SELECT count(*) FROM penstock.result WHERE outcome = 'done' AND entry_id = $1`, pushed[0].ID) == 1
	})
	var done time.Time
	p.must(p.pool.QueryRow(t.Context(), `SELECT finished_at FROM penstock.result`).Scan(&done))
	p.logStart(asked, done)
}

// burstSize is the number of requests at once: PENSTOCK_TEST_BURST, or as many as a busy machine answers soon.
func burstSize(t *testing.T) int {
	t.Helper()
	text, set := os.LookupEnv("PENSTOCK_TEST_BURST")
	if !set {
		return 80
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 {
		t.Fatalf("PENSTOCK_TEST_BURST is %q: want a number of requests", text)
	}
	return n
}

// Many requests at once at zero start as many instances as they need, in one wave, and each is answered.
func TestABurstAtZeroStartsOneWave(t *testing.T) {
	t.Parallel()
	const most = workersMax
	requests := burstSize(t)
	p := scaled(t)
	p.exec(fmt.Sprintf(`SELECT penstock.set_gateway_policy('m', '{"may_start": true, "queue_ttl": 120, "total": %d, "flow_total": %[1]d}', 'test', 'test')`, requests))
	g := p.startGateway("g1")
	var answered atomic.Int64
	var clients sync.WaitGroup
	asked := time.Now()
	for range requests {
		clients.Go(func() {
			if askModel(t.Context(), g.url) == http.StatusOK {
				answered.Add(1)
			}
		})
	}
	clients.Wait()
	if n := answered.Load(); n != int64(requests) {
		t.Errorf("%d of %d requests were answered", n, requests)
	}
	started := p.query(`SELECT count(*) FROM penstock.audit WHERE verb = 'announce_instance'`)
	t.Logf("%d instances were started for %d requests at once", started, requests)
	p.logStart(asked, time.Now())
	if started < 1 || started > most {
		t.Errorf("%d instances were started, want at most %d", started, most)
	}
}

// A leader is killed while it starts instances, before it confirms its order. The one that follows gives the order again,
// finds what was started, and starts none of it a second time.
func TestALeaderKilledInMidScaleIsFollowedByNoExtraStart(t *testing.T) {
	t.Parallel()
	const wanted = workersMax
	p := scaled(t)
	args := p.leaders[0].cmd.Args
	args = args[len(args)-4:] // of its backend
	p.leaders = append(p.leaders, p.startLeader("leader_b", args...))
	term, first := p.elected(0)
	p.exec(`CREATE FUNCTION public.refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'not confirmed'; END $$`)
	p.exec(`CREATE TRIGGER refuse BEFORE UPDATE ON penstock.deployment_state FOR EACH ROW
	        WHEN (NEW.applied_id <> OLD.applied_id AND session_user = '` + first.name + `') EXECUTE FUNCTION public.refuse()`)
	p.exec(`SELECT penstock.set_deployment('m', 'm', '{"backend": "local", "target": {"command": "m"}, "policy": {"slots": 4}}', 'test', 'test')`)
	p.exec(fmt.Sprintf(`SELECT penstock.set_scale_override('m', %d, clock_timestamp() + interval '1 hour', 'test', 'test')`, wanted))
	eventually(t, time.Minute, "an instance is started", func() bool {
		records, err := filepath.Glob(filepath.Join(args[1], "*.json"))
		return err == nil && len(records) > 0
	})
	first.signal(syscall.SIGKILL)
	if _, second := p.elected(term); second == first {
		t.Fatal("the dead leader is elected")
	}
	eventually(t, time.Minute, "all instances are ready, and the next leader has given its order", func() bool {
		return p.query(`SELECT count(*) FROM penstock.instance i WHERE penstock.usable(i)`) == wanted &&
			p.query(`SELECT count(*) FROM penstock.deployment_state s, penstock.leader l
			          WHERE s.existing = $1 AND s.applied_id = s.order_id AND s.seen_at > l.elected_at`, wanted) == 1
	})
	local, err := backend.NewLocal(backend.LocalConfig{Dir: args[1]})
	p.must(err)
	processes, err := local.List(t.Context(), scale.BackendTarget{Name: "m", Model: "m"})
	p.must(err)
	if n := p.query(`SELECT count(*) FROM penstock.audit WHERE verb = 'announce_instance'`); n != wanted || len(processes) != wanted {
		t.Errorf("%d instances were registered, and %d run, want %d", n, len(processes), wanted)
	}
}
