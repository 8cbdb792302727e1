package gateway

import (
	"context"
	"testing"
	"testing/synctest"
	"time"

	"github.com/penstock/penstock/pkg/worker"
)

// A process that was stopped uses no slot before it has compared them with the database; one that runs uses them
// also while the database is away.
func TestSlotsAreTrustedWhileTheProcessRuns(t *testing.T) {
	t.Parallel()
	for _, lease := range []time.Duration{5 * time.Second, 30 * time.Second} {
		synctest.Test(t, func(t *testing.T) {
			g := New(Config{Open: true})
			l := NewLeases(LeasesConfig{Lease: lease}, g, nil, nil)
			g.SetModels([]ModelState{{
				Name: "m", Protocol: worker.ProtocolOpenAI, Policy: DefaultPolicy(),
				Instances: []InstanceState{{ID: 1, Slots: 1, Usable: true}},
			}})
			g.Fixed()
			may := func() bool {
				r := &Request{TTL: time.Millisecond}
				err := l.gate("m").admit(t.Context(), r)
				if err == nil {
					l.gate("m").end(r, Taken{Took: time.Millisecond})
				}
				return err == nil
			}
			ctx, stop := context.WithCancel(t.Context())
			go l.keepTrust(ctx)
			time.Sleep(10 * time.Minute)
			if !may() {
				t.Errorf("lease %s: no slot is used although the process runs", lease)
			}
			stop() // as if no goroutine of it ran
			time.Sleep(lease)
			if may() {
				t.Errorf("lease %s: a slot is used after a stop", lease)
			}
			l.moveTrust(false)
			if may() || !l.check {
				t.Errorf("lease %s: a slot is used after a stop, or no comparison is asked for (%v)", lease, l.check)
			}
			l.moveTrust(true)
			if !may() {
				t.Errorf("lease %s: no slot is used after a comparison", lease)
			}
		})
	}
}
