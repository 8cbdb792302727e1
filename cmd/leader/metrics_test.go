package main

import (
	"bytes"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/common/expfmt"

	"github.com/penstock/penstock/internal/telemetry"
	"github.com/penstock/penstock/pkg/recovery"
	"github.com/penstock/penstock/pkg/scale"
)

// Each series has the number of its name: alerts and dashboards go by it.
func TestSeriesShowTheNumbersOfTheirNames(t *testing.T) {
	l := &leader{metrics: telemetry.NewMetrics()}
	suspended, locks := recovery.LocksStatus{Suspended: "outage"}, recovery.LocksStatus{
		Held: 1, Stuck: 2, DeadNodes: 3, Lapsed: 4, DeadLettered: 8, TakenBack: 9, Unresolved: 10, Removed: 11,
		Freed: map[recovery.StuckCause]int64{recovery.NodeDead: 5, recovery.NodeGone: 6, recovery.Unlisted: 7},
	}
	scaling := scale.DutyStatus{
		Models: []scale.ModelStatus{{
			Model: "m", Metric: 1, Waiting: 2, Base: 3, Raw: 4, Stabilised: 5, Desired: 6, Ready: 7, Started: 8, Stuck: 9,
			Applied: true, Fleet: scale.Fleet{Existing: 22, Draining: 23, Surplus: 24, Overdue: 25, Cost: 26},
		}},
		Passes: 10, Woken: 11, Took: 12 * time.Second,
		Orders: scale.OrderStatus{
			Applied: 13, Failed: 14, Drained: 15, Expired: 19, Made: 20, Pruned: 21,
		},
	}
	for _, c := range []struct {
		collect telemetry.Collector
		want    string
	}{
		{func(out chan<- prometheus.Metric) { l.lockMetrics(out, locks) }, `
locks 1
locks_stuck 2
nodes_dead 3
leases_lapsed_total 4
recovery_suspended 0
recovery_locks_freed_total{cause="node_dead"} 5
recovery_locks_freed_total{cause="node_gone"} 6
recovery_locks_freed_total{cause="unlisted"} 7
recovery_dead_lettered_total 8
recovery_unresolved_total 10
recovery_nodes_removed_total 11
`},
		{func(out chan<- prometheus.Metric) { l.lockMetrics(out, suspended) }, `
recovery_suspended 1
`},
		{func(out chan<- prometheus.Metric) { l.decisionMetrics(out, scaling) }, `
scale_requests{model="m"} 1
scale_waiting{model="m"} 2
scale_instances{model="m",what="base"} 3
scale_instances{model="m",what="raw"} 4
scale_instances{model="m",what="stabilised"} 5
scale_instances{model="m",what="desired"} 6
scale_instances{model="m",what="ready"} 7
scale_instances{model="m",what="starting"} 8
scale_instances{model="m",what="stuck"} 9
scale_instances{model="m",what="existing"} 22
scale_instances{model="m",what="draining"} 23
scale_instances{model="m",what="surplus"} 24
scale_instances{model="m",what="overdue"} 25
scale_cost{model="m"} 26
scale_pass_seconds 12
scale_woken_total 11
scale_orders_total{outcome="applied"} 13
scale_orders_total{outcome="failed"} 14
scale_on_demand_total{outcome="made"} 20
scale_on_demand_total{outcome="removed"} 21
scale_drained_total 15
scale_expired_total 19
`},
	} {
		families, err := telemetry.NewRegistry(c.collect).Gather()
		if err != nil {
			t.Fatal(err)
		}
		var text bytes.Buffer
		for _, f := range families {
			if _, err := expfmt.MetricFamilyToText(&text, f); err != nil {
				t.Fatal(err)
			}
		}
		for line := range strings.Lines(strings.TrimPrefix(c.want, "\n")) {
			if !strings.Contains(text.String(), "\n"+telemetry.Prefix+line) {
				t.Errorf("no series %s", line)
			}
		}
		if t.Failed() {
			t.Log(text.String())
		}
	}
}
