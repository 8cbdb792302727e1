package inference

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/url"
	"reflect"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/worker"
	"github.com/penstock/penstock/pkg/worker/workertest"
)

// takeAt is pkg/api's address for reports in a few lines.
func takeAt(c *Reports, w http.ResponseWriter, r *http.Request) {
	entry, _ := strconv.ParseInt(r.URL.Path[strings.LastIndex(r.URL.Path, "/")+1:], 10, 64)
	token, _ := strconv.ParseInt(r.URL.Query().Get("token"), 10, 64)
	body, _ := io.ReadAll(r.Body)
	if !c.Known(entry, token, r.URL.Query().Get("key")) {
		http.NotFound(w, r)
		return
	}
	if kept, err := c.Take(r.Context(), entry, token, body); err != nil || !kept {
		http.Error(w, fmt.Sprint(err), http.StatusServiceUnavailable)
	}
}

// reporter is a worker that accepts every call and says "processing" for ever: what it has to say it reports.
type reporter struct {
	*gpu
	mu    sync.Mutex
	asked []invalidation.Token
	gone  bool // it does not know its runs any more
}

func (b *bed) reporter(c *Reports) *reporter {
	w := &reporter{}
	w.gpu = b.gpu(func(r *http.Request) (int, string) {
		w.mu.Lock()
		defer w.mu.Unlock()
		if r.Method == http.MethodGet {
			if w.gone {
				return 404, `{"error":"no such job"}`
			}
			return 200, `{"status":"processing"}`
		}
		at, err := url.Parse(r.Header.Get("Penstock-Callback"))
		token, terr := strconv.ParseInt(r.Header.Get("Penstock-Token"), 10, 64)
		entry, eerr := strconv.ParseInt(r.Header.Get("Penstock-Entry"), 10, 64)
		if err != nil || terr != nil || eerr != nil || at.Path != fmt.Sprintf("/tasks/callback/%d", entry) || !c.Known(entry, token, at.Query().Get("key")) {
			b.Errorf("a worker is told to report at %s", at)
		}
		w.asked, w.gone = append(w.asked, invalidation.Token(token)), false
		return 200, fmt.Sprintf(`{"status":"processing","job_id":"job-%d"}`, token)
	})
	return w
}

func (w *reporter) tokens() []invalidation.Token {
	w.mu.Lock()
	defer w.mu.Unlock()
	return append([]invalidation.Token(nil), w.asked...)
}

const stored = `SELECT count(*) FROM penstock.remote_run WHERE remote_id IS NOT NULL`

// reported is a bed with one node that follows the run of one entry at a worker, and a leader that takes reports.
func reported(t *testing.T) (b *bed, w *reporter, leader *Reports, first *miniNode, id invalidation.EntryID, config func() ServiceConfig) {
	b = newBed(t, asyncModel())
	leader = NewReports("", []byte("key of the installation"), b.pool, quiet)
	config = func() ServiceConfig {
		return ServiceConfig{Reports: NewReports("http://leader:8420/", []byte("key of the installation"), b.pool, quiet)}
	}
	w = b.reporter(leader)
	b.instance("gpu-1", w.URL+"/generate", 1)
	first = b.start(config())
	id = b.push(`{}`)[0]
	b.await(1, stored)
	return b, w, leader, first, id, config
}

func TestWorkersReportEndsTheRunThatANodeFollows(t *testing.T) {
	b, w, leader, _, id, _ := reported(t)
	token := int64(w.tokens()[0])
	take := func(body string) (bool, error) { return leader.Take(b.ctx, int64(id), token, []byte(body)) }
	for body, want := range map[string]error{
		`no JSON`: invalidation.ErrInvalid, `[]`: invalidation.ErrInvalid, `{"result":1}`: invalidation.ErrInvalid,
		`{"status":"success","job_id":"another"}`: invalidation.ErrInvalid, `{"status":"processing"}`: nil,
	} {
		if kept, err := take(body); !errors.Is(err, want) || kept != (want == nil) {
			t.Errorf("report %s: %v, %v", body, kept, err)
		}
	}
	if kept, err := take(`{"status":"success","result":"` + strings.Repeat("x", 32<<20) + `"}`); !errors.Is(err, invalidation.ErrPayloadTooLarge) || kept {
		t.Errorf("a report larger than an answer may be: %v, %v", kept, err)
	}
	if n := b.count(`SELECT count(*) FROM penstock.remote_run WHERE report IS NOT NULL`); n != 0 {
		t.Error("what does not end the run was kept")
	}
	if kept, err := take(fmt.Sprintf(`{"status":"success","job_id":"job-%d","result":{"n":1}}`, token)); !kept || err != nil {
		t.Fatalf("the report was not taken: %v", err)
	}
	// What comes late, or contradicts the first word, changes nothing.
	for _, late := range []string{`{"status":"processing"}`, `{"status":"failed","error":"no"}`} {
		if kept, err := take(late); (!kept || err != nil) && b.count(stored) == 1 {
			t.Errorf("late report %s: %v, %v", late, kept, err)
		}
	}
	if o := b.outcome(id); o.Outcome != "done" || string(o.Result) != `{"n": 1}` || int64(o.Token) != token {
		t.Fatalf("outcome %+v: %s", o, o.Result)
	}
	if kept, err := take(`{"status":"success","result":{"n":1}}`); !kept || err != nil {
		t.Errorf("a report that is repeated after the end: %v, %v", kept, err)
	}
	if calls, _ := w.seen(); len(w.tokens()) != 1 {
		t.Errorf("the worker was asked %v times (%d calls)", len(w.tokens()), calls)
	}
	b.await(0, `SELECT count(*) FROM penstock.remote_run`)
	b.await(0, `SELECT count(*) FROM penstock.lock`)
}

// Entries that a node has no address for reports for are left to others, instead of coming back until they have failed.
func TestNodeWithoutAnAddressForReportsTakesNoEntriesOfAsynchronousCog(t *testing.T) {
	b := newBed(t, worker.Model{Protocol: worker.ProtocolCog, Type: worker.TypeAsync})
	w := workertest.NewScript(t, func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodGet {
			workertest.Says(200, `{"status":"BUSY"}`)(w, r)
			return
		}
		workertest.Says(202, `{"status":"processing"}`)(w, r)
	})
	b.instance("gpu-1", w.URL, 2)
	without := b.start(ServiceConfig{})
	b.push(`{}`)
	for range 50 {
		n, release := without.Pool.Take(b.queue.Name, 1)
		release(n)
		if n != 0 || without.claims.Load() != 0 {
			t.Fatalf("it takes %d, and has claimed %d times", n, without.claims.Load())
		}
		time.Sleep(5 * time.Millisecond)
	}
	reports := NewReports("http://leader", []byte("key"), b.pool, quiet)
	with := b.start(ServiceConfig{Reports: reports})
	b.await(1, stored)
	if n := without.claims.Load(); n != 0 {
		t.Errorf("it claimed %d times", n)
	}
	with.die()
}

// A run that a worker has accepted cannot be refused for want of room, whatever words its failure has.
func TestReportThatARunFailedInTheWordsOfAFullServerEndsIt(t *testing.T) {
	b, w, leader, first, id, _ := reported(t)
	take := func(token invalidation.Token, body string) {
		if kept, err := leader.Take(b.ctx, int64(id), int64(token), []byte(body)); !kept || err != nil {
			t.Errorf("the report was not taken: %v", err)
		}
	}
	take(w.tokens()[0], `{"status":"failed","error":"rate limit exceeded"}`)
	for deadline := time.Now().Add(time.Minute); len(w.tokens()) < 2; time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			first.die()
			t.Fatal("the report was thrown away")
		}
	}
	b.await(1, stored+` AND token = $1`, w.tokens()[1])
	take(w.tokens()[1], `{"status":"success","result":1}`)
	if o := b.outcome(id); o.Outcome != "done" || o.Attempt != 1 {
		t.Errorf("outcome %+v", o)
	}
}

// A run that its instance is to blame for is made up for by one elsewhere, under the same token: the report of the first
// says nothing of the second.
func TestReportOfARunIsNotTakenForThatOfTheNext(t *testing.T) {
	b, w, leader, _, id, _ := reported(t)
	b.instance("gpu-2", w.URL+"/generate", 1)
	token := int64(w.tokens()[0])
	take := func(body string) {
		if kept, err := leader.Take(b.ctx, int64(id), token, []byte(body)); !kept || err != nil {
			t.Errorf("the report was not taken: %v", err)
		}
	}
	first := b.count(`SELECT instance_id FROM penstock.remote_run`)
	take(`{"status":"failed","error":"CUDA error: an illegal memory access was encountered"}`)
	b.await(1, `SELECT (count(*) > 0 OR NOT EXISTS (SELECT FROM penstock.entry))::int FROM penstock.remote_run WHERE remote_id IS NOT NULL AND instance_id <> $1`, first)
	tokens := w.tokens()
	token = int64(tokens[len(tokens)-1]) // another one where the second instance was not known yet: the entry was handed back
	take(`{"status":"success","result":"kept"}`)
	if o := b.outcome(id); o.Outcome != "done" || string(o.Result) != `"kept"` || o.Attempt != 0 {
		t.Errorf("outcome %+v", o)
	}
}

func TestReportWhileNobodyFollowsIsPickedUpByTheNextNode(t *testing.T) {
	b, w, leader, first, id, config := reported(t)
	first.die()
	w.mu.Lock()
	w.gone = true // a worker may forget what it has reported
	w.mu.Unlock()
	if kept, err := leader.Take(b.ctx, int64(id), int64(w.tokens()[0]), []byte(`{"status":"success","result":"kept"}`)); !kept || err != nil {
		t.Fatalf("the report was not taken: %v", err)
	}
	_, err := b.pool.Exec(b.ctx, `UPDATE penstock.remote_run
		SET started_at = started_at - interval '2 hours 5 minutes', reported_at = reported_at - interval '2 hours'`)
	b.must(err)
	b.start(config(), folding)
	if o := b.outcome(id); o.Outcome != "done" || string(o.Result) != `"kept"` || o.Attempt != 0 {
		t.Fatalf("outcome %+v: %s", o, o.Result)
	}
	if len(w.tokens()) != 1 {
		t.Errorf("the worker was asked %d times", len(w.tokens()))
	}
	b.used(5*time.Minute, true)
	if _, err := leader.Take(b.ctx, int64(id), int64(w.tokens()[0]), []byte(`{"status":"success"}`)); !errors.Is(err, invalidation.ErrState) {
		t.Errorf("a report on an entry that ended under another token: %v", err)
	}
}

func TestReportOutlivesTheInstanceThatMadeIt(t *testing.T) {
	b, w, leader, first, id, config := reported(t)
	first.die()
	if kept, err := leader.Take(b.ctx, int64(id), int64(w.tokens()[0]), []byte(`{"status":"success","result":"kept"}`)); !kept || err != nil {
		t.Fatalf("the report was not taken: %v", err)
	}
	if err := RemoveInstance(b.ctx, b.pool, b.model.Name, "gpu-1", true, By{}); err != nil {
		t.Fatal(err)
	}
	b.instance("gpu-2", w.URL+"/generate", 1)
	_, err := b.pool.Exec(b.ctx, `UPDATE penstock.remote_run
		SET started_at = started_at - interval '2 hours 5 minutes', reported_at = reported_at - interval '2 hours'`)
	b.must(err)
	b.start(config(), folding)
	if o := b.outcome(id); o.Outcome != "done" || string(o.Result) != `"kept"` || o.Attempt != 0 {
		t.Fatalf("outcome %+v: %s", o, o.Result)
	}
	if len(w.tokens()) != 1 {
		t.Errorf("the worker was asked %d times", len(w.tokens()))
	}
	b.await(0, `SELECT count(*) FROM penstock.remote_run`)
	b.used(5*time.Minute, true)
}

// brokenDB is a database that is away while broken is set.
type brokenDB struct {
	postgres.DB
	broken atomic.Bool
	asked  atomic.Int64
}

func (d *brokenDB) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	if d.asked.Add(1); d.broken.Load() {
		return nil, errors.New("away")
	}
	return d.DB.Query(ctx, sql, args...)
}

func (d *brokenDB) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	if d.asked.Add(1); d.broken.Load() {
		return pgconn.CommandTag{}, errors.New("away")
	}
	return d.DB.Exec(ctx, sql, args...)
}

func (d *brokenDB) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	if d.asked.Add(1); d.broken.Load() {
		return noRow{}
	}
	return d.DB.QueryRow(ctx, sql, args...)
}

// noRow is the answer of a database that is away.
type noRow struct{}

func (noRow) Scan(...any) error { return errors.New("away") }

func TestReportsThatCannotBeReadAreToldOfOnce(t *testing.T) {
	var out bytes.Buffer
	db := &brokenDB{DB: pgtest.New(t)}
	c := NewReports("http://leader", []byte("key"), db, slog.New(slog.NewTextHandler(&out, nil)))
	model := asyncModel()
	model.Protocol = worker.ProtocolGeneric
	a := &dispatch{Dispatcher: &Dispatcher{reports: c}, model: model, run: &invalidation.Run{Queue: &invalidation.Queue{}}}
	db.broken.Store(true)
	_, done := a.subscribe(1)
	until := func(n int64) {
		for deadline := time.Now().Add(time.Minute); db.asked.Load() < n; time.Sleep(10 * time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("reports were looked for %d times, want %d", db.asked.Load(), n)
			}
		}
	}
	until(4)
	db.broken.Store(false)
	until(6)
	done()
	for looking := true; looking; time.Sleep(10 * time.Millisecond) {
		c.mu.Lock()
		looking = c.polling
		c.mu.Unlock()
	}
	if text := out.String(); strings.Count(text, "level=WARN") != 1 || strings.Count(text, "works again") != 1 {
		t.Errorf("the log says\n%s", text)
	}
}

func TestReportOfADeadRunIsRefused(t *testing.T) {
	b, w, leader, _, id, _ := reported(t)
	w.mu.Lock()
	w.gone = true // so the run is lost, and the entry runs anew
	w.mu.Unlock()
	for deadline := time.Now().Add(time.Minute); len(w.tokens()) < 2; time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the entry was not run anew")
		}
	}
	tokens := w.tokens()
	old, young := int64(tokens[0]), int64(tokens[len(tokens)-1])
	b.await(1, stored+` AND token = $1`, young)
	if _, err := leader.Take(b.ctx, int64(id), old, []byte(`{"status":"success","result":"of the dead"}`)); !errors.Is(err, invalidation.ErrLockLost) {
		t.Errorf("report of the dead run: %v", err)
	}
	if kept, err := leader.Take(b.ctx, int64(id), young, []byte(`{"status":"failed","error":"bad picture","error_class":"input"}`)); !kept || err != nil {
		t.Fatalf("report of the living run: %v", err)
	}
	if o := b.outcome(id); o.Outcome != "failed" || !strings.Contains(o.Reason, "bad picture") {
		t.Errorf("outcome %+v", o)
	}
}

func TestReportOfARunThatIsNotStoredYetIsAskedForAgain(t *testing.T) {
	b := newBed(t, asyncModel())
	leader := NewReports("", []byte("key"), b.pool, quiet)
	if _, err := leader.Take(b.ctx, 4711, 1, []byte(`{"status":"success"}`)); !errors.Is(err, invalidation.ErrEntryNotFound) {
		t.Errorf("report on an entry that never was: %v", err)
	}
	id := b.push(`{}`)[0]
	if _, err := leader.Take(b.ctx, int64(id), 1, []byte(`{"status":"success"}`)); !errors.Is(err, invalidation.ErrLockLost) {
		t.Errorf("report on an entry that nobody runs: %v", err)
	}
	b.must(invalidation.Register(b.ctx, b.pool, invalidation.Node{ID: 7, Name: "test", Application: "default", Lease: time.Minute, Threads: 1}))
	claimed, err := b.queue.Claim(b.ctx, invalidation.ClaimRequest{Node: 7, ClaimID: 1, Lane: invalidation.Lane{Priority: 1}, Limit: 1, IgnoreRowLocks: true})
	b.must(err)
	if kept, err := leader.Take(b.ctx, int64(id), int64(claimed.Locks[0].Token), []byte(`{"status":"success"}`)); kept || err != nil {
		t.Errorf("report before the run is stored: %v, %v", kept, err)
	}
	if leader.Known(int64(id), 5, worker.CallbackToken([]byte("key"), "17", 5)) || leader.Known(17, 6, worker.CallbackToken([]byte("key"), "17", 5)) || !leader.Known(17, 5, worker.CallbackToken([]byte("key"), "17", 5)) {
		t.Error("a key is good for another entry or lock")
	}
}

// Whatever a worker reports is read as an outcome or refused; what ends a run well has a result that can be stored.
func FuzzReport(f *testing.F) {
	for _, seed := range []string{
		`{"status":"success","job_id":"r","result":{"n":1}}`, `{"status":"failed","error":{"a":[1]}}`, `{"status":"processing"}`, `{"status":"COMPLETED"}`,
		`{"id":"5","status":"succeeded","output":["x"],"metrics":{"predict_time":1}}`, `{"status":1}`, `[]`, `{"status":"success","result":null}`, `{`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		for _, protocol := range []worker.Protocol{worker.ProtocolGeneric, worker.ProtocolCog} {
			m := worker.Model{Name: "m", Protocol: protocol, Type: worker.TypeAsync, PollPath: "/status/{id}"}.WithDefaults()
			o, err := m.ReadReport(worker.RunRef{Entry: "5", Token: 7, Remote: "r"}, body)
			if err == nil && o.Kind == worker.Done && !json.Valid(o.Result) {
				t.Errorf("%s: %q ends as %q", protocol, body, o.Result)
			}
			if err == nil && !o.Final() && o.Kind != worker.Accepted && o.Kind != worker.Busy && o.Kind != worker.NotReady && o.Kind != worker.Unknown {
				t.Errorf("%s: %q is %s", protocol, body, o.Kind)
			}
		}
	})
}

// Whatever a config says, a model that is read is one that is used as it was written down.
func FuzzModelConfig(f *testing.F) {
	for _, seed := range []string{`{"protocol":"cog"}`, `{"protocol":"dispatcher","model_type":"async","poll_endpoint_template":"/s/{id}","poll_interval":"5s"}`, `{"batch":{"items":8}}`, `{"nonsense":1}`, `null`, `{"timeouts":{"run":-1}}`} {
		f.Add([]byte(seed), []byte(`{"poll_interval": 5}`))
	}
	f.Fuzz(func(t *testing.T, config, override []byte) {
		m, err := worker.ReadModel("m", config, override)
		if err != nil {
			return
		}
		text, err := json.Marshal(m)
		if err != nil {
			t.Fatal(err)
		}
		again, err := worker.ReadModel("m", text, nil)
		if err != nil || !reflect.DeepEqual(again, m) {
			t.Errorf("%s became %s (%v)", config, text, err)
		}
	})
}
