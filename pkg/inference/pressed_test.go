package inference

import (
	"net/http"
	"slices"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/worker"
	"github.com/penstock/penstock/pkg/worker/workertest"
)

// vllm is a worker that reports so many calls waiting inside it and so much of its cache in use.
func vllm(t *testing.T, waiting, cache string) *workertest.Script {
	metrics := "vllm:num_requests_waiting " + waiting + "\nvllm:kv_cache_usage_perc " + cache + "\n"
	return workertest.NewScript(t, func(rw http.ResponseWriter, r *http.Request) {
		switch {
		case r.URL.Path == "/metrics":
			workertest.Says(200, metrics)(rw, r)
		case r.Method == http.MethodGet:
			workertest.Says(200, ``)(rw, r)
		default:
			workertest.Says(200, `{"choices":[]}`)(rw, r)
		}
	})
}

// A server in which calls wait, or whose cache is nearly full, gets calls only where there is no other: a node that
// leased slots of pressed instances exchanges them as soon as another has room, though it is never idle.
func TestPressedInstanceIsPassedOver(t *testing.T) {
	b := newBed(t, worker.Model{Protocol: worker.ProtocolOpenAI, LoadPath: "/metrics"})
	b.instance("full", vllm(t, "0", "0.97").URL, 4)
	b.instance("waiting", vllm(t, "3", "0.4").URL, 4)
	n := b.start(ServiceConfig{}, func(t *tuning) { t.idleMax = time.Hour })
	workertest.WaitFor(t, func() bool { return len(n.Registry.Pressed()) == 2 })
	b.outcome(b.push(`{"messages":[]}`)[0]) // there is no other yet
	free := vllm(t, "0", "0.4")
	b.instance("free", free.URL, 4)
	deadline := time.Now().Add(time.Minute)
	for inARow := 0; inARow < 10; {
		before := posts(free)
		b.outcome(b.push(`{"messages":[]}`)[0])
		if inARow++; posts(free) == before {
			inARow = 0
		}
		if time.Now().After(deadline) {
			t.Fatalf("not within a minute: ten calls in a row to the free instance; it had %d in all", posts(free))
		}
	}
}

// Each row presses the instances that it names.
func TestPressedInstancesAreLeasedLast(t *testing.T) {
	for name, c := range map[string]struct {
		model   worker.Model
		pressed []string
		want    int
		leased  []string
	}{
		"none":               {want: 3, leased: []string{"a", "b", "c"}},
		"one":                {pressed: []string{"a"}, want: 3, leased: []string{"b", "b", "c"}},
		"as far as needed":   {pressed: []string{"a"}, want: 5, leased: []string{"a", "b", "b", "c", "c"}},
		"all":                {pressed: []string{"a", "b", "c"}, want: 3, leased: []string{"a", "b", "c"}},
		"chosen by labels":   {model: worker.Model{LabelsField: "on"}, pressed: []string{"a"}, want: 3, leased: []string{"a", "b", "c"}},
		"more than there is": {pressed: []string{"b"}, want: 9, leased: []string{"a", "a", "b", "b", "c", "c"}},
	} {
		t.Run(name, func(t *testing.T) {
			b := newBed(t, c.model)
			for _, server := range []string{"a", "b", "c"} {
				b.instance(server, nowhere, 2)
			}
			_, err := b.pool.Exec(b.ctx, `UPDATE penstock.instance SET queued = 1, checked_at = now() WHERE server = ANY($1)`, c.pressed)
			b.must(err)
			room := b.count(`SELECT penstock.unpressed_room($1)`, b.model.Name)
			if want := 2 * (3 - len(c.pressed)); room != want {
				t.Errorf("%d free slots of instances that are not pressed, want %d", room, want)
			}
			b.lease(b.node(time.Minute), c.want)
			var leased []string
			b.must(b.pool.QueryRow(b.ctx, `
				SELECT array_agg(i.server ORDER BY i.server) FROM penstock.slot s JOIN penstock.instance i ON i.id = s.instance_id`).Scan(&leased))
			if !slices.Equal(leased, c.leased) {
				t.Errorf("leased of %v, want %v", leased, c.leased)
			}
		})
	}
}

func TestSlotOfAPressedInstanceIsExchanged(t *testing.T) {
	const pressed = 1
	for name, c := range map[string]struct {
		relief   int
		affinity string // of the call
		claims   int    // permits of entries that are being claimed, besides the one of the call
		goes     int
	}{
		"another has a free one":           {relief: 1, goes: 1},
		"no other has a free one":          {relief: 0},
		"it has loaded what entries need":  {relief: 1, affinity: "french"},
		"a permit needs it":                {relief: 1, claims: 2},
		"permits need the other one alone": {relief: 1, claims: 1, goes: 1},
	} {
		t.Run(name, func(t *testing.T) {
			now := time.Now()
			l := newSlotLedger()
			l.pressed, l.relief = map[int32]bool{pressed: true}, c.relief
			l.add(slotAt(pressed, 0, 100), now)
			l.take(now, 1, everywhere)
			h := assigned(l, now, c.affinity, everywhere)
			l.add(slotAt(pressed, 1, 101), now)
			l.unassigned += c.claims
			l.finish(h, now, false)
			if l.leaving.Back() != c.goes {
				t.Errorf("%d slots are given back, want %d", l.leaving.Back(), c.goes)
			}
			if l.relief != c.relief-c.goes {
				t.Errorf("%d more may be exchanged, want %d", l.relief, c.relief-c.goes)
			}
			// Its row exists until it is given back: it must not be taken for a slot that came in.
			if l.leaving.Has(h.Held) != (c.goes > 0) || l.leaving.Has(slotAt(h.Instance, h.Number, h.Token+1)) {
				t.Error("the ledger is wrong about which slots go away")
			}
		})
	}
}

func TestIdleSlotsOfAPressedInstanceGoBackAsFarAsOthersHaveRoom(t *testing.T) {
	now := time.Now()
	l := newSlotLedger()
	l.pressed, l.relief = map[int32]bool{1: true}, 2
	for number := range int32(3) {
		l.add(slotAt(1, number, int64(100+number)), now)
		l.add(slotAt(2, number, int64(200+number)), now)
	}
	out := l.surplus(now, time.Hour, everywhere)
	if len(out) != 2 || out[0].Instance != 1 || out[1].Instance != 1 {
		t.Errorf("%d slots go back, want two of the pressed instance", len(out))
	}
	if again := l.surplus(now, time.Hour, everywhere); len(again) != 0 {
		t.Errorf("%d slots more go back, want none: nobody has counted anew", len(again))
	}
}
