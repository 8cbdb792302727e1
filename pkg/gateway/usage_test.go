package gateway

import (
	"fmt"
	"math"
	"testing"
	"time"
)

// Use that the database refuses takes no use of other flows with it.
func TestRefusedUseTakesNoOtherUseWithIt(t *testing.T) {
	t.Parallel()
	x := newExchange(t)
	m, queue := x.meter()
	for range 2 {
		m.Charge(Charge{Model: "m", Queue: queue, Flow: "evil", Took: time.Second, TokensIn: math.MaxInt64})
		for i := range 9 {
			m.Charge(Charge{Model: "m", Queue: queue, Flow: fmt.Sprint("honest", i), Took: time.Second, TokensIn: 5})
		}
		m.Refuse("m")
		if err := m.Fold(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if n := x.count(`SELECT sum(calls)::int FROM penstock.usage_hour WHERE flow LIKE 'honest%'`); n != 18 {
		t.Errorf("%d calls of other flows are counted, want 18", n)
	}
	if n := x.count(`SELECT refused::int FROM penstock.model_online WHERE model = 'm'`); n != 2 {
		t.Errorf("%d refusals are counted, want 2", n)
	}
}

// Budgets are read by the database's clock: use is booked to its hour, whatever the clock of this machine says.
func TestUseIsBookedToTheHourOfTheDatabase(t *testing.T) {
	t.Parallel()
	x := newExchange(t)
	m, queue := x.meter()
	booked := func(flow string) (hoursAhead float64) {
		t.Helper()
		m.Charge(Charge{Model: "m", Queue: queue, Flow: flow, Took: time.Second})
		if err := m.Fold(t.Context()); err != nil {
			t.Fatal(err)
		}
		err := x.pool.QueryRow(t.Context(), `SELECT extract(epoch FROM hour - clock_timestamp())::float8 / 3600
			FROM penstock.usage_hour WHERE flow = $1`, flow).Scan(&hoursAhead)
		if err != nil {
			t.Fatal(err)
		}
		return hoursAhead
	}
	m.Clock.Set(time.Now().Add(100 * time.Hour))
	if h := booked("ahead"); h < 98 {
		t.Errorf("booked to an hour that began %.1f hours from now, want the hour of the last reading", h)
	}
	if h := booked("right"); h < -2 || h > 0 {
		t.Errorf("booked to an hour that began %.1f hours from now, though the answer to the last fold had the time", h)
	}
}

// A bill by application has the use of queues that were dropped since.
func TestUseKeepsTheApplicationOfADroppedQueue(t *testing.T) {
	t.Parallel()
	x := newExchange(t)
	m, queue := x.meter()
	m.Charge(Charge{Model: "m", Queue: queue, Flow: "f", Took: time.Second})
	if err := m.Fold(t.Context()); err != nil {
		t.Fatal(err)
	}
	x.exec(`SELECT penstock.drop_queue(name, true) FROM penstock.queue WHERE model = 'm'`)
	if n := x.count(`SELECT count(*) FROM penstock.usage_hours WHERE application = 'default'`); n != 1 {
		t.Errorf("the application has %d rows of use, want 1", n)
	}
}

// Calls of less than a millisecond, as those for an embedding, come to their time, however often it is folded.
func TestTimesBelowAMillisecondAddUp(t *testing.T) {
	t.Parallel()
	x := newExchange(t)
	m, queue := x.meter()
	const half = 500 * time.Microsecond
	for range 8 {
		m.Charge(Charge{Model: "m", Queue: queue, Flow: "f", Took: half, GPU: 3 * half, Wasted: true})
		if err := m.Fold(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	// A call that ends as an hour begins leaves a part of a millisecond to the one before.
	if n := x.count(`SELECT count(*) FROM (SELECT sum(calls) AS calls, sum(gpu_ms) AS gpu, sum(extra_ms) AS extra,
		sum(wasted_ms) AS wasted FROM penstock.usage_hour) u
		WHERE calls = 8 AND gpu BETWEEN 11 AND 12 AND extra BETWEEN 7 AND 8 AND wasted BETWEEN 11 AND 12`); n != 1 {
		t.Errorf("8 calls of 1.5 ms are %d ms, want 12", x.count(`SELECT sum(gpu_ms)::int FROM penstock.usage_hour`))
	}
}
