package inference

import (
	"fmt"
	"math/rand/v2"
	"net/http"
	"os"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/worker"
	"github.com/penstock/penstock/pkg/worker/workertest"
)

// soakFor is how long the soak lasts: a few seconds, or PENSTOCK_SOAK (`make soak` sets 10 m).
func soakFor(t *testing.T) time.Duration {
	t.Helper()
	text := os.Getenv("PENSTOCK_SOAK")
	if text == "" {
		return 4 * time.Second
	}
	d, err := time.ParseDuration(text)
	if err != nil {
		t.Fatalf("read PENSTOCK_SOAK: %v", err)
	}
	return d
}

// harms remembers what each entry suffered that may cost it an attempt. All else must cost nothing.
type harms struct {
	mu    sync.Mutex
	done  map[string]int
	kinds map[string]int
}

func newHarms() *harms { return &harms{done: map[string]int{}, kinds: map[string]int{}} }

func (h *harms) note(r *http.Request, kind string, costs bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.kinds[kind]++
	if costs {
		h.done[r.Header.Get("Penstock-Entry")]++
	}
}

// blame notes a harm that an entry suffered by another one's call.
func (h *harms) blame(entry string) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.done[entry]++
}

// hostile is a worker that does everything wrong, in turns.
func (h *harms) hostile(w http.ResponseWriter, r *http.Request) {
	switch n := rand.IntN(1000); {
	case r.URL.Path == "/health":
		workertest.Says(200, `{"active_jobs":0}`)(w, r)
	case n < 300:
		h.note(r, "busy", false)
		workertest.Says(503, `{"detail":"GPU busy"}`, "Retry-After", "0.05")(w, r)
	case n < 400:
		h.note(r, "loading", false)
		workertest.Says(503, `{"detail":"model is loading"}`)(w, r)
	case n < 430:
		h.note(r, "proxy error", true)
		workertest.Says(502, `bad gateway`)(w, r)
	case n < 450:
		h.note(r, "odd failure", true)
		workertest.Says(500, `{"status":"failed","error":"odd"}`)(w, r)
	case n < 470:
		h.note(r, "reset", true)
		workertest.Resets(w, r)
	case n < 480:
		h.note(r, "reset in the middle", true)
		workertest.ResetsMidBody(w, r)
	case n < 485:
		h.note(r, "hang", true)
		workertest.Hangs(w, r)
	case n < 490:
		h.note(r, "nonsense", true)
		workertest.Says(200, `this is not JSON`)(w, r)
	case n < 495:
		h.note(r, "slower than a lease", false)
		pause(r.Context(), testLease*5/4)
		workertest.Says(200, `{"status":"success","result":1}`)(w, r)
	default:
		h.note(r, "answer", false)
		workertest.Says(200, `{"status":"success","result":1}`)(w, r)
	}
}

// pretender takes calls and mixes up their ids.
func (h *harms) pretender() http.HandlerFunc {
	var mu sync.Mutex
	last, owner, next := "", "", 0
	began := map[string]time.Time{}
	return func(w http.ResponseWriter, r *http.Request) {
		mu.Lock()
		defer mu.Unlock()
		id, polled := strings.CutPrefix(r.URL.Path, "/status/")
		switch n := rand.IntN(100); {
		case r.URL.Path == "/health":
			workertest.Says(200, `{"active_jobs":0}`)(w, r)
		case polled && n < 10:
			workertest.Says(503, `{"detail":"too busy to say"}`)(w, r)
		case polled && began[id].IsZero():
			h.note(r, "forgotten", true)
			workertest.Says(404, `{"error":"no such job"}`)(w, r)
		case polled && time.Since(began[id]) > 60*time.Millisecond:
			workertest.Says(200, `{"status":"completed","result":`+strconv.Quote(id)+`}`)(w, r)
		case polled:
			workertest.Says(200, `{"status":"processing"}`)(w, r)
		case n < 20:
			h.note(r, "busy", false)
			workertest.Says(503, `{"detail":"GPU busy"}`)(w, r)
		case n < 25 && last != "":
			h.note(r, "same id twice", true)
			h.blame(owner) // whichever of the two is stored first is believed
			workertest.Says(200, `{"status":"processing","job_id":"`+last+`"}`)(w, r)
		case n < 27:
			h.note(r, "restart", false)
			clear(began)
			workertest.Says(503, `{"detail":"starting"}`)(w, r)
		default:
			next++
			last = fmt.Sprint("job-", next)
			began[last], owner = time.Now(), r.Header.Get("Penstock-Entry")
			h.note(r, "accepted", false)
			workertest.Says(200, `{"status":"processing","job_id":"`+last+`"}`)(w, r)
		}
	}
}

// Whatever the workers do, and while nodes die: nothing is lost, and no entry pays for what it did not suffer itself.
func TestTimedSoakWithHostileWorkers(t *testing.T) {
	t.Run("answers at once", func(t *testing.T) {
		h := newHarms()
		soak(t, worker.Model{Timeouts: worker.Timeouts{Run: worker.Seconds(5 * time.Second)}}, h, h.hostile)
	})
	t.Run("polled", func(t *testing.T) {
		// The bounds on silence and on the whole run are the usual ones: a run that a busy machine keeps waiting for a
		// second would pay an attempt that no worker is to blame for.
		h := newHarms()
		soak(t, asyncModel(), h, h.pretender())
	})
}

func soak(t *testing.T, model worker.Model, h *harms, worker http.HandlerFunc) {
	b := newBed(t, model)
	b.alter(map[string]any{"crash_limit": 1000, "retry": map[string]any{"base": 0.02, "cap": 0.1, "max_attempts": 1000}})
	for i := range 3 {
		b.instance(fmt.Sprint("hostile-", i), workertest.NewScript(t, worker).URL, 8)
	}
	dead := workertest.NewScript(t, workertest.Hangs)
	dead.Close()
	b.instance("not there", dead.URL, 8)
	broken := workertest.NewScript(t, workertest.Says(500, `{"status":"failed","error":"CUDA error: unspecified launch failure"}`))
	b.instance("broken", broken.URL, 8)
	short := func(t *tuning) {
		t.quarantine.lasts, t.quarantine.lastsMax = 200*time.Millisecond, 400*time.Millisecond
	}
	nodes := []*miniNode{b.start(ServiceConfig{}, short), b.start(ServiceConfig{}, short)}

	var ids []invalidation.EntryID
	deaths := 0
	start, died := time.Now(), time.Now()
	for time.Since(start) < soakFor(t) {
		if b.count(`SELECT count(*) FROM (SELECT FROM penstock.entry WHERE queue_id = $1 LIMIT 300) e`, b.queue.ID) < 200 {
			ids = append(ids, b.push(empty(50)...)...)
		}
		if time.Since(died) > 2500*time.Millisecond {
			i := rand.IntN(len(nodes))
			nodes[i].die()
			nodes[i] = b.start(ServiceConfig{}, short)
			deaths, died = deaths+1, time.Now()
		}
		time.Sleep(50 * time.Millisecond)
	}
	b.judgeSoak(ids, h)
	for _, n := range nodes {
		n.leave()
	}
	b.await(0, `SELECT count(*) FROM penstock.slot`)
	t.Logf("%d entries done in %s, %d nodes died; %v", len(ids), time.Since(start).Round(time.Second), deaths, h.kinds)
}

func (b *bed) judgeSoak(ids []invalidation.EntryID, h *harms) {
	b.Helper()
	spent := 0
	for _, id := range ids {
		o := b.outcome(id)
		h.mu.Lock()
		harm := h.done[fmt.Sprint(id)]
		h.mu.Unlock()
		spent += o.Attempt
		if o.Outcome != "done" {
			b.Fatalf("entry %d: outcome %+v", id, o)
		}
		if o.Attempt > harm {
			b.Errorf("entry %d paid %d attempts and suffered %d harms", id, o.Attempt, harm)
		}
	}
	b.Logf("%d attempts were spent, all on harm suffered", spent)
}
