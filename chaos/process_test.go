package main

import (
	"os/exec"
	"testing"
	"time"

	"github.com/penstock/penstock/chaos/judge"
)

// Each stop is recorded until the process goes on. One for longer than half a lease is a death as well, also where it
// was to be shorter and the machine let the process go on late.
func TestEveryStopIsRecordedUntilTheProcessGoesOn(t *testing.T) {
	p := &process{name: "n1", cmd: exec.CommandContext(t.Context(), "sleep", "60"), ended: make(chan struct{})}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = p.cmd.Process.Kill()
		_ = p.cmd.Wait()
	}()
	recorded := func(list *[]judge.Death, n int) judge.Death {
		p.mu.Lock()
		defer p.mu.Unlock()
		if len(*list) != n {
			t.Fatalf("%d are recorded, want %d", len(*list), n)
		}
		return (*list)[n-1]
	}
	const hour = time.Hour
	if !p.freeze(hour, 4*hour) {
		t.Fatal("the process was not stopped")
	}
	if stop := recorded(&p.stops, 1); stop.Process != "n1.0" || stop.Until.Sub(stop.At) != hour || len(p.deaths) > 0 {
		t.Errorf("a stop for a quarter of a lease is %+v, with %d deaths", stop, len(p.deaths))
	}
	p.freeze(3*hour, 4*hour)
	if stop, death := recorded(&p.stops, 2), recorded(&p.deaths, 1); stop != death || stop.Until.Sub(stop.At) != 3*hour {
		t.Errorf("a stop for three quarters of a lease is %+v, and the death %+v", stop, death)
	}
	if place := p.noteStop(-1, judge.Death{Process: "n1.0", At: time.Now().Add(-3 * hour), Until: time.Now()}, 4*hour); place != 1 {
		t.Errorf("a stop that lasted longer than it was to is death %d, want 1", place)
	}
	p.thaw()
	for _, one := range append(p.stops, p.deaths...) {
		if time.Until(one.Until) > 0 {
			t.Errorf("after the faults a process is stopped until %v", one.Until)
		}
	}
}
