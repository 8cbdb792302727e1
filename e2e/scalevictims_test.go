package e2e_test

import (
	"cmp"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/inference"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/scale"
	"github.com/penstock/penstock/pkg/scale/backend"
	"github.com/penstock/penstock/pkg/worker"
)

// threeWorkers is a site whose leader has started three workers with four slots each, and a node that calls them.
type threeWorkers struct {
	*plant
	calls   string   // the file in which workers note their calls
	servers []string // the oldest first
}

const slotsOfWorker = 4

func newThreeWorkers(t *testing.T) *threeWorkers {
	t.Helper()
	w := &threeWorkers{plant: scaled(t)}
	flows := worker.Model{Name: "m", Protocol: worker.ProtocolOpenAI, AffinityField: worker.AffinityFlow}
	_, err := inference.RegisterModel(t.Context(), w.pool, flows, inference.By{Reason: "test"})
	w.must(err)
	args := w.leaders[0].cmd.Args
	instances := args[len(args)-3]
	w.calls = filepath.Join(filepath.Dir(instances), "calls")
	w.exec(`SELECT penstock.set_deployment('m', 'm', '{"backend": "local", "target": {"command": "m"}, "policy": {"slots": 4}}', 'test', 'test')`)
	w.want(workersMax)
	eventually(t, time.Minute, "three workers are ready", func() bool {
		return w.query(`SELECT count(*) FROM penstock.instance i WHERE penstock.usable(i)`) == workersMax
	})
	local, err := backend.NewLocal(backend.LocalConfig{Dir: instances})
	w.must(err)
	found, err := local.List(t.Context(), scale.BackendTarget{Name: "m", Model: "m"})
	w.must(err)
	slices.SortFunc(found, func(a, b scale.BackendInstance) int {
		return cmp.Or(a.Began.Compare(b.Began), cmp.Compare(a.Name, b.Name))
	})
	for _, i := range found {
		w.servers = append(w.servers, i.Name)
	}
	return w
}

// want has an operator set the number of workers.
func (w *threeWorkers) want(n int) {
	w.t.Helper()
	w.exec(fmt.Sprintf(`SELECT penstock.set_scale_override('m', %d, clock_timestamp() + interval '1 hour', 'test', 'test')`, n))
}

// call pushes n entries of a flow whose calls last as long as lasts, unless their worker is released.
func (w *threeWorkers) call(n int, flow string, lasts time.Duration) {
	w.t.Helper()
	body := json.RawMessage(fmt.Sprintf(`{"messages": [], "max_tokens": %d}`, lasts.Milliseconds()))
	for range n {
		_, err := w.queue.Push(w.t.Context(), invalidation.Push{Payload: body, Flow: flow})
		w.must(err)
	}
}

// release ends the calls of a worker.
func (w *threeWorkers) release(server string) {
	w.t.Helper()
	var endpoint string
	w.must(w.pool.QueryRow(w.t.Context(), `SELECT endpoint FROM penstock.instance WHERE server = $1`, server).Scan(&endpoint))
	file := releaseOf(w.calls, endpoint)
	w.must(os.WriteFile(file, nil, 0o600))
	eventually(w.t, time.Minute, "the calls of "+server+" end", func() bool { return w.reported(server).InFlight == 0 })
	w.must(os.Remove(file))
}

// reported is the last report of the node about a worker.
func (w *threeWorkers) reported(server string) (r inference.InstanceReport) {
	w.t.Helper()
	var text []byte
	w.must(w.pool.QueryRow(w.t.Context(), `
SELECT coalesce((SELECT r FROM penstock.node n, jsonb_array_elements(n.load->'instances') r, penstock.instance i
                  WHERE n.name = 'n1' AND i.server = $1 AND r->>'id' = i.id::text), '{}')`, server).Scan(&text))
	w.must(json.Unmarshal(text, &r))
	return r
}

// leaving are the workers that drain, or have gone.
func (w *threeWorkers) leaving() string {
	w.t.Helper()
	var leaving []string
	for _, server := range w.servers {
		if w.query(`SELECT count(*) FROM penstock.instance WHERE server = $1 AND draining_at IS NULL`, server) == 0 {
			leaving = append(leaving, server)
		}
	}
	return strings.Join(leaving, ", ")
}

// Which of the workers that a leader started is given up follows from their calls, by the reports of the node that makes
// them: first the one whose calls are expected to end soonest, and of idle ones those that have nothing loaded. By age the
// youngest one would go in both cases. A drain is undone before anything is started, and no call is interrupted.
func TestTheWorkerWhoseLossCostsLeastIsGivenUp(t *testing.T) {
	t.Parallel()
	w := newThreeWorkers(t)
	oldest, middle, youngest := w.servers[0], w.servers[1], w.servers[2]
	w.call(workersMax*slotsOfWorker, "", 10*time.Minute)
	full := func() bool {
		return !slices.ContainsFunc(w.servers, func(s string) bool { return w.reported(s).InFlight != slotsOfWorker })
	}
	eventually(t, time.Minute, "all slots have calls", full)
	w.release(oldest)
	w.call(slotsOfWorker, "", 10*time.Minute) // no other worker has a slot
	eventually(t, 2*time.Minute, "the calls of the oldest worker are expected to end first", func() bool {
		soonest := w.reported(oldest).RemainingMS
		return full() && soonest < w.reported(middle).RemainingMS && soonest < w.reported(youngest).RemainingMS
	})
	w.want(2)
	eventually(t, time.Minute, "a worker drains", func() bool { return w.leaving() != "" })
	if got := w.leaving(); got != oldest {
		t.Errorf("%s drains, want %s, whose calls end first", got, oldest)
	}
	w.want(workersMax)
	eventually(t, time.Minute, "the drain is undone", func() bool { return w.leaving() == "" })

	w.release(youngest)
	w.call(1, "adapter", 10*time.Millisecond) // no other worker has a slot
	eventually(t, time.Minute, "the youngest worker has loaded something", func() bool { return w.reported(youngest).LoadedMS > 0 })
	w.release(oldest)
	w.release(middle)
	eventually(t, 2*time.Minute, "no slot is held", func() bool { return w.query(`SELECT count(*) FROM penstock.slot`) == 0 })
	w.want(1)
	eventually(t, 2*time.Minute, "two workers are gone", func() bool { return w.query(`SELECT count(*) FROM penstock.instance`) == 1 })
	if got, want := w.leaving(), oldest+", "+middle; got != want {
		t.Errorf("%s went, want %s, which have nothing loaded", got, want)
	}

	if n := w.query(`SELECT count(*) FROM penstock.audit WHERE verb = 'announce_instance'`); n != workersMax {
		t.Errorf("%d workers were started, want %d", n, workersMax)
	}
	text, err := os.ReadFile(w.calls)
	w.must(err)
	begun, ended := strings.Count(string(text), "begins"), strings.Count(string(text), "ends")
	if want := (workersMax+1)*slotsOfWorker + 1; begun != want || ended != want {
		t.Errorf("%d calls were begun and %d ended, want %d", begun, ended, want)
	}
}
