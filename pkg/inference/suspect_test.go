package inference

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/worker"
	"github.com/penstock/penstock/pkg/worker/workertest"
)

// engine is a server whose calls end together when one of them loses its device, as those of vLLM do. It is restarted
// then, unless it is broken.
type engine struct {
	*httptest.Server
	takes time.Duration // a call

	mu     sync.Mutex
	died   chan struct{} // closed when the device is lost
	downTo time.Time     // it starts until then
	broken bool          // each call fails, while its health is well
	kills  int
	calls  int
	active int
	peak   int
}

const engineDead = `{"error":{"message":"EngineCore encountered an issue. See stack trace for the root cause.","code":500}}`

func (b *bed) engine(server string, slots int, takes time.Duration) *engine {
	e := &engine{takes: takes, died: make(chan struct{})}
	e.Server = httptest.NewServer(http.HandlerFunc(e.serve))
	b.Cleanup(func() {
		e.CloseClientConnections()
		e.Close()
	})
	b.instance(server, e.URL+"/run", slots)
	return e
}

func (e *engine) serve(w http.ResponseWriter, r *http.Request) {
	body, _ := io.ReadAll(r.Body)
	e.mu.Lock()
	down := time.Now().Before(e.downTo)
	e.mu.Unlock()
	if down {
		workertest.Says(503, `{"error":"the engine is starting"}`)(w, r)
		return
	}
	if r.Method == http.MethodGet {
		workertest.Says(200, `{}`)(w, r)
		return
	}
	e.mu.Lock()
	died, broken := e.died, e.broken
	e.active++
	e.calls++
	e.peak = max(e.peak, e.active)
	e.mu.Unlock()
	defer func() {
		e.mu.Lock()
		e.active--
		e.mu.Unlock()
	}()
	if broken {
		workertest.Says(500, `{"error":"CUDA error: unspecified launch failure"}`)(w, r)
		return
	}
	takes := e.takes
	if strings.Contains(string(body), "kill") {
		time.Sleep(takes / 2)
		e.mu.Lock()
		e.kills++
		if e.died == died {
			close(died)
			e.died = make(chan struct{})
			e.downTo = time.Now().Add(250 * time.Millisecond)
		}
		e.mu.Unlock()
	}
	select {
	case <-died:
		workertest.Says(500, engineDead)(w, r)
	case <-time.After(takes):
		workertest.Says(200, `{"status":"success","result":{}}`)(w, r)
	}
}

func (e *engine) set(broken bool) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.broken = broken
}

func (e *engine) seen() (calls, kills, peak int) {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.calls, e.kills, e.peak
}

// Each call that a device is lost under fails alike. Those of the neighbours are served in the end, and the entry that
// loses devices is found.
func TestLongNeighboursOfAnEntryThatKillsDevicesAreServed(t *testing.T) {
	for _, c := range []struct{ instances, nodes int }{{1, 1}, {2, 1}, {1, 2}} {
		t.Run(fmt.Sprintf("%d instances, %d nodes", c.instances, c.nodes), func(t *testing.T) {
			b := newBed(t, worker.Model{Name: "flux", Protocol: worker.ProtocolGeneric})
			b.alter(map[string]any{"retry": map[string]any{"base": 0.02, "cap": 0.1, "max_attempts": 51}})
			var engines []*engine
			for i := range c.instances {
				engines = append(engines, b.engine(fmt.Sprintf("gpu-%d", i), 64, 60*time.Millisecond))
			}
			var payloads []string
			for i := range 64 * c.instances {
				payloads = append(payloads, `{}`)
				if i == 40 {
					payloads[i] = `{"do":"kill"}`
				}
			}
			ids := b.push(payloads...)
			for range c.nodes {
				b.start(ServiceConfig{}, func(t *tuning) {
					t.suspectWait, t.lossWindow = 3*time.Second, 100*time.Millisecond
					t.quarantine.lasts, t.quarantine.lastsMax = 100*time.Millisecond, 200*time.Millisecond
				})
			}
			killer := ids[40]
			b.eventually("the killer ends while others keep coming", func() bool {
				ids = append(ids, b.push(empty(4)...)...)
				time.Sleep(100 * time.Millisecond)
				return b.count(`SELECT count(*) FROM penstock.entry WHERE id = $1`, killer) == 0
			})
			if o := b.outcome(killer); o.Outcome != "failed" || !strings.Contains(o.Reason, "device lost") {
				t.Errorf("the killer: %+v", o)
			}
			for i, id := range ids {
				if o := b.outcome(id); id != killer && (o.Outcome != "done" || o.Attempt != 0) {
					t.Errorf("neighbour %d: %+v", i, o)
				}
			}
			kills, peak := 0, 0
			for _, e := range engines {
				_, k, p := e.seen()
				kills, peak = kills+k, max(peak, p)
			}
			if peak < 4 {
				t.Errorf("at most %d calls ran at once: nothing was together with the killer", peak)
			}
			t.Logf("%d kills", kills)
			if c.nodes == 1 && kills > 12 {
				t.Errorf("it killed %d devices", kills)
			}
		})
	}
}

// The device fails each call, and its server says that it is well: the backlog waits until it is repaired.
func TestLongBacklogOutlivesADeviceThatFailsWhileItsHealthIsWell(t *testing.T) {
	b := newBed(t, worker.Model{Name: "flux", Protocol: worker.ProtocolGeneric})
	e := b.engine("gpu-1", 4, time.Millisecond)
	b.start(ServiceConfig{})
	b.outcome(b.push(`{}`)[0])
	e.set(true)
	ids := b.push(empty(3)...)
	for calls := 0; calls < 3*5; calls, _, _ = e.seen() { // more often than an entry may be harmed
		if n := b.count(`SELECT count(*) FROM penstock.failure`); n != 0 {
			t.Fatalf("%d entries were dead-lettered", n)
		}
		time.Sleep(20 * time.Millisecond)
	}
	e.set(false)
	for _, id := range ids {
		if o := b.outcome(id); o.Outcome != "done" || o.Attempt != 0 {
			t.Errorf("outcome %+v", o)
		}
	}
}

// Entries that lose the device each time end, also where nothing else is served, and however many they are.
func TestLongEntriesThatLoseTheDeviceEndThoughNothingElseRuns(t *testing.T) {
	for _, c := range []struct{ killers, most int }{{1, lossMax}, {2, freeMax + 1}} {
		t.Run(fmt.Sprintf("%d of them", c.killers), func(t *testing.T) {
			b := newBed(t, worker.Model{Name: "flux", Protocol: worker.ProtocolGeneric})
			b.alter(map[string]any{"retry": map[string]any{"max_attempts": 1}})
			e := b.engine("gpu-1", 8, 2*time.Millisecond)
			b.start(ServiceConfig{}, func(t *tuning) { t.suspectWait, t.readyWait = 20*time.Millisecond, 5*time.Millisecond })
			b.outcome(b.push(`{}`)[0])
			var payloads []string
			for range c.killers {
				payloads = append(payloads, `{"do":"kill"}`)
			}
			ids := b.push(payloads...)
			b.ended(ids...)
			for _, id := range ids {
				if o := b.outcome(id); o.Outcome != "failed" {
					t.Errorf("outcome %+v", o)
				}
			}
			if _, kills, _ := e.seen(); kills > c.killers*c.most {
				t.Errorf("they killed %d devices", kills)
			}
		})
	}
}

// Whose loss it is, and who leaves the instance to others.
func TestLosses(t *testing.T) {
	b, now := newBlame(), clock()
	at := func(seconds int) time.Time { return now.Add(time.Duration(seconds) * time.Second) }
	for _, c := range []struct {
		what          string
		entry         string
		alone, served bool
		began, ended  int
		during, sole  bool
		unproven      int // until then
	}{
		{"on a device that has served nothing", "a", true, false, 0, 1, true, false, 31},
		{"again, and no other entry has tried", "a", true, false, 2, 3, false, false, 33},
		{"of another, on a device that was lost before", "b", true, false, 4, 5, false, false, 33},
		{"again, as a suspect", "b", true, false, 34, 35, false, false, 65},
		{"after it served another", "a", true, true, 70, 71, true, true, 101},
		{"once more, and no other entry has tried", "a", true, false, 102, 103, true, true, 133},
		{"of another", "c", true, false, 134, 135, false, false, 133},
		{"and after that", "a", true, false, 136, 137, false, false, 167},
		{"beside others, after it served another", "a", false, true, 168, 169, true, false, 199},
		{"alone after that", "a", true, false, 200, 201, false, false, 231},
	} {
		if c.served {
			b.served("m", "served", 1, at(c.began-1))
		}
		if l := b.lose(c.entry, c.alone, 1, at(c.began), at(c.ended)); l.during != c.during || l.sole != c.sole {
			t.Errorf("a loss %s: %+v", c.what, l)
		}
		for _, when := range []int{c.unproven - 1, c.unproven} {
			if got := b.unproven(nil, 30*time.Second, at(when))[1]; got != (when < c.unproven) {
				t.Errorf("a loss %s: %d s later the instance is left to others: %v", c.what, when-c.ended, got)
			}
		}
	}
	for entry, want := range map[string]caution{"a": alone, "b": apart, "c": apart, "d": together} {
		if got := b.caution(entry); got != want {
			t.Errorf("caution of %s is %d, want %d", entry, got, want)
		}
	}
}

// An entry that must run alone gets the instance for itself when its calls have ended, and keeps others away.
func TestAnEntryRunsAlone(t *testing.T) {
	l, now := newSlotLedger(), clock()
	all := func(int32) bool { return true }
	for i := range int32(4) {
		l.add(slotAt(1, i, int64(i)), now)
	}
	l.take(now, 4, all)
	assign := func(c caution) *heldSlot {
		h, _, _ := l.assign(now, slotRequest{caution: c}, all)
		return h
	}
	first, suspect := assign(together), assign(apart)
	if first == nil || suspect == nil || assign(apart) != nil {
		t.Fatal("want one suspect beside others")
	}
	if assign(alone) != nil {
		t.Error("it runs beside others")
	}
	l.reserve(now, slotRequest{reserve: time.Hour}, all)
	if assign(together) != nil || l.free(now.Add(59*time.Minute), all) > -2 {
		t.Error("an instance that is reserved takes other calls")
	}
	if l.solitary(first) || l.solitary(suspect) {
		t.Error("calls that ran together are taken for solitary ones")
	}
	l.finish(first, now, false)
	l.finish(suspect, now, false)
	l.endPermits(4)
	if n, later := l.free(now, all), l.free(now.Add(reservedFor), all); n != 1 || later != 4 {
		t.Errorf("%d entries may come where one is to run alone, and %d when it has not come", n, later)
	}
	l.take(now, 4, all)
	h := assign(alone)
	if h == nil || assign(together) != nil || assign(alone) != nil {
		t.Fatal("want one call alone")
	}
	if !l.solitary(h) {
		t.Error("the call was alone")
	}
	l.finish(h, now, false)
	if assign(together) == nil {
		t.Error("the instance stays closed")
	}
}

// The wait for an instance is no part of the run: its limits and a drain would meet an entry that has not begun.
func TestAnEntryThatIsToRunAloneDoesNotWaitInItsRun(t *testing.T) {
	b := newBed(t, worker.Model{})
	finish := make(chan struct{})
	end := sync.OnceFunc(func() { close(finish) })
	g := b.gpu(func(r *http.Request) (int, string) {
		if body, _ := io.ReadAll(r.Body); strings.Contains(string(body), "long") {
			<-finish
		}
		return answers(r)
	})
	b.instance("gpu-1", g.URL, 64)
	m := b.start(ServiceConfig{}, func(t *tuning) { t.idleMax = time.Minute })
	b.Cleanup(end)
	long := b.push(`{"do":"long"}`)[0]
	for calls := 0; calls == 0; calls, _ = g.seen() {
		time.Sleep(5 * time.Millisecond)
	}
	m.leave() // no claims but those here
	id := b.pushApart(`{}`)
	m.Dispatcher.blame.knowLosses(strconv.FormatInt(int64(id), 10), 2)
	take := func() int {
		n, release := m.Pool.Take(b.queue.Name, 4)
		release(n)
		return n
	}
	b.eventually("a permit is to be had", func() bool { return take() > 0 })
	_, release := m.Pool.Take(b.queue.Name, 1)
	c, err := b.queue.Claim(b.ctx, invalidation.ClaimRequest{
		Node: m.id, ClaimID: 1000, Lane: invalidation.Lane{Priority: apartPriority}, Limit: 1, IgnoreRowLocks: true,
	})
	b.must(err)
	run := &invalidation.Run{Queue: b.queue, Entry: c.Locks[0].Entries[0], Lock: c.Locks[0], Node: m.id}
	ctx, cancel := context.WithTimeout(b.ctx, 20*time.Second)
	defer cancel()
	if _, err := m.Dispatcher.Handle(ctx, run); err == nil || ctx.Err() != nil {
		t.Fatalf("beside a call: %v, %v", err, ctx.Err())
	}
	release(1)
	held := m.Pool.Tallies()[b.model.Name].Held
	if n := take(); n != 0 {
		t.Errorf("%d entries may begin beside one that is to run alone", n)
	}
	if now := m.Pool.Tallies()[b.model.Name].Held; now != held {
		t.Errorf("%d slots were leased to idle", now-held)
	}
	end()
	b.outcome(long)
	b.eventually("a permit is to be had", func() bool { return take() > 0 })
	n, release := m.Pool.Take(b.queue.Name, 4)
	if n != 1 {
		t.Errorf("%d entries may come where one is to run alone", n)
	}
	defer release(n)
	if _, err := m.Dispatcher.Handle(ctx, run); err != nil {
		t.Error(err)
	}
}

// The suspects of a batch keep no slot from others while they leave the instance to these.
func TestSuspectsOfABatchMakeRoomForOthers(t *testing.T) {
	b := newBed(t, joining(2, time.Minute))
	var lost atomic.Bool
	g := b.gpu(func(r *http.Request) (int, string) {
		body, _ := io.ReadAll(r.Body)
		if !lost.Swap(true) {
			return 500, `{"error":"CUDA error: unspecified launch failure"}`
		}
		return answerItems([]item{{}, {}}, strings.Contains(string(body), "items"))
	})
	b.instance("gpu-1", g.URL, 1)
	b.start(ServiceConfig{}, func(t *tuning) { t.suspectWait, t.aloneWait = time.Hour, time.Hour }) // nobody goes by time
	ids := b.push(items(2, nil)...)
	b.eventually("the device is lost", lost.Load)
	ids = append(ids, b.push(items(2, nil)...)...)
	for _, id := range ids {
		if o := b.outcome(id); o.Outcome != "done" || o.Attempt != 0 {
			t.Errorf("outcome %+v", o)
		}
	}
}

// A call beside which the instance may have had another is no proof against its entry.
func TestAnEntryIsNotBlamedForCallsThatHadCompany(t *testing.T) {
	b := newBed(t, worker.Model{})
	node, other, gateway := b.node(time.Minute), b.node(time.Minute), b.gateway()
	s := newService(ServiceConfig{Log: quiet}, patient(), b.pool, func() invalidation.NodeID { return node })
	for i, c := range []struct {
		name      string
		holder    invalidation.NodeID // of the other slot
		doubt     bool
		lost, oom int // calls that count
	}{
		{"a call of the node, which it knows of", node, false, 1, 1},
		{"a call of another node, which notes its own loss", other, false, 1, 0},
		{"a call of a gateway", gateway, false, 0, 0},
		{"a call in doubt", node, true, 0, 0},
	} {
		instance := b.instance(fmt.Sprint("gpu-", i), nowhere, 2)
		_, err := b.pool.Exec(b.ctx, `INSERT INTO penstock.slot (instance_id, number, token, node_id, doubt_at)
			VALUES ($1, 0, nextval('penstock.token_seq'), $2, CASE WHEN $3 THEN now() END)`, instance, c.holder, c.doubt)
		b.must(err)
		run := &invalidation.Run{Queue: b.queue, Entry: invalidation.Entry{ID: invalidation.EntryID(i + 1)}}
		d := &dispatch{
			Dispatcher: s.Dispatcher, run: run, call: worker.Call{RunRef: worker.RunRef{Entry: fmt.Sprint(i + 1)}},
			held: &slotRef{endpoint: &Endpoint{ID: instance}},
		}
		for class, want := range map[worker.Class]int{worker.ClassOOM: c.oom, worker.ClassContextLost: c.lost} {
			b.must(d.countHarm(b.ctx, class, loss{during: true, sole: true, served: time.Now()}))
			if n := b.count(`SELECT count(*) FROM penstock.entry_harm WHERE entry_id = $1 AND class = $2`, i+1, string(class)); n != want {
				t.Errorf("%s: %d calls that ended as %s count against the entry, want %d", c.name, n, class, want)
			}
		}
	}
}

// slowDB is a database whose connections are all in use for a while.
type slowDB struct{ postgres.DB }

func (d slowDB) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	time.Sleep(200 * time.Millisecond)
	return d.DB.QueryRow(ctx, sql, args...)
}

// Another entry has lost the device since it served: this is found however long the statement waits for a connection.
func TestALossOfAnotherEntryIsFoundByAStatementThatWaited(t *testing.T) {
	b := newBed(t, worker.Model{})
	node, instance := b.node(time.Minute), b.instance("gpu-1", nowhere, 2)
	served := time.Now().Add(-time.Minute) // longer ago than nodes need to note a loss
	_, err := b.pool.Exec(b.ctx, `INSERT INTO penstock.entry_harm (queue_id, entry_id, instance_id, class, at)
		VALUES ($1, 2, $2, $3, $4)`, b.queue.ID, instance, classSuspect, served.Add(time.Millisecond))
	b.must(err)
	s := newService(ServiceConfig{Log: quiet}, patient(), slowDB{b.pool}, func() invalidation.NodeID { return node })
	d := &dispatch{
		Dispatcher: s.Dispatcher, run: &invalidation.Run{Queue: b.queue, Entry: invalidation.Entry{ID: 1}},
		call: worker.Call{RunRef: worker.RunRef{Entry: "1"}}, held: &slotRef{endpoint: &Endpoint{ID: instance}},
	}
	b.must(d.countHarm(b.ctx, worker.ClassContextLost, loss{during: true, sole: true, served: served}))
	if n := b.count(`SELECT count(*) FROM penstock.entry_harm WHERE entry_id = 1 AND class = $1`, string(worker.ClassContextLost)); n > 0 {
		t.Error("the entry is blamed, though another one lost the device after it served")
	}
}

// The retries of an entry may be further apart than its harm is kept for entries that have ended.
func TestWhatAnEntryHarmedIsKnownUntilItEnds(t *testing.T) {
	b := newBed(t, worker.Model{})
	instance, id := b.instance("gpu-1", nowhere, 1), b.push(`{}`)[0]
	for _, entry := range []invalidation.EntryID{id, id + 1000} {
		_, _, err := noteHarm(b.ctx, b.pool, b.queue.ID, entry, instance, worker.ClassOOM)
		b.must(err)
	}
	_, err := b.pool.Exec(b.ctx, `UPDATE penstock.entry_harm SET at = at - interval '1 hour'`)
	b.must(err)
	_, err = b.pool.Exec(b.ctx, sweepHarmSQL)
	b.must(err)
	if left := b.count(`SELECT coalesce(sum(entry_id), 0)::bigint FROM penstock.entry_harm`); left != int(id) {
		t.Errorf("harm of the entries %d is left, want that of %d, which has not ended", left, id)
	}
}
