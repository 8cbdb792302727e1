package inference

import (
	"encoding/json"
	"net/http"
	"sync"
	"testing"

	"github.com/penstock/penstock/pkg/worker"
	"github.com/penstock/penstock/pkg/worker/workertest"
)

// The order goes by the model. A run of another operation, which would go on without its connection, is not ended.
func TestRunsThatGoOnWithoutTheirConnectionAreNotPreempted(t *testing.T) {
	b := newBed(t, worker.Model{Protocol: worker.ProtocolOpenAI})
	began, ended := make(chan struct{}), make(chan struct{})
	goOn := sync.OnceFunc(func() { close(ended) })
	w := workertest.NewScript(t, healthy(func(w http.ResponseWriter, r *http.Request) {
		close(began) // once
		<-ended
		workertest.Says(200, `{"data":[]}`)(w, r)
	}))
	t.Cleanup(goOn)
	b.instance("gpu-1", w.URL, 1)
	n := b.start(ServiceConfig{})
	id := b.push(`{"operation":"images"}`)[0]
	<-began
	if n.Dispatcher.runs.preempt(int64(b.count(`SELECT token FROM penstock.lock`))) {
		t.Error("the run was ended")
	}
	goOn()
	if o := b.outcome(id); o.Outcome != "done" {
		t.Errorf("outcome %+v", o)
	}
}

// The schema preempts calls of exactly those models of which the nodes think that closing the connection ends the run.
func TestOnlyCallsThatEndWithTheirConnectionArePreempted(t *testing.T) {
	b := newBed(t, worker.Model{})
	for _, config := range []string{
		`{"protocol":"dispatcher"}`, `{"protocol":"dispatcher","abort_stops":true}`, `{"protocol":"oip"}`,
		`{"protocol":"openai"}`, `{"protocol":"openai","operation":"embeddings"}`, `{"protocol":"openai","abort_stops":false}`,
		`{"protocol":"openai","operation":"images"}`, `{"protocol":"openai","operation":"images","abort_stops":true}`,
		`{"protocol":"cog"}`, `{"protocol":"cog","model_type":"async"}`, `{"protocol":"cog","abort_stops":false}`,
	} {
		m, err := worker.ReadModel(b.model.Name, json.RawMessage(config), nil)
		b.must(err)
		_, err = b.pool.Exec(b.ctx, `UPDATE penstock.model SET config = $2 WHERE name = $1`, b.model.Name, config)
		b.must(err)
		want := int(boolInt(m.CloseEndsRun()))
		if got := b.count(`SELECT penstock.preemptible($1)::int`, b.model.Name); got != want {
			t.Errorf("%s: preemptible is %d, want %d", config, got, want)
		}
	}
}
