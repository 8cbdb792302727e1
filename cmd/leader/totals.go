package main

import (
	"sync"
	"time"

	"github.com/penstock/penstock/pkg/maintenance"
)

// total is the counters of a queue's table.
type total struct{ accepted, gone int64 }

// totals keeps what queues that are no more have counted, and queues whose statistics began anew: the sum over several
// queues is a counter, which never falls. Its zero value is ready to use.
type totals struct {
	mu   sync.Mutex
	at   time.Time // of the last sample
	last map[string]total
	rest total
}

// past takes note of the queues of a sample that share a series, and returns what is to be added to the sum of these.
func (t *totals) past(at time.Time, queues []maintenance.Sample) total {
	t.mu.Lock()
	defer t.mu.Unlock()
	if at.Before(t.at) { // of a scrape that began earlier
		return t.rest
	}
	now := make(map[string]total, len(queues))
	for _, q := range queues {
		now[q.Queue] = total{q.Accepted, q.Gone}
	}
	for queue, before := range t.last {
		if after := now[queue]; after.accepted < before.accepted || after.gone < before.gone {
			t.rest.accepted += before.accepted
			t.rest.gone += before.gone
		}
	}
	t.at, t.last = at, now
	return t.rest
}
