package scale

import (
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
)

// minuteSums are the sums of the minutes of a model.
type minuteSums struct {
	Calls  int64
	Busy   float64
	Online float64
	Refuse float64
	Starts int64
	Cold   float64
}

// What nodes, gateways and starts added up is folded into minutes once, whoever leads: not again by the next leader, and not at all by
// one whose term is over, whose share the next one folds.
func TestMinutesAreFoldedOnceWhoeverLeads(t *testing.T) {
	db := fleet(t)
	used := func() {
		t.Helper()
		do(t, db, `INSERT INTO penstock.usage_hour AS u
		                  (hour, queue_id, model, flow, calls, gpu_ms, wasted_ms, tokens_in, tokens_cached, tokens_out)
		           SELECT date_trunc('hour', clock_timestamp(), 'UTC'), id, 'llama', '', 10, 20000, 0, 0, 0, 0
		             FROM penstock.queue WHERE name = 'llama'
		           ON CONFLICT (hour, queue_id, model, flow) DO UPDATE SET calls = u.calls + 10, gpu_ms = u.gpu_ms + 20000`)
		do(t, db, `INSERT INTO penstock.model_online (model, calls, refused) VALUES ('llama', 5, 3)
		           ON CONFLICT (model) DO UPDATE SET calls = model_online.calls + 5, refused = model_online.refused + 3`)
		do(t, db, `INSERT INTO penstock.cold_start (model, server, seconds) VALUES ('llama', 'gpu-1', 7)`)
	}
	folded := func(leader *Duty, ends bool, want minuteSums, when string) {
		t.Helper()
		if err := leader.Pass(t.Context()); (err == nil) != ends {
			t.Fatalf("%s: %v", when, err)
		}
		const sql = `SELECT sum(calls)::bigint AS calls, sum(busy_seconds) AS busy, sum(online) AS online, sum(refused) AS refuse,
		                    sum(starts) AS starts, sum(cold_seconds) AS cold FROM penstock.model_minute WHERE model = 'llama'`
		got, err := pgx.CollectExactlyOneRow(postgres.Query(t.Context(), db, sql), pgx.RowToStructByName[minuteSums])
		if err != nil {
			t.Fatal(err)
		}
		if got != want {
			t.Errorf("%s: %+v, want %+v", when, got, want)
		}
	}
	config := Config{keep: time.Nanosecond} // each pass stores its state
	first := New(db, free{db}, config)
	used()
	folded(first, true, minuteSums{}, "the first reading")
	used()
	folded(first, true, minuteSums{10, 20, 5, 3, 1, 7}, "use after it")
	folded(first, true, minuteSums{10, 20, 5, 3, 1, 7}, "no use")
	used()
	folded(New(db, over{}, config), false, minuteSums{10, 20, 5, 3, 1, 7}, "a leader whose term is over")
	folded(New(db, free{db}, config), true, minuteSums{20, 40, 10, 6, 2, 14}, "the next leader")
	folded(New(db, free{db}, config), true, minuteSums{20, 40, 10, 6, 2, 14}, "the one after that")
}

// The load of now is that of the last quarter of an hour, the forecast that of the half hour around this time last week.
func TestTheLoadOfNowAndOfLastWeekIsReadFromMinutes(t *testing.T) {
	db := fleet(t)
	for _, m := range []struct {
		ago           string
		arrived, busy float64
	}{
		{"1 minute", 30, 60},
		{"13 minutes", 15, 30},
		{"17 minutes", 1000, 1000},
		{"7 days -17 minutes", 1000, 1000},
		{"7 days -13 minutes", 10, 100},
		{"7 days 13 minutes", 10, 200},
		{"7 days 17 minutes", 1000, 1000},
	} {
		do(t, db, `INSERT INTO penstock.model_minute SELECT date_trunc('minute', now() - $1::interval), 'llama', $2, 0, 0, $3, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0`,
			m.ago, m.arrived, m.busy)
	}
	rows, err := pgx.CollectRows(postgres.Query(t.Context(), db, inputSQL, []string{"llama"}), pgx.RowToStructByName[input])
	if err != nil {
		t.Fatal(err)
	}
	if o := rows[0].observe(used{}, nil, 0); o.PerMin != 3 || o.Busy != 6 || o.Forecast != 10 {
		t.Errorf("%g requests and %g slot-seconds a minute, %g last week, want 3, 6 and 10", o.PerMin, o.Busy, o.Forecast)
	}
}

// Usage counts the time of each GPU and sequence; the time for which a call keeps its slot is what instances are counted by.
func TestServiceIsTheTimeOfASlotAndNotThatOfGPUs(t *testing.T) {
	db := fleet(t)
	used := func(calls, gpu, extra int) { // of calls with 8 GPUs and n = 4: 32 times the time of their slots
		t.Helper()
		do(t, db, `INSERT INTO penstock.usage_hour AS u
		                  (hour, queue_id, model, flow, calls, gpu_ms, wasted_ms, tokens_in, tokens_cached, tokens_out, extra_ms)
		           SELECT date_trunc('hour', clock_timestamp(), 'UTC'), id, 'llama', '', $1, $2, 0, 0, 0, 0, $3
		             FROM penstock.queue WHERE name = 'llama'`, calls, gpu, extra)
	}
	used(10, 320_000, 310_000)
	rows, err := pgx.CollectRows(postgres.Query(t.Context(), db, inputSQL, []string{"llama"}), pgx.RowToStructByName[input])
	if err != nil {
		t.Fatal(err)
	}
	in := rows[0]
	if busy := in.BusyMS + in.BusyMSBefore; in.Service != 1 || busy != 10_000 { // an hour may begin in between
		t.Errorf("a call keeps its slot for %g s, all of them for %d ms, want 1 and 10000", in.Service, busy)
	}
	// One of both hours had no use.
	if in.Calls+in.CallsBefore != 10 || in.Calls*in.CallsBefore != 0 || in.BusyMS*in.BusyMSBefore != 0 {
		t.Errorf("%d calls in this hour and %d in the one before, for %d and %d ms, want 10 and 10000 in one of them",
			in.Calls, in.CallsBefore, in.BusyMS, in.BusyMSBefore)
	}
}
