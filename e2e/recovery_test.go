package e2e_test

import (
	"fmt"
	"syscall"
	"testing"
	"time"

	"github.com/penstock/penstock/internal/devpostgres"
)

// fault is what happens after a node was killed, before its entries are recovered.
type fault struct {
	name string
	do   func(p *plant)
}

func faults() []fault {
	return []fault{
		{"none", func(*plant) {}},
		{"the leader killed", func(p *plant) {
			_, led := p.elected(0)
			led.signal(syscall.SIGKILL)
			led.exit()
		}},
		{"all connections terminated, six times in three seconds", func(p *plant) {
			for range 6 {
				p.exec(`SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid <> pg_backend_pid() AND backend_type = 'client backend'`)
				time.Sleep(500 * time.Millisecond) // the fault lasts so long
			}
			p.answers()
		}},
		{"the leader stopped for three seconds", func(p *plant) {
			_, led := p.elected(0)
			led.signal(syscall.SIGSTOP)
			time.Sleep(3 * time.Second) // the fault lasts so long
			led.signal(syscall.SIGCONT)
		}},
		{"the database crashed", func(p *plant) {
			p.server.Stop(devpostgres.Crash)
			p.server.Start()
			p.answers()
		}},
	}
}

// recoveryLease is longer than that of other tests: a leader that was killed is replaced within six seconds whatever the
// leases of nodes are, and its successor observes for a third of them.
const recoveryLease = 6 * time.Second

// Whatever else happens meanwhile, the entries of a dead node run elsewhere within its lease and two seconds of the last
// fault that concerns them.
func TestRecoveryIsLeaseAndTwoSecondsAfterTheLastFault(t *testing.T) {
	const entries = 60
	p, g := newGatedPlant(t, 300)
	p.leaders = append(p.leaders, p.startLeader("leader_b"))
	m := p.watchMachine()
	p.settled()
	p.exec(`CREATE TABLE public.fault (at timestamptz)`)
	for i, f := range faults() {
		p.exec(`TRUNCATE public.claim, public.fault`)
		g.shut()
		dead := p.startNode(fmt.Sprintf("dead_%d", i), "--lease", recoveryLease.String(), "--beat", "1s")
		p.push(p.queue, entries)
		p.running(dead, entries)
		heir := p.startNode(fmt.Sprintf("heir_%d", i), "--lease", recoveryLease.String(), "--beat", "1s")
		dead.kill()
		p.exec(`DROP TABLE IF EXISTS public.held`)
		p.exec(`CREATE TABLE public.held AS SELECT last_entry_id AS entry_id FROM penstock.lock WHERE node_id = ` + fmt.Sprint(dead.id))
		if held := p.query(`SELECT count(*) FROM public.held`); held != entries {
			t.Fatalf("%s: the node died with %d locks, want %d", f.name, held, entries)
		}
		f.do(p)
		p.exec(`INSERT INTO public.fault VALUES (clock_timestamp())`)
		g.letAllEnd()
		p.ended(recoveryLease + time.Minute)
		const after = `
SELECT f.at, c.at FROM public.held h JOIN public.claim c ON c.entry_id = h.entry_id AND c.node_id <> $1 CROSS JOIN public.fault f
 ORDER BY c.at DESC LIMIT 1`
		p.within(m, fmt.Sprintf("%s: the latest claim of %d entries after the last fault", f.name, entries), recoveryLease+2*time.Second,
			after, dead.id)
		heir.signal(syscall.SIGTERM)
		heir.exit()
	}
	p.eachDoneOnce()
}
