package e2e_test

import (
	"fmt"
	"os"
	"strconv"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/inference"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/worker"
)

// loadEntries is how many entries the load test pushes: 2000, or ENTRIES (`make e2e-load` sets 50,000).
func loadEntries(t *testing.T) int {
	t.Helper()
	text := os.Getenv("ENTRIES")
	if text == "" {
		return 2000
	}
	n, err := strconv.Atoi(text)
	if err != nil || n < 1 {
		t.Fatalf("ENTRIES is %q, want a number above 0", text)
	}
	return n
}

// Four workers with 8 slots between them refuse, fail and break connections at random. Whatever they do, each accepted
// entry ends in done or failed, once. A refusal asks for a second of rest, and a broken connection leaves its slot in
// doubt until the worker is seen not to use it, so that their rates decide how long this takes.
func TestLoadThroughEightSlotsWithRandomFaultsLosesNothing(t *testing.T) {
	n, retries := loadEntries(t), 2
	faults := func(seed string) []string {
		return []string{"--fail-rate", "0.2", "--busy-rate", "0.002", "--drop-rate", "0.001", "--seed", seed}
	}
	p := newPlant(t, 2, worker.Model{Name: "echo", MaxRetries: &retries}, faults("1")...)
	for _, seed := range []string{"2", "3", "4"} {
		endpoint := p.startWorker(2, faults(seed)...)
		_, err := inference.RegisterInstance(t.Context(), p.pool, "echo", "cpu-"+seed, endpoint, 2, nil, inference.By{Actor: "operator"})
		p.must(err)
	}
	_, err := invalidation.Alter(t.Context(), p.pool, p.queue.Name, map[string]any{
		"retry": map[string]any{"base": 0.05, "cap": 0.5, "max_attempts": retries + 1},
	})
	p.must(err)
	p.startNode("node_a", "--threads", "16")
	p.startNode("node_b", "--threads", "16")
	began := time.Now()
	p.push(p.queue, n)
	within := time.Minute + time.Duration(n)*20*time.Millisecond
	for reported := began; p.query(`SELECT count(*) FROM penstock.entry`) > 0; time.Sleep(100 * time.Millisecond) {
		if time.Since(began) > within {
			t.Errorf("entries are left after %v", within)
			break
		}
		if time.Since(reported) > 10*time.Second {
			reported = time.Now()
			t.Logf("%v: %d left", time.Since(began).Round(time.Second), p.query(`SELECT count(*) FROM penstock.entry`))
		}
	}
	took := time.Since(began)
	p.account(took)
	p.noneEndedTwice()
	p.consistent()
}

// account prints what became of the entries and asserts that nothing is missing.
func (p *plant) account(took time.Duration) {
	p.t.Helper()
	accepted := int64(len(p.ids))
	done := p.query(`SELECT count(DISTINCT entry_id) FROM penstock.result WHERE outcome = 'done' AND entry_id = ANY ($1)`, p.ids)
	failed := p.query(`SELECT count(DISTINCT entry_id) FROM penstock.failure WHERE entry_id = ANY ($1)`, p.ids)
	const attempts = `SELECT coalesce(sum(attempt), 0) FROM public.entry_change WHERE relation ~ '^entry' AND verb = 'DELETE'`
	claims := p.query(`SELECT count(*) FROM public.claim`)
	fmt.Printf("accepted %d = done %d + failed %d, lost %d; %d claims, %d attempts ended in an error; %v, %.0f entries/s\n",
		accepted, done, failed, accepted-done-failed, claims, p.query(attempts), took.Round(time.Millisecond), float64(accepted)/took.Seconds())
	if accepted != done+failed {
		p.t.Errorf("%d entries are lost", accepted-done-failed)
	}
	if failed == 0 || claims <= accepted {
		p.t.Error("no fault was met: the test shows nothing")
	}
}
