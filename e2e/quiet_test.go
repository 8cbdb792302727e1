package e2e_test

import (
	"context"
	"fmt"
	"os"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/worker"
)

// Slots are scarce, and one flow has a long line: solo entries, or few lock keys with many entries each. Another flow pushes one
// entry now and then. On the real programs each waits at most twice as long as in the empty system, and for one run.
//
// It is a measurement for a machine without other load, which `make quiet` runs: beside other tests the waits say nothing.
func TestQuietFlowGetsTheSlotThatComesFree(t *testing.T) {
	if os.Getenv("PENSTOCK_QUIET") == "" {
		t.Skip("set PENSTOCK_QUIET=1 (make quiet): it needs the machine for itself")
	}
	const (
		run   = 200 * time.Millisecond
		slots = 8
		waits = 60
	)
	for name, keys := range map[string]int{"solo": 0, "groups": 40} {
		t.Run(name, func(t *testing.T) {
			p := newPlant(t, slots, worker.Model{Name: "echo"}, "--delay", run.String())
			for _, node := range []string{"node_a", "node_b"} {
				p.startNode(node)
			}
			hinter := invalidation.NewHinter(p.pool, 0)
			hinting, stop := context.WithCancel(t.Context())
			defer stop()
			go func() { _ = hinter.Run(hinting) }() // returns nil, when hinting ends
			p.queue = p.queue.Hinting(hinter)
			alone := p.quietWait(waits)
			noisy := make([]invalidation.Push, 2000)
			for i := range noisy {
				noisy[i] = invalidation.Push{Flow: "noisy", Payload: []byte(`{}`)}
				if keys > 0 {
					noisy[i].LockKey = fmt.Sprint("key-", i%keys)
				}
			}
			_, err := p.queue.Push(t.Context(), noisy...)
			p.must(err)
			eventually(t, time.Minute, "the noisy flow holds all slots", func() bool {
				return p.query(`SELECT count(*) FROM penstock.lock`) >= slots
			})
			beside := p.quietWait(waits)
			if p.query(`SELECT count(*) FROM penstock.entry WHERE flow = 'noisy'`) == 0 {
				t.Error("the noisy flow was done before the end: the comparison says nothing")
			}
			t.Logf("%s: p95 of %d waits %d ms in the empty system, %d ms beside 2000 entries; %d slots, runs of %v",
				name, waits, alone.Milliseconds(), beside.Milliseconds(), slots, run)
			if most := 2*alone + run; beside > most {
				t.Errorf("the quiet flow's p95 wait is %v, want %v at most", beside, most)
			}
		})
	}
}

// quietWait pushes entries of a flow one after the other and returns the 95th percentile of their waits for a claim.
func (p *plant) quietWait(n int) time.Duration {
	p.t.Helper()
	p.exec(`TRUNCATE public.claim`)
	var ids []int64
	for range n {
		pushed, err := p.queue.Push(p.t.Context(), invalidation.Push{Flow: "quiet", Payload: []byte(`{}`)})
		p.must(err)
		id := int64(pushed[0].ID)
		ids = append(ids, id)
		eventually(p.t, time.Minute, "an entry of the quiet flow is done", func() bool {
			return p.query(`SELECT count(*) FROM penstock.result WHERE entry_id = $1`, id) == 1
		})
	}
	const sql = `
SELECT coalesce(percentile_disc(0.95) WITHIN GROUP (ORDER BY extract(epoch FROM c.at - r.created_at) * 1000)::bigint, 999999)
  FROM (SELECT entry_id, min(at) AS at FROM public.claim GROUP BY entry_id) c
  JOIN penstock.result r ON r.entry_id = c.entry_id
 WHERE c.entry_id = ANY ($1::bigint[])`
	return time.Duration(p.query(sql, ids)) * time.Millisecond
}
