package scale

import (
	"context"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"
)

// host is a backend of several deployments that use the same devices.
type host struct {
	mu      sync.Mutex
	all     map[string][]BackendInstance
	devices int
	started int
}

func (h *host) List(_ context.Context, d BackendTarget) ([]BackendInstance, error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	return slices.Clone(h.all[d.Name]), nil
}

func (h *host) Apply(_ context.Context, o Order) error {
	h.mu.Lock()
	defer h.mu.Unlock()
	used := 0
	h.all[o.Name] = slices.DeleteFunc(h.all[o.Name], func(i BackendInstance) bool { return slices.Contains(o.Remove, i.Name) })
	for _, instances := range h.all {
		used += len(instances)
	}
	for ; len(h.all[o.Name]) < o.Count; used++ {
		if used == h.devices {
			return fmt.Errorf("all %d devices are in use: %w", h.devices, ErrNoRoom)
		}
		h.started++
		name := fmt.Sprintf("%s-%d", o.Name, h.started)
		h.all[o.Name] = append(h.all[o.Name], BackendInstance{
			Name: name, Endpoint: "http://" + name, Began: time.Now(), State: InstanceRunning, TemplateHash: o.TemplateHash,
		})
	}
	return nil
}

// An instance goes to a deployment that is filled before its own where there is room for one of the two alone.
func TestTheFirstDeploymentGetsTheOnlyDevice(t *testing.T) {
	for name, c := range map[string]struct {
		devices int
		budget  string
	}{"one device": {1, "0"}, "a budget for one": {9, "1"}} {
		t.Run(name, func(t *testing.T) {
			db := fleet(t)
			h := &host{all: map[string][]BackendInstance{}, devices: c.devices}
			w := &term{t, db, New(db, free{db}, Config{Backends: map[string]Backend{backendLocal: h}})}
			deploy := func(name string, order int) {
				do(t, db, `SELECT penstock.set_deployment($1, 'llama', jsonb_build_object('backend', 'local', 'fill_order', $2::int,
				           'policy', '{"slots": 2, "max": 8}'::jsonb))`, name, order)
			}
			rounds := func(n int) {
				for range n {
					w.round()
					do(t, db, `UPDATE penstock.deployment_state SET retry_at = clock_timestamp()`)
					do(t, db, `UPDATE penstock.instance SET state = 'ready'`)
				}
			}
			do(t, db, `SELECT penstock.set_scale_setting('scale.budget', $1)`, c.budget)
			deploy("llama-own", 1)
			w.round()
			push(t, db, 1)
			rounds(4)
			if n := len(h.all["llama-own"]); n != 1 {
				t.Fatalf("%d instances at first", n)
			}
			deploy("llama-new", 0)
			rounds(12)
			if n, left := len(h.all["llama-new"]), len(h.all["llama-own"]); n != 1 || left != 0 {
				t.Errorf("%d instances of the first deployment, %d of the second", n, left)
			}
			if n := one[int](t, db, `SELECT desired FROM penstock.scale_state`); n != 1 {
				t.Errorf("%d are recorded as desired", n)
			}
		})
	}
}

// The number that an override sets for a deployment whose mode permits no change is published as it is: the budget
// takes nothing of it, and adds nothing.
func TestAnOverrideOfAnAdvisedDeploymentHoldsUnderABudget(t *testing.T) {
	now := time.Now()
	later := now.Add(time.Hour)
	for _, mode := range []Mode{Advise, Disabled} {
		for _, c := range []struct {
			override         int
			budget           float64
			a, b, desired    int
			notes, wantedOfA int
		}{
			{override: 0, budget: 1000, a: 1, b: 0, desired: 1, wantedOfA: 1},
			{override: 5, budget: 1000, a: 1, b: 5, desired: 6, wantedOfA: 1},
			{override: 5, budget: 7, a: 2, b: 5, desired: 7, wantedOfA: 4, notes: 1},
		} {
			shares := []share{
				{Name: "a", Model: "m", Cost: 1, Mode: string(Full), Backend: backendKEDA, Desired: 1, Ready: 1},
				{
					Name: "b", Model: "m", Cost: 1, FillOrder: 1, Mode: string(mode), Backend: backendKEDA, Desired: 3, Ready: 3,
					Override: &c.override, OverrideUntil: &later,
				},
			}
			for i := range shares {
				shares[i].policy.Mode, shares[i].policy.Max = Mode(shares[i].Mode), 5
			}
			n := c.override + c.wantedOfA
			v := &verdict{in: input{Model: "m", Budget: c.budget, At: now}, shares: shares, parts: spread(n, 0, shares, now)}
			v.d.Desired, v.d.Apply = n, true
			limitByBudget([]*verdict{v}, map[string][]share{"m": shares})
			if v.parts["a"] != c.a || v.parts["b"] != c.b || v.d.Desired != c.desired || len(v.d.Notes) != c.notes {
				t.Errorf("%s, override %d, budget %v: %v, desired %d, notes %v", mode, c.override, c.budget, v.parts, v.d.Desired, v.d.Notes)
			}
		}
	}
}
