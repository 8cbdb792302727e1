package e2e_test

import (
	"fmt"
	"net/http"
	"net/url"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/pkg/inference"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/worker"
)

// The lease of task nodes in these tests, short so that they need not wait long for deaths to be noticed.
const nodeLease = 3 * time.Second

// plant is a site with a leader and a real worker behind the queue of a model; task nodes are started by the tests.
// The database notes every claim, and who wrote what about entries.
type plant struct {
	*site
	queue  *invalidation.Queue
	worker *program // the last that was started
	ids    []int64  // of the entries that were accepted
}

func newPlant(t *testing.T, slots int, model worker.Model, workerArgs ...string) *plant {
	t.Helper()
	p := notedPlant(t)
	p.queue = p.register(model, slots, p.startWorker(slots, workerArgs...))
	return p
}

// notedPlant is a plant without a worker.
func notedPlant(t *testing.T) *plant {
	t.Helper()
	p := &plant{site: newSite(t, 1)}
	p.elected(0)
	p.exec(`CREATE TABLE public.claim (at timestamptz DEFAULT clock_timestamp(), token bigint, node_id bigint, entry_id bigint)`)
	p.exec(`CREATE FUNCTION public.note_claim() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
	        BEGIN INSERT INTO public.claim (token, node_id, entry_id) VALUES (NEW.token, NEW.node_id, NEW.last_entry_id); RETURN NULL; END $$`)
	p.exec(`CREATE TRIGGER note_claim AFTER INSERT ON penstock.lock FOR EACH ROW EXECUTE FUNCTION public.note_claim()`)
	p.exec(`CREATE TABLE public.entry_change (at timestamptz DEFAULT clock_timestamp(), who text DEFAULT session_user, relation text,
	                                          verb text, entry_id bigint, attempt int, crashes int)`)
	p.exec(`CREATE FUNCTION public.note_entry() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
	        DECLARE e jsonb := to_jsonb(coalesce(NEW, OLD));
	        BEGIN INSERT INTO public.entry_change (relation, verb, entry_id, attempt, crashes)
	              VALUES (TG_TABLE_NAME, TG_OP, coalesce(e->>'id', e->>'entry_id', e->>'last_entry_id')::bigint,
	                      (e->>'attempt')::int, (e->>'crashes')::int);
	              RETURN NULL; END $$`)
	for _, relation := range []string{"entry", "result", "failure", "lock"} {
		p.exec(`CREATE TRIGGER note_entry AFTER INSERT OR UPDATE OR DELETE ON penstock.` + relation + ` FOR EACH ROW EXECUTE FUNCTION public.note_entry()`)
	}
	return p
}

// startWorker returns the address of a worker's echo model.
func (p *plant) startWorker(slots int, args ...string) (endpoint string) {
	p.t.Helper()
	args = append([]string{"serve", "--listen", "127.0.0.1:0", "--models", "echo", "--slots", fmt.Sprint(slots)}, args...)
	w := start(p.t, "worker", "worker", args...)
	p.worker = w
	_, address, _ := strings.Cut(w.says("listening on "), "listening on ")
	w.says("ready")
	return address + "/echo"
}

// register makes a model and its instance known, and returns the queue that they bring.
func (p *plant) register(m worker.Model, slots int, endpoint string) *invalidation.Queue {
	p.t.Helper()
	ctx, by := p.t.Context(), inference.By{Actor: "operator"}
	m.Protocol = worker.ProtocolGeneric
	name, err := inference.RegisterModel(ctx, p.pool, m, by)
	p.must(err)
	_, err = inference.RegisterInstance(ctx, p.pool, m.Name, "cpu-1", endpoint, slots, nil, by)
	p.must(err)
	queue, err := invalidation.Open(ctx, p.pool, name)
	p.must(err)
	return queue
}

func (p *plant) must(err error) {
	p.t.Helper()
	if err != nil {
		p.t.Fatal(err)
	}
}

// push puts n entries into a queue and remembers that they were accepted.
func (p *plant) push(queue *invalidation.Queue, n int) {
	p.t.Helper()
	for n > 0 {
		batch := make([]invalidation.Push, min(n, 1000))
		for i := range batch {
			batch[i].Payload = fmt.Appendf(nil, `{"number": %d}`, len(p.ids)+i)
		}
		pushed, err := queue.Push(p.t.Context(), batch...)
		p.must(err)
		for _, e := range pushed {
			p.ids = append(p.ids, int64(e.ID))
		}
		n -= len(batch)
	}
}

// taskNode is a running cmd/tasknode. Its database role has its name.
type taskNode struct {
	*program
	id      int64
	address string
}

// ready says whether the node is ready by its own account.
func (n *taskNode) ready(t *testing.T) bool {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), http.MethodGet, n.address+"/readyz", nil)
	if err != nil {
		t.Fatal(err)
	}
	answer, err := http.DefaultClient.Do(r)
	if err != nil {
		return false
	}
	_ = answer.Body.Close()
	return answer.StatusCode == http.StatusOK
}

func (p *plant) startNode(name string, args ...string) *taskNode {
	p.t.Helper()
	p.login(name, "node")
	u, err := url.Parse(p.dsn)
	p.must(err)
	u.User = url.User(name)
	args = append([]string{
		"--name", name, "--listen", "127.0.0.1:0", "--database-url", u.String(), "--threads", "120",
		"--lease", nodeLease.String(), "--beat", "500ms", "--governor=false", // the machine belongs to other tests as well
	}, args...)
	n := &taskNode{program: start(p.t, "tasknode", name, args...)}
	n.address = "http://" + value(n.says("task node started"), "listen")
	const known = `SELECT coalesce(max(id), 0) FROM penstock.node WHERE name = $1`
	eventually(p.t, time.Minute, name+" registers", func() bool {
		n.id = p.query(known, name)
		return n.id != 0
	})
	return n
}

// settled waits until recovery is not suspended for a database that was started less than a lease of 10 s ago, as that
// of the tests may have been.
func (p *plant) settled() {
	p.t.Helper()
	eventually(p.t, time.Minute, "the database has been up for longer than the lease", func() bool {
		return p.query(`SELECT extract(epoch FROM clock_timestamp() - pg_postmaster_start_time())::bigint`) > 11
	})
}

// running waits until a node runs so many entries and has said so by a heartbeat. Their calls must not end meanwhile.
func (p *plant) running(n *taskNode, entries int64) {
	p.t.Helper()
	eventually(p.t, time.Minute, fmt.Sprintf("%s runs %d entries", n.name, entries), func() bool {
		return p.query(runningSQL, n.id) == entries
	})
}

// runningSQL counts the locks of node $1 that its latest heartbeat lists as running.
const runningSQL = `
SELECT count(*) FROM penstock.lock l JOIN penstock.node n ON n.id = l.node_id WHERE n.id = $1 AND l.token = ANY (n.running)`

// ended waits until no entry is left.
func (p *plant) ended(within time.Duration) {
	p.t.Helper()
	eventually(p.t, within, "every entry has ended", func() bool {
		return p.query(`SELECT count(*) FROM penstock.entry`) == 0
	})
}

// eachDoneOnce asserts that every accepted entry was done, once, and that nothing is left that should not be.
func (p *plant) eachDoneOnce() {
	p.t.Helper()
	p.complain(`%d entries were not done exactly once`, `
SELECT id, coalesce((SELECT 'failed as ' || class || ': ' || error FROM penstock.failure f WHERE f.entry_id = id LIMIT 1),
                    (SELECT string_agg(outcome || ' on ' || node_id, ', ') FROM penstock.result r WHERE r.entry_id = id), 'lost')
  FROM unnest($1::bigint[]) id
 WHERE (SELECT count(*) FROM penstock.result r WHERE r.entry_id = id AND r.outcome = 'done') <> 1`, p.ids)
	p.noneEndedTwice()
	p.consistent()
}

// complain reports how many rows a query finds, (bigint, text), and some of them; none are as it should be.
func (p *plant) complain(format, sql string, args ...any) {
	p.t.Helper()
	rows, err := p.pool.Query(p.t.Context(), sql, args...)
	p.must(err)
	found, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (line string, err error) {
		var id int64
		var what string
		err = row.Scan(&id, &what)
		return fmt.Sprintf("%d: %s", id, what), err
	})
	p.must(err)
	if len(found) > 0 {
		p.t.Errorf(format+", such as\n%s", len(found), strings.Join(found[:min(5, len(found))], "\n"))
	}
}

func (p *plant) noneEndedTwice() {
	p.t.Helper()
	if n := p.query(`SELECT count(*) FROM (SELECT FROM public.entry_change WHERE verb = 'INSERT' AND relation ~ '^(result|failure)'
	                  GROUP BY entry_id HAVING count(*) > 1) twice`); n != 0 {
		p.t.Errorf("%d entries ended more than once", n)
	}
}

// consistent asserts that no invariant is violated. A claim that came too late for an entry holds a lock for a moment, until its
// node gives it back.
func (p *plant) consistent() {
	p.t.Helper()
	eventually(p.t, time.Minute, "no lock is without entries", func() bool {
		return p.query(`SELECT count(*) FROM penstock.check_invariants() WHERE invariant = 'a lock has entries'`) == 0
	})
	p.complain("%d times against the invariants", `SELECT 0, invariant || ': ' || detail FROM penstock.check_invariants()`)
}

// spent asserts that no attempt was spent and how many crashes were counted, over all entries that have ended.
func (p *plant) spent(crashes int64) {
	p.t.Helper()
	const sql = `SELECT coalesce(sum(%s), 0) FROM public.entry_change WHERE relation ~ '^entry' AND verb = 'DELETE'`
	if n := p.query(fmt.Sprintf(sql, "attempt")); n != 0 {
		p.t.Errorf("%d attempts were spent, want none", n)
	}
	if n := p.query(fmt.Sprintf(sql, "crashes")); n != crashes {
		p.t.Errorf("%d crashes were counted, want %d", n, crashes)
	}
}

// kill kills a node and returns when it has ended.
func (n *taskNode) kill() {
	n.t.Helper()
	n.signal(syscall.SIGKILL)
	n.exit()
}
