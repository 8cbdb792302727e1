package gateway

import (
	"net/http"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/slot"
	"github.com/penstock/penstock/pkg/worker/workertest"
)

// ledger keeps what calls were charged.
type ledger struct {
	mu      sync.Mutex
	charges []Charge
}

func (l *ledger) Charge(c Charge) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.charges = append(l.charges, c)
}

func (*ledger) Refuse(string) {}

// A call is charged for each of its sequences and for each GPU of its instance, as an entry of a queue is.
func TestOnlineCallsAreChargedForGPUsAndSequences(t *testing.T) {
	t.Parallel()
	book := &ledger{}
	p := startTestbed(t, func(c *Config, m *ModelState) {
		c.Charge = book
		m.Instances[0].GPUs = 4
	}, workertest.Says(200, `{"choices":[]}`))
	for i, c := range []struct {
		path, body string
		units      time.Duration
	}{
		{"/v1/chat/completions", `{"model":"m"}`, 4},
		{"/v1/chat/completions", `{"model":"m","n":2}`, 8},
		{"/v1/completions", `{"model":"m","n":2,"best_of":3}`, 12},
		{"/v1/completions", `{"model":"m","n":null}`, 4},
		{"/v1/completions", `{"model":"m","prompt":["a","b","c"],"n":2,"input":"x"}`, 24},
		{"/v1/completions", `{"model":"m","prompt":[1,2,3]}`, 4},
		{"/v1/images/generations", `{"model":"m","prompt":"x","n":4}`, 4},
	} {
		if got := p.post(c.path, c.body); got.StatusCode != http.StatusOK {
			t.Fatalf("%s: %d %s", c.body, got.StatusCode, got.body)
		}
		book.mu.Lock()
		if got := book.charges[i]; got.Took <= 0 || got.GPU != c.units*got.Took {
			t.Errorf("%s: %s of GPU for %s of a slot, want %d times as much", c.body, got.GPU, got.Took, c.units)
		}
		book.mu.Unlock()
	}
}

// The limit of a model on the sequences of one call is that of calls that wait as well.
func TestGenerationsOfMoreSequencesThanTheModelTakesAreRefused(t *testing.T) {
	t.Parallel()
	p := startTestbed(t, func(_ *Config, m *ModelState) { m.ChoicesMax = 2 }, workertest.Says(200, `{"choices":[]}`))
	for body, want := range map[string]string{
		`{"model":"m","n":3}`:                        "n is 3",
		`{"model":"m","best_of":9}`:                  "best_of is 9",
		`{"model":"m","n":1,"n":1}`:                  "more than once",
		`{"model":"m","best_of":1,"best\u005fof":2}`: "more than once",
		`{"model":"m","n":"64"}`:                     "whole number",
		`{"model":"m","best_of":6.4e1}`:              "whole number",
		`{"model":"m","n":2}`:                        "",
		`{"model":"m","best_of":null}`:               "",
		`{"model":"m","\u006e":3}`:                   "n is 3",
		`{"model":"m","n":99999999999}`:              "n is 99999999999",
		`{"model":"m","n":1,"unrelated":[{"n":9}]}`:  "",
	} {
		got := p.post("/v1/chat/completions", body)
		if want == "" && got.StatusCode != http.StatusOK || want != "" &&
			(got.StatusCode != http.StatusBadRequest || !strings.Contains(got.body, want)) {
			t.Errorf("%s: %d %s", body, got.StatusCode, got.body)
		}
	}
	for body, want := range map[string]string{
		`{"model":"m","prompt":["a","b","c"]}`:         "prompt is a list of 3",
		`{"model":"m","n":2,"prompt":[[1],[2]]}`:       "prompt is a list of 2",
		`{"model":"m","prompt":["a"],"prompt":["b"]}`:  "more than once",
		`{"model":"m","prompt":["a","b"]}`:             "",
		`{"model":"m","prompt":[1,2,3]}`:               "",
		`{"model":"m","prompt":"a","n":2}`:             "",
		`{"model":"m","prompt":["a","b"],"best_of":1}`: "",
	} {
		got := p.post("/v1/completions", body)
		if want == "" && got.StatusCode != http.StatusOK || want != "" &&
			(got.StatusCode != http.StatusBadRequest || !strings.Contains(got.body, want)) {
			t.Errorf("%s: %d %s", body, got.StatusCode, got.body)
		}
	}
	if got := p.post("/v1/embeddings", `{"model":"m","n":3}`); got.StatusCode != http.StatusOK {
		t.Errorf("embeddings: %d %s", got.StatusCode, got.body)
	}
}

// Fair queueing counts the sequences of a call: a flow whose calls ask for three gets a third of the calls.
func TestFlowsAreServedByTheSequencesOfTheirCalls(t *testing.T) {
	t.Parallel()
	now := time.Unix(1_000_000, 0)
	p := NewPool(DefaultPolicy(), &byteBudget{most: 1 << 30})
	p.SetInstances(now, []InstanceState{{ID: 1, Slots: 1, GPUs: 8, Usable: true}})
	served := map[string]int{}
	var running *Request
	leave := func(r *Request, _ Dropped) {
		served[r.Flow]++
		running = r
	}
	for range 40 {
		for flow, choices := range map[string]int{"one": 1, "three": 3} {
			if _, refused := p.Arrive(now, &Request{Flow: flow, Choices: choices, TTL: time.Hour, Leave: leave}); refused != nil {
				t.Fatal(refused)
			}
		}
	}
	p.Grant(now, []slot.Held{{Instance: 1, Token: 1}})
	for range 39 {
		now = now.Add(time.Second)
		p.End(now, running, CallEnd{Took: time.Second})
	}
	if served["three"] < 9 || served["three"] > 11 {
		t.Errorf("%v calls were served, want three times as many of the one sequence", served)
	}
}

// What calls took of GPUs orders entries, and the time of slots can be told from it.
func TestUseOfGPUsIsFolded(t *testing.T) {
	t.Parallel()
	x := newExchange(t)
	m, queue := x.meter()
	for range 2 {
		m.Charge(Charge{Model: "m", Queue: queue, Flow: "f", Took: time.Second, GPU: 8 * time.Second})
		m.Charge(Charge{Model: "m", Queue: queue, Flow: "f", Took: time.Second, GPU: 8 * time.Second, Wasted: true})
		if err := m.Fold(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if n := x.count(`SELECT count(*) FROM penstock.usage_hour
	                  WHERE calls = 4 AND gpu_ms = 32000 AND extra_ms = 28000 AND wasted_ms = 16000`); n != 1 {
		t.Error("the hours of use have other sums")
	}
	if n := x.count(`SELECT count(*) FROM penstock.usage WHERE flow = 'f' AND service BETWEEN 31 AND 32`); n != 1 {
		t.Error("entries are not ordered by the use of GPUs")
	}
}
