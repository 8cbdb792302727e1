package e2e_test

import (
	"encoding/json"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/penstock/penstock/internal/devpostgres"
	"github.com/penstock/penstock/pkg/inference"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/worker"
)

// scaleFaults is a site with two models that scale, m by processes of this machine and w by a provider, and the faults it had.
type scaleFaults struct {
	*plant
	dir     string   // of the leaders' instances and commands
	args    []string // of each leader
	draw    *rand.Rand
	hook    *provider
	queues  []*invalidation.Queue
	killed  map[int]bool // processes of workers
	names   int          // of leaders so far
	pushed  int64
	most    int // processes of workers at once
	stopped *leader
	done    map[string]int // faults
}

// scaleChaos is how long faults last, PENSTOCK_SCALE_CHAOS such as 30m, and the seed that they are drawn from, PENSTOCK_SCALE_SEED.
func scaleChaos(t *testing.T) (lasts time.Duration, seed uint64) {
	t.Helper()
	text := os.Getenv("PENSTOCK_SCALE_CHAOS")
	if text == "" {
		t.Skip("minutes of faults for the autoscaler: PENSTOCK_SCALE_CHAOS is not set, see make chaos-scale")
	}
	lasts, err := time.ParseDuration(text)
	if err != nil {
		t.Fatalf("PENSTOCK_SCALE_CHAOS: %v", err)
	}
	seed = 1
	if text := os.Getenv("PENSTOCK_SCALE_SEED"); text != "" {
		if seed, err = strconv.ParseUint(text, 10, 64); err != nil {
			t.Fatalf("PENSTOCK_SCALE_SEED: %v", err)
		}
	}
	return lasts, seed
}

func newScaleFaults(t *testing.T, seed uint64) *scaleFaults {
	t.Helper()
	key := filepath.Join(t.TempDir(), "key")
	if err := os.WriteFile(key, []byte("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"), 0o600); err != nil {
		t.Fatal(err)
	}
	s := &scaleFaults{
		plant:  scaled(t, "--callback-allow-networks", "127.0.0.0/8", "--scale-webhook-key", "file:"+key),
		draw:   rand.New(rand.NewPCG(seed, 1)), //nolint:gosec // the same each time
		killed: map[int]bool{}, done: map[string]int{},
	}
	all := s.leaders[0].cmd.Args
	s.args = all[len(all)-8:]
	s.dir = filepath.Dir(all[len(all)-1])
	s.hook = startProvider(t, s.pool, seed)
	name, err := inference.RegisterModel(t.Context(), s.pool, worker.Model{Name: "w", Protocol: worker.ProtocolOpenAI}, inference.By{Reason: "test"})
	s.must(err)
	other, err := invalidation.Open(t.Context(), s.pool, name)
	s.must(err)
	s.queues = []*invalidation.Queue{s.queue, other}
	s.exec(fmt.Sprintf(`SELECT penstock.set_deployment('w', 'w', '{"backend": "webhook", "target": {"url": %q},
	         "policy": {"slots": 2, "max": %d, "hold_seconds": 1, "idle_min_seconds": 1, "idle_max_seconds": 2, "drain_seconds": 1}}', 'test', 'test')`,
		s.hook.URL, workersMax))
	s.lead()
	return s
}

// lead starts one more leader.
func (s *scaleFaults) lead() {
	s.t.Helper()
	s.names++
	s.leaders = append(s.leaders, s.startLeader(fmt.Sprintf("leader_%d", s.names), s.args...))
}

// leading waits for an elected leader that lives.
func (s *scaleFaults) leading() (found *leader) {
	s.t.Helper()
	eventually(s.t, time.Minute, "a leader that lives is elected", func() bool {
		_, found = s.elected(0)
		select {
		case <-found.ended:
			return false
		default:
			return true
		}
	})
	return found
}

// override sets the number of both deployments.
func (s *scaleFaults) override(n, until string) {
	s.t.Helper()
	s.exec(fmt.Sprintf(`SELECT penstock.set_scale_override(d.name, %s, %s, 'test', 'test') FROM penstock.deployment d`, n, until))
}

// load pushes some entries, of 50 ms to 2.5 s, unless many wait.
func (s *scaleFaults) load() {
	s.t.Helper()
	if s.query(`SELECT count(*) FROM penstock.entry`) > 60 {
		return
	}
	queue := s.queues[s.draw.IntN(len(s.queues))]
	for range s.draw.IntN(10) {
		body := fmt.Sprintf(`{"messages": [], "max_tokens": %d}`, 50+s.draw.IntN(2450))
		_, err := queue.Push(s.t.Context(), invalidation.Push{Payload: json.RawMessage(body)})
		s.must(err)
		s.pushed++
	}
}

// resume lets the leader go on that was stopped.
func (s *scaleFaults) resume() {
	s.t.Helper()
	if s.stopped != nil {
		s.stopped.signal(syscall.SIGCONT)
		s.stopped = nil
	}
}

// inject draws a fault, or none, and makes it happen.
func (s *scaleFaults) inject() {
	s.t.Helper()
	deployments := s.query(`SELECT count(*) FROM penstock.deployment WHERE name = 'm'`)
	fault := []string{
		"leader killed", "leader stopped", "database restarted", "database crashed", "worker killed", "override", "override ends",
		"template changed", "scaling off for a moment", "deployment removed", "none", "none", "none",
	}[s.draw.IntN(13)]
	switch fault {
	case "leader killed":
		s.resume()
		first := s.leading()
		first.signal(syscall.SIGKILL)
		first.exit()
		s.lead()
	case "leader stopped":
		s.resume()
		s.stopped = s.leading()
		s.stopped.signal(syscall.SIGSTOP)
	case "database restarted", "database crashed":
		how := devpostgres.Fast
		if fault == "database crashed" {
			how = devpostgres.Crash
		}
		s.server.Stop(how)
		time.Sleep(time.Duration(s.draw.IntN(3000)) * time.Millisecond) // this is the fault, not a wait for something
		s.server.Start()
		s.answers()
	case "worker killed":
		if pids := s.workers(); len(pids) > 0 {
			pid := pids[s.draw.IntN(len(pids))]
			s.killed[pid] = true
			_ = syscall.Kill(pid, syscall.SIGKILL) // it may have ended since
		}
	case "override":
		s.override(strconv.Itoa(s.draw.IntN(workersMax+1)), "clock_timestamp() + interval '20 seconds'")
	case "override ends":
		s.override("NULL", "NULL")
	case "template changed":
		s.exec(fmt.Sprintf(`SELECT penstock.set_deployment(d.name, d.model, '{"template": {"version": %d}}', 'test', 'test')
		                      FROM penstock.deployment d WHERE d.name = 'm'`, s.draw.IntN(3)))
	case "scaling off for a moment":
		s.exec(`SELECT penstock.set_scale_setting('scale.off', 'true', 'test', 'test')`)
		s.load()
		time.Sleep(time.Duration(s.draw.IntN(2000)) * time.Millisecond) // this is the fault, not a wait for something
		s.exec(`SELECT penstock.set_scale_setting('scale.off', NULL, 'test', 'test')`)
	case "deployment removed":
		if deployments == 0 || s.draw.IntN(3) > 0 {
			return
		}
		s.exec(`SELECT penstock.remove_deployment('m', 'test', 'test')`)
	}
	s.done[fault]++
}

// workers are the processes of the model m, whoever started them.
func (s *scaleFaults) workers() (pids []int) {
	s.t.Helper()
	own := envCalls + "=" + filepath.Join(s.dir, "calls")
	environs, err := filepath.Glob("/proc/[0-9]*/environ")
	s.must(err)
	for _, path := range environs {
		text, err := os.ReadFile(path) //nolint:gosec // of a process
		if err != nil || !strings.Contains(string(text), own) {
			continue
		}
		if pid, err := strconv.Atoi(filepath.Base(filepath.Dir(path))); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids
}

// cutShort are the calls that a worker began and did not end, of those that were not killed by the test.
func (s *scaleFaults) cutShort() (calls, cut int) {
	s.t.Helper()
	text, err := os.ReadFile(filepath.Join(s.dir, "calls"))
	if err != nil {
		return 0, 0 // no worker has begun to serve
	}
	open := map[int]int{}
	for line := range strings.Lines(string(text)) {
		var pid int
		var what string
		if _, err := fmt.Sscan(line, &pid, &what); err != nil {
			s.t.Fatalf("the workers noted %q: %v", line, err)
		}
		if what == "begins" {
			calls++
			open[pid]++
		} else {
			open[pid]--
		}
	}
	for pid, n := range open {
		if !s.killed[pid] {
			cut += n
		}
	}
	return calls, cut
}

// The autoscaler with real leaders, processes and a provider that fails, under deaths of all of them, restarts of the
// database and changes of its settings: no run is interrupted, no number leaves its bounds, each decision goes on from the
// one before and says why, and when it is over each entry has ended and nothing is left of any instance.
func TestAutoscalerUnderFaultsInterruptsNoRun(t *testing.T) {
	t.Parallel()
	lasts, seed := scaleChaos(t)
	s := newScaleFaults(t, seed)
	for end := time.Now().Add(lasts); time.Now().Before(end); {
		s.load()
		s.inject()
		n := len(s.workers())
		if s.most = max(s.most, n); n > 2*workersMax {
			t.Fatalf("%d workers run, of at most %d and as many that drain", n, workersMax)
		}
		time.Sleep(time.Duration(200+s.draw.IntN(1300)) * time.Millisecond) // between two faults
	}
	s.resume()
	s.hook.settle()
	s.override("NULL", "NULL")
	_, err := s.queue.Push(t.Context(), invalidation.Push{Payload: json.RawMessage(`{"messages": []}`)}) // makes a removed deployment again
	s.must(err)
	s.pushed++
	over := time.Now()
	eventually(t, 5*time.Minute, "every entry has ended", func() bool { return s.query(`SELECT count(*) FROM penstock.entry`) == 0 })
	t.Logf("after %.1f s every entry has ended", time.Since(over).Seconds())
	s.override("0", "clock_timestamp() + interval '1 hour'")
	eventually(t, 5*time.Minute, "nothing is left of any instance", func() bool {
		hosted, _, _, _ := s.hook.figures()
		return hosted == 0 && len(s.workers()) == 0 && s.query(`SELECT count(*) FROM penstock.instance`) == 0
	})
	t.Logf("after %.1f s nothing is left", time.Since(over).Seconds())
	s.judge()
}

func (s *scaleFaults) judge() {
	s.t.Helper()
	calls, cut := s.cutShort()
	_, started, orders, complaints := s.hook.figures()
	s.t.Logf("done: %v; %d entries, %d calls, at most %d processes; the provider started %d instances in %d orders; %d decisions", s.done,
		s.pushed, calls, s.most, started, orders, s.query(`SELECT count(*) FROM penstock.scale_decision`))
	if cut > 0 {
		s.t.Errorf("%d of %d calls were interrupted", cut, calls)
	}
	if len(complaints) > 0 {
		s.t.Errorf("the provider has %d complaints, such as: %s", len(complaints), complaints[0])
	}
	if n := s.query(`SELECT (SELECT count(*) FROM penstock.result) + (SELECT count(*) FROM penstock.failure)`); n != s.pushed {
		s.t.Errorf("%d entries were pushed, and %d have ended", s.pushed, n)
	}
	if n := s.query(`SELECT count(*) FROM penstock.failure`); n > int64(8*len(s.killed)) {
		s.t.Errorf("%d entries failed, where %d workers with 4 slots were killed", n, len(s.killed))
	}
	s.complain(`%d decisions are out of bounds or without a reason`, fmt.Sprintf(`
SELECT desired, model || ' at ' || at || ': ' || why FROM penstock.scale_decision
 WHERE desired NOT BETWEEN 0 AND %d OR why = '' OR jsonb_array_length(notes) = 0`, workersMax))
	// A deployment that was removed and made again begins with the instances that are there.
	s.complain(`%d decisions do not go on from the one before`, `
SELECT before, model || ' at ' || at || ': before it were ' || was
  FROM (SELECT d.*, lag(desired, 1, before) OVER w AS was, lag(at) OVER w AS after
          FROM penstock.scale_decision d WINDOW w AS (PARTITION BY model ORDER BY at)) x
 WHERE was <> before
   AND NOT EXISTS (SELECT FROM penstock.audit a
                    WHERE a.verb = 'remove_deployment' AND a.object = x.model AND a.at BETWEEN x.after AND x.at)`)
	s.consistent()
}
