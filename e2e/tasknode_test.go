package e2e_test

import (
	"fmt"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/inference"
)

func TestKilledNodesEntriesRunElsewhereWithinLeaseAndTwoSeconds(t *testing.T) {
	p := newPlant(t, 200, inference.Model{Name: "echo"}, "--delay", "1500ms")
	first := p.startNode("node_a")
	p.push(p.queue, 100)
	p.running(first, 100)
	second := p.startNode("node_b")
	first.kill()
	p.exec(`CREATE TABLE public.held AS SELECT last_entry_id AS entry_id FROM penstock.lock`)
	held := p.query(`SELECT count(*) FROM public.held`)
	if held < 90 {
		t.Fatalf("the node died with %d locks: the test shows little", held)
	}
	p.ended(nodeLease + 10*time.Second)

	const after = `
SELECT coalesce(extract(epoch FROM %s(c.at) - (SELECT beat_at + lease FROM penstock.node WHERE id = $1)) * 1000, 999999)
  FROM public.held h JOIN public.claim c ON c.entry_id = h.entry_id AND c.node_id = $2`
	earliest, latest := p.query(fmt.Sprintf(after, "min"), first.id, second.id), p.query(fmt.Sprintf(after, "max"), first.id, second.id)
	t.Logf("%d entries were claimed again %d to %d ms after the lease lapsed", held, earliest, latest)
	if earliest < 0 {
		t.Errorf("an entry was claimed %d ms before the lease lapsed", -earliest)
	}
	if latest > 2000 {
		t.Errorf("an entry was claimed %d ms after the lease lapsed, want 2000 at most", latest)
	}
	if n := p.query(`SELECT count(*) FROM public.held h WHERE NOT EXISTS (SELECT FROM penstock.result r
	                  WHERE r.entry_id = h.entry_id AND r.node_id = $1)`, second.id); n != 0 {
		t.Errorf("%d of the dead node's entries have no result of the other node", n)
	}
	p.eachDoneOnce()
	p.spent(0, held)
}
