package telemetry_test

import (
	"fmt"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/penstock/penstock/internal/telemetry"
)

func TestABoundMayBeWider(t *testing.T) {
	models := telemetry.Bound{Max: telemetry.ModelsMax}
	for i := range telemetry.ModelsMax + 1 {
		name := fmt.Sprint("model_", i)
		if other := models.Label(name) != name; other != (i == telemetry.ModelsMax) {
			t.Errorf("%s is one of the others: %v", name, other)
		}
	}
}

func TestQueuesBeyondTheBoundAreOther(t *testing.T) {
	m := telemetry.NewMetrics()
	var queues telemetry.Bound
	r := prometheus.NewRegistry()
	r.MustRegister(telemetry.Collector(func(out chan<- prometheus.Metric) {
		sums := m.Sums()
		for i := range 5000 {
			queue := queues.Label(fmt.Sprint("queue_", i))
			sums.Max("queue_head_age_seconds", float64(i), queue)
			sums.Add("queue_gone_total", 1, queue)
		}
		sums.Collect(out)
	}))
	for range 2 {
		families, err := r.Gather()
		if err != nil {
			t.Fatal(err)
		}
		for _, f := range families {
			if len(f.GetMetric()) != 101 {
				t.Errorf("%s has %d series, want one for each of 100 queues and one for the rest", f.GetName(), len(f.GetMetric()))
			}
			for _, one := range f.GetMetric() {
				if one.GetLabel()[0].GetValue() != telemetry.Other {
					continue
				}
				if got := one.GetGauge().GetValue() + one.GetCounter().GetValue(); got != 4999 && got != 4900 {
					t.Errorf("%s of the rest is %g, want the worst age or the sum", f.GetName(), got)
				}
			}
		}
	}
}

func TestMetricThatTheCatalogDoesNotKnowFailsTheScrape(t *testing.T) {
	m := telemetry.NewMetrics()
	for _, bad := range []prometheus.Metric{m.Value("nonsense", 1), m.Value("queue_head_age_seconds", 1), m.Value("locks", 1, "extra")} {
		r := prometheus.NewRegistry()
		r.MustRegister(telemetry.Collector(func(out chan<- prometheus.Metric) { out <- bad }))
		if _, err := r.Gather(); err == nil {
			t.Errorf("%s was gathered", bad.Desc())
		}
	}
}
