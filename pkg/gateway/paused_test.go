package gateway

import (
	"net/http"
	"reflect"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

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

// lateRow is an answer of one row, which comes late.
type lateRow struct {
	pgx.Rows
	values []any
	read   bool
}

func (r *lateRow) Next() bool {
	if r.read {
		return false
	}
	r.read = true
	time.Sleep(10 * time.Second)
	return true
}

func (r *lateRow) Scan(to ...any) error {
	for i, value := range r.values {
		if value != nil {
			reflect.ValueOf(to[i]).Elem().Set(reflect.ValueOf(value))
		}
	}
	return nil
}

func (*lateRow) Close()                        {}
func (*lateRow) Err() error                    { return nil }
func (*lateRow) CommandTag() pgconn.CommandTag { return pgconn.CommandTag{} }

// The answers to the readings of settings begin before their rows are evaluated: of a long list the last ones come late.
func TestPausesAndTokensEndNoEarlierWhereTheirRowsComeLate(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		left, ends := new(60.0), time.Now().Add(70*time.Second) // the rows come after 10 s
		var s Settings
		token := make([]any, 14)
		token[13] = left
		if err := s.readTokens(&lateRow{values: token}); err != nil || !s.Tokens[0].ExpiresAt.Equal(ends) {
			t.Errorf("the token ends %v after the database says so (%v)", s.Tokens[0].ExpiresAt.Sub(ends), err)
		}
		ends = time.Now().Add(70 * time.Second)
		err := eachPause(&lateRow{values: []any{"m", "maintenance", left}}, func(_ string, p PauseState) {
			if !p.Until.Equal(ends) {
				t.Errorf("the pause ends %v after the database says so", p.Until.Sub(ends))
			}
		})
		if err != nil {
			t.Error(err)
		}
	})
}
