package inference

import (
	"encoding/json"
	"testing"

	"github.com/penstock/penstock/pkg/worker"
)

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
		want := int(boolInt(m.Type == worker.TypeSync && *m.AbortStops))
		if got := b.count(`SELECT penstock.preemptible($1)::int`, b.model.Name); got != want {
			t.Errorf("%s: preemptible is %d, want %d", config, got, want)
		}
	}
}
