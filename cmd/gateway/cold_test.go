package main

import (
	"net/http"
	"testing"
	"time"
)

// A request for a model without an instance waits where the autoscaler may start one. It is demand that the autoscaler
// reads, and goes on as soon as a probe has found the instance ready.
func TestRequestForAModelWithoutInstancesIsDemandUntilOneStarts(t *testing.T) {
	t.Parallel()
	s := newSite(t, 2)
	s.exec(`SELECT penstock.remove_instance('m', 'gpu-1', true, 'test')`)
	s.exec(`SELECT penstock.set_deployment('d', 'm', '{"backend": "advise"}', 'test')`)
	f := s.startGateway(nil)
	type outcome struct {
		status int
		at     time.Time
		err    error
	}
	done := make(chan outcome, 1)
	go func() {
		status, _, err := f.ask(t.Context(), quick)
		done <- outcome{status, time.Now(), err}
	}()
	s.eventually("the request is demand", func() bool {
		return s.count(`SELECT urgent::int FROM penstock.scale_input WHERE model = 'm'`) == 1
	})
	since := s.count(`SELECT extract(epoch FROM wanted_at)::int FROM penstock.slot_demand`)
	s.eventually("the demand is told again while the start takes its time", func() bool {
		return s.count(`SELECT extract(epoch FROM wanted_at)::int FROM penstock.slot_demand`) > since+3
	})
	s.exec(`INSERT INTO penstock.instance (model, server, endpoint, slots, state, deployment) VALUES ('m', 'gpu-2', $1, 2, 'starting', 'd')`,
		s.gpu.URL)
	select {
	case o := <-done:
		t.Fatalf("answered by an instance that starts: %+v", o)
	default:
	}
	ready := time.Now()
	s.exec(`UPDATE penstock.instance SET state = 'ready'`)
	o := <-done
	if o.status != http.StatusOK || o.err != nil {
		t.Fatalf("got %+v", o)
	}
	t.Logf("answered %s after the instance was ready; the call takes 20 ms", o.at.Sub(ready))
	s.eventually("the demand is over", func() bool {
		return s.count(`SELECT missing FROM penstock.scale_online_waits('m')`) == 0
	})
}

// Requests that find no room when they arrive are counted for the autoscaler, each once.
func TestRefusedRequestsAreDemand(t *testing.T) {
	t.Parallel()
	s := newSite(t, 2)
	s.exec(`SELECT penstock.set_gateway_policy('m', '{"total": 0}', 'test')`)
	f := s.startGateway(nil)
	for range 5 {
		if status, _, err := f.ask(t.Context(), quick); status != http.StatusTooManyRequests {
			t.Errorf("got %d, %v", status, err)
		}
	}
	const refused = `SELECT coalesce(sum(refused), 0)::int FROM penstock.model_online WHERE model = 'm'`
	s.eventually("they are counted", func() bool { return s.count(refused) >= 5 })
	if n := s.count(refused); n != 5 {
		t.Errorf("%d refused requests are counted, want 5", n)
	}
}
