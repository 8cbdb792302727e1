package scale

import (
	"testing"
	"time"
)

// Instances that could not announce themselves, while the database or the leader was away, stay a part of the number.
// One that is not heard for as long as the others could is replaced.
func TestAnOutageReplacesNoInstance(t *testing.T) {
	db := driven(t)
	do(t, db, `SELECT penstock.set_deployment('llama-own', 'llama', '{"backend": "webhook", "policy": {"slots": 2, "max": 3}}')`)
	hook := &hooked{}
	servers := []string{"gpu-1", "gpu-2", "gpu-3"}
	w := &term{t, db, New(db, free{db}, Config{Backends: map[string]Backend{backendWebhook: hook}})}
	override(t, db, 3)
	w.round()
	for _, server := range servers {
		announce(t, db, server)
	}
	do(t, db, `UPDATE penstock.instance SET state = 'ready'`)
	do(t, db, `INSERT INTO penstock.slot (instance_id, number, token, node_id) SELECT id, 0, 1, 9 FROM penstock.instance WHERE server = 'gpu-1'`)
	w.round()
	do(t, db, `UPDATE penstock.instance SET expires_at = clock_timestamp() - interval '15 seconds'`)
	w.duty = New(db, free{db}, w.duty.cfg) // the next leader
	state := func() string {
		return one[string](t, db, `SELECT count(*) || ' registered, ' || count(draining_at) || ' drain, '
		                               || (SELECT ready FROM penstock.scale_input) || ' count' FROM penstock.instance`)
	}
	for range 3 {
		w.duty.applier.expire(t.Context())
		w.round()
	}
	if got := state(); got != "3 registered, 0 drain, 3 count" || hook.last().Count != 3 {
		t.Errorf("after the outage: %s, %d are ordered", got, hook.last().Count)
	}
	for _, server := range servers[:2] {
		if told := announce(t, db, server); told != "serve" {
			t.Errorf("%s is to %s", server, told)
		}
	}
	if n := one[int](t, db, `SELECT count(*) FROM penstock.cold_start`); n != 0 {
		t.Errorf("%d cold starts", n)
	}
	w.duty.applier.hearing.since = time.Now().Add(-31 * time.Second)
	w.duty.applier.expire(t.Context())
	if got := state(); got != "2 registered, 0 drain, 2 count" {
		t.Errorf("when one could have been heard and was not: %s", got)
	}
}

func TestHowLongInstancesCouldBeHeard(t *testing.T) {
	second := time.Second
	for _, c := range []struct {
		name           string
		passed, ticked time.Duration // since the answer before, here and by the clock of the database
		want           time.Duration
	}{
		{"an answer", 2 * second, 2 * second, 62 * second},
		{"a late one", 8 * second, 6 * second, 68 * second},
		{"an outage", 45 * second, 45 * second, 0},
		{"a step ahead", 2 * second, 62 * second, 0},
		{"this machine was suspended", 2 * second, 45 * second, 0},
		{"a clock that is set back", 2 * second, -time.Hour, 62 * second},
	} {
		var h hearing
		h.answered(noon, noon)
		for i := range 12 {
			h.answered(noon.Add(time.Duration(i+1)*5*second), noon.Add(time.Duration(i+1)*5*second))
		}
		if got := h.answered(noon.Add(time.Minute+c.ticked), noon.Add(time.Minute+c.passed)); got != c.want {
			t.Errorf("%s: %s, want %s", c.name, got, c.want)
		}
	}
	if got := new(hearing).answered(noon, noon); got != 0 {
		t.Errorf("at the begin of a term: %s", got)
	}
}
