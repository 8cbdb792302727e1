package gateway

import (
	"net/http"
	"testing"

	"github.com/penstock/penstock/pkg/worker/workertest"
)

// A pause ends the waits of the requests that it holds, and no call of one of them begins.
func TestPausesHoldRequestsThatWait(t *testing.T) {
	t.Parallel()
	paused := PauseState{Reason: "maintenance"}
	for name, c := range map[string]struct {
		pause func(p *testbed)
		late  bool // requests wait on: nothing tells the pool of the pause
	}{
		"of the model": {pause: func(p *testbed) {
			model := p.model
			model.Paused = paused
			p.gateway.SetModels([]ModelState{model})
		}},
		"of the flow": {pause: func(p *testbed) { p.gateway.SetFlows(map[string]FlowState{"shop": {Paused: paused}}) }},
		"of the flow, at the last moment": {late: true, pause: func(p *testbed) {
			p.gateway.flows.Store(&map[string]FlowState{"shop": {Paused: paused}})
		}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			release, begun := make(chan struct{}), make(chan struct{}, 8)
			queue := &pushes{}
			p := startTestbed(t, func(c *Config, m *ModelState) {
				c.Push, m.Policy.OnFull, m.Instances[0].Slots = queue, OnFullPush, 1
			}, func(w http.ResponseWriter, _ *http.Request) {
				begun <- struct{}{}
				<-release
				workertest.Says(200, "{}")(w, nil)
			})
			first, second := make(chan reply, 1), make(chan reply, 1)
			go func() { first <- p.post(chat, `{"model":"m"}`) }()
			<-begun
			go func() {
				second <- p.post(chat, `{"model":"m"}`, "X-Penstock-Flow", "shop/x", "Prefer", "respond-async, wait=60")
			}()
			workertest.WaitFor(t, func() bool { return p.state().Waiting["default"] == 1 })
			c.pause(p)
			if c.late {
				close(release)
			}
			refusedWith(t, <-second, 503, "no_endpoints", "no_endpoints")
			if !c.late {
				close(release)
			}
			if a := <-first; a.StatusCode != 200 {
				t.Errorf("the call that ran was answered with %d", a.StatusCode)
			}
			if len(begun) > 0 || len(queue.list) > 0 {
				t.Errorf("%d calls began in the pause, and %d requests became entries", len(begun), len(queue.list))
			}
			workertest.WaitFor(t, func() bool { s := p.state(); return s.InFlight == 0 && s.Idle == 1 })
		})
	}
}
