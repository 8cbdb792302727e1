package e2e_test

import (
	"fmt"
	"syscall"
	"testing"
	"time"

	"github.com/penstock/penstock/internal/devpostgres"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/worker"
)

func TestKilledNodesEntriesRunElsewhereWithinLeaseAndTwoSeconds(t *testing.T) {
	const held = 100
	p, g := newGatedPlant(t, 300)
	m := p.watchMachine()
	p.settled()
	first := p.startNode("node_a")
	p.push(p.queue, held)
	p.running(first, held)
	second := p.startNode("node_b")
	first.kill()
	p.exec(`CREATE TABLE public.held AS SELECT last_entry_id AS entry_id FROM penstock.lock`)
	if n := p.query(`SELECT count(*) FROM public.held`); n != held {
		t.Fatalf("the node died with %d locks, want %d", n, held)
	}
	g.letAllEnd()
	p.ended(time.Minute)

	const after = `
SELECT (SELECT beat_at + lease FROM penstock.node WHERE id = $1), c.at
  FROM public.held h JOIN public.claim c ON c.entry_id = h.entry_id AND c.node_id = $2`
	p.worked(m, "the latest claim after the lease lapsed", 2*time.Second, after+` ORDER BY c.at DESC LIMIT 1`, first.id, second.id)
	if n := p.query(`SELECT count(*) FROM (`+after+`) x (lapsed, claimed) WHERE claimed < lapsed`, first.id, second.id); n != 0 {
		t.Errorf("%d of %d entries were claimed before the lease lapsed", n, held)
	}
	if n := p.query(`SELECT count(*) FROM public.held h WHERE NOT EXISTS (SELECT FROM penstock.result r
	                  WHERE r.entry_id = h.entry_id AND r.node_id = $1)`, second.id); n != 0 {
		t.Errorf("%d of the dead node's entries have no result of the other node", n)
	}
	p.eachDoneOnce()
	p.spent(held)
}

// What recovery frees is at its old place, before all that waits: of the entries behind it no more are claimed than the
// heir claims until it looks at the head of the lane again.
func TestKilledNodesEntriesRunBeforeALongBacklog(t *testing.T) {
	const slots, threads, backlog = 80, 20, 3000
	p := newPlant(t, slots, worker.Model{Name: "echo"}, "--delay", "200ms")
	m := p.watchMachine()
	p.settled()
	first := p.startNode("node_a", "--threads", fmt.Sprint(threads))
	p.push(p.queue, backlog)
	second := p.startNode("node_b")
	const locks = `SELECT count(*) FROM penstock.lock WHERE node_id = $1`
	eventually(t, time.Minute, "both nodes hold locks", func() bool {
		return p.query(locks, first.id) > 0 && p.query(locks, second.id) > 0
	})
	p.worker.signal(syscall.SIGSTOP) // runs would end between a look at them and the death
	eventually(t, time.Minute, "all threads of the node run entries", func() bool { return p.query(runningSQL, first.id) == threads })
	first.kill()
	p.worker.signal(syscall.SIGCONT)
	p.exec(`CREATE TABLE public.held AS SELECT last_entry_id AS entry_id FROM penstock.lock WHERE node_id = ` + fmt.Sprint(first.id))
	if held := p.query(`SELECT count(*) FROM public.held`); held < threads {
		t.Fatalf("the node died with %d locks, want those of its %d runs at least", held, threads)
	}
	p.ended(2 * time.Minute)
	if n := p.query(`SELECT count(*) FROM public.claim c WHERE c.node_id = $1
	                    AND c.entry_id > (SELECT max(entry_id) FROM public.held)
	                    AND c.at < (SELECT beat_at + lease FROM penstock.node WHERE id = $2)`, second.id, first.id); n == 0 {
		t.Error("nothing behind them was claimed before they were free: the test shows little")
	}
	p.within(m, "the latest claim after the lease lapsed", 2*time.Second, `
SELECT (SELECT beat_at + lease FROM penstock.node WHERE id = $1), c.at
  FROM public.held h JOIN public.claim c ON c.entry_id = h.entry_id AND c.node_id = $2
 ORDER BY c.at DESC LIMIT 1`, first.id, second.id)
	p.eachDoneOnce()
}

// Runs are short, so that locks wait on the node for its threads; then the worker answers nobody, and the node is killed.
func TestWhatOnlyWaitedOnAKilledNodeCountsNoCrash(t *testing.T) {
	t.Parallel()
	const threads = 8
	p := newPlant(t, 300, worker.Model{Name: "echo"})
	p.settled()
	first := p.startNode("node_a", "--threads", fmt.Sprint(threads))
	p.push(p.queue, 3000)
	eventually(t, time.Minute, "the node knows how short runs are", func() bool {
		return p.query(`SELECT count(*) FROM penstock.result`) > 500
	})
	p.worker.signal(syscall.SIGSTOP)
	last, since := int64(-1), time.Now()
	eventually(t, time.Minute, "nothing ends any more, and the heartbeat lists what runs", func() bool {
		n := p.query(`SELECT count(*) + 100000 * (SELECT count(*) FROM penstock.result) FROM penstock.lock`)
		if n != last || p.query(runningSQL, first.id) != threads {
			last, since = n, time.Now()
		}
		return time.Since(since) > time.Second
	})
	first.kill()
	p.exec(`CREATE TABLE public.held AS SELECT last_entry_id AS entry_id FROM penstock.lock`)
	held := p.query(`SELECT count(*) FROM public.held`)
	if held < threads+5 {
		t.Fatalf("the node died with %d locks: none had to wait", held)
	}
	p.worker.signal(syscall.SIGCONT)
	p.startNode("node_b")
	p.ended(time.Minute)
	p.eachDoneOnce()
	t.Logf("the node died with %d locks, %d of which its threads ran", held, threads)
	p.spent(threads)
}

func TestNodeStoppedBeyondItsLeaseWritesNothingAboutWhatOthersWereGiven(t *testing.T) {
	t.Parallel()
	const held = 100
	p, g := newGatedPlant(t, 300)
	frozen := p.startNode("node_a")
	p.push(p.queue, held)
	p.running(frozen, held)
	heir := p.startNode("node_b")
	frozen.signal(syscall.SIGSTOP)
	p.running(heir, held)
	// While the other node runs them, this one finds the worker's answers to its own calls waiting for it. The runs of the
	// other node end after the leader has heard of this one.
	g.letEnd(held)
	p.exec(`CREATE TABLE public.over AS SELECT clock_timestamp() AS at`)
	frozen.signal(syscall.SIGCONT)
	frozen.says("endings refused")
	eventually(t, time.Minute, "a node that is heard again has killed no entry", func() bool {
		return p.query(`SELECT coalesce(sum(crashes), 0) FROM penstock.entry`) == 0
	})
	g.letAllEnd()
	p.ended(time.Minute)
	if n := p.query(`SELECT count(*) FROM public.entry_change c, public.over o WHERE c.who = 'node_a' AND c.at > o.at`); n != 0 {
		t.Errorf("the stopped node wrote %d times about entries, locks and results after they were given to others", n)
	}
	if n := p.query(`SELECT count(*) FROM penstock.result WHERE node_id = $1`, heir.id); n != held {
		t.Errorf("%d results of the other node, want %d", n, held)
	}
	p.eachDoneOnce()
	p.spent(0)

	g.shut()
	p.push(p.queue, 2*held) // more than one node has threads for: the stopped one is of use again
	eventually(t, time.Minute, "the stopped node runs entries", func() bool { return p.query(runningSQL, frozen.id) > 0 })
	g.letAllEnd()
	p.ended(time.Minute)
	p.eachDoneOnce()
}

// load pushes entries, some at once, until stop is called, which returns when the last of them is accepted.
// A push that the database does not answer is made again under its idempotency key.
func (p *plant) load() (stop func()) {
	ending, ended := make(chan struct{}), make(chan struct{})
	go func() {
		defer close(ended)
		for number := 0; ; {
			select {
			case <-ending:
				return
			case <-time.After(20 * time.Millisecond):
			}
			pushed, err := p.queue.Push(p.t.Context(), invalidation.Push{
				Payload: []byte(`{}`), IdempotencyKey: fmt.Sprint("load-", number),
			})
			if err == nil {
				p.ids = append(p.ids, int64(pushed[0].ID))
				number++
			}
		}
	}()
	return func() {
		close(ending)
		<-ended
	}
}

func TestRestartedDatabaseLosesNothingAndNobodysWorkIsRescued(t *testing.T) {
	p := newPlant(t, 60, worker.Model{Name: "echo"}, "--delay", "500ms")
	m := p.watchMachine()
	for _, name := range []string{"node_a", "node_b"} {
		p.startNode(name, "--lease", "10s", "--beat", "2s", "--threads", "30")
	}
	p.push(p.queue, 600)
	stop := p.load()
	eventually(t, time.Minute, "both nodes are busy", func() bool {
		return p.query(`SELECT count(*) FROM penstock.lock`) >= 50
	})
	for _, how := range []devpostgres.Signal{devpostgres.Fast, devpostgres.Crash} {
		p.server.Restart(how)
		began := time.Now()
		p.answers()
		p.exec(`DROP TABLE IF EXISTS public.back`)
		p.exec(`CREATE TABLE public.back AS SELECT clock_timestamp() AS at`)
		eventually(t, time.Minute, "entries are accepted, claimed and done again", func() bool {
			return p.query(`SELECT least((SELECT count(*) FROM penstock.result r, public.back b WHERE r.finished_at > b.at),
			                             (SELECT count(*) FROM public.claim c, public.back b WHERE c.at > b.at),
			                             (SELECT count(*) FROM public.entry_change c, public.back b
			                               WHERE c.at > b.at AND relation ~ '^entry' AND verb = 'INSERT'))`) > 0
		})
		// Dozens of sessions begin, and plan their statements: that is work, and no wait.
		m.JudgeWork(t, fmt.Sprintf("the way back into service after a restart of the database (%s)", how), began, time.Now(), 5*time.Second)
	}
	stop()
	p.ended(time.Minute)
	t.Logf("%d entries were accepted", len(p.ids))
	p.eachDoneOnce()
	p.spent(0)
	if n := p.query(`SELECT count(*) FROM (SELECT FROM public.claim GROUP BY entry_id HAVING count(*) > 1) twice`); n != 0 {
		t.Errorf("%d entries were claimed more than once", n)
	}
}

func TestTerminatedNodeDrainsUnderLoad(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, grace string
		handsBack   bool
	}{
		{"what runs finishes within the grace", "1m", false},
		{"what does not finish is handed back", "300ms", true},
	} {
		t.Run(c.name, func(t *testing.T) {
			p, g := newGatedPlant(t, 200)
			// A beat is as long as the node tries to remove its row.
			leaving := p.startNode("node_a", "--grace", c.grace, "--threads", "50", "--beat", "4s", "--lease", "20s")
			p.push(p.queue, 150)
			p.running(leaving, 50)
			staying := p.startNode("node_b")
			p.running(staying, 100)
			leaving.signal(syscall.SIGTERM)
			if !c.handsBack {
				eventually(t, time.Minute, "the node says that it drains", func() bool { return !leaving.ready(t) })
				g.letAllEnd()
			}
			if code := leaving.exit(); code != 0 {
				t.Errorf("exit status %d", code)
			}
			if n := p.query(`SELECT count(*) FROM penstock.node WHERE id = $1`, leaving.id); n != 0 {
				t.Error("the node's row is still there")
			}
			g.letAllEnd()
			p.ended(time.Minute)
			p.eachDoneOnce()
			p.spent(0)
			byOther := p.query(`SELECT count(*) FROM penstock.result WHERE node_id = $1`, staying.id)
			again := p.query(`SELECT count(*) FROM (SELECT FROM public.claim GROUP BY entry_id HAVING count(DISTINCT node_id) > 1) moved`)
			t.Logf("%d of 150 were done by the other node, %d of them had been handed back", byOther, again)
			if byOther < 1 || (again > 0) != c.handsBack {
				t.Errorf("%d entries changed hands, %d were done by the other node", again, byOther)
			}
		})
	}
}

func TestApplicationsNeverMix(t *testing.T) {
	t.Parallel()
	p := newPlant(t, 40, worker.Model{Name: "echo"}, "--delay", "5ms")
	other := p.register(worker.Model{Name: "elsewhere"}, 40, p.startWorker(40, "--delay", "5ms"))
	other, err := invalidation.Alter(t.Context(), p.pool, other.Name, map[string]any{"application": "other"})
	p.must(err)
	mine := p.startNode("node_a")
	p.push(other, 200)
	p.push(p.queue, 200)
	const left = `SELECT count(*) FROM penstock.entry WHERE queue_id = $1`
	eventually(t, time.Minute, "the node has done all of its application", func() bool {
		return p.query(left, p.queue.ID) == 0
	})
	if n := p.query(left, other.ID); n != 200 {
		t.Errorf("%d of 200 entries of an application without nodes are left", n)
	}
	if n := p.query(`SELECT count(*) FROM public.claim`); n != 200 {
		t.Errorf("%d claims, want 200", n)
	}
	theirs := p.startNode("node_b", "--application", "other")
	p.push(p.queue, 200)
	p.ended(time.Minute)
	for _, x := range []struct {
		node  *taskNode
		queue int32
		want  int64
	}{{mine, p.queue.ID, 400}, {theirs, other.ID, 200}, {mine, other.ID, 0}, {theirs, p.queue.ID, 0}} {
		if n := p.query(`SELECT count(*) FROM penstock.result WHERE node_id = $1 AND queue_id = $2`, x.node.id, x.queue); n != x.want {
			t.Errorf("%s has %d results of queue %d, want %d", x.node.name, n, x.queue, x.want)
		}
	}
	p.eachDoneOnce()
	p.spent(0)
}
