package doctor

import (
	"fmt"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
)

// standsSince makes the entry of the queue two minutes old, and samples in which none has left.
func (s *standstill) standsSince() {
	s.Helper()
	exec(s.T, s.pool, fmt.Sprintf(`UPDATE penstock.%s SET created_at = now() - interval '2 minutes'`, pgx.Identifier{"entry_" + s.queue.Name}.Sanitize()))
	s.sampled(0)
}

// A queue whose model is being started waits as it should; the time of a start that is stuck is over.
func TestAQueueThatWaitsForAStartDoesNotStandStill(t *testing.T) {
	s := newStandstill(t)
	exec(t, s.pool, `SELECT penstock.set_deployment('own', 'm', '{}')`)
	const starts = `UPDATE penstock.instance SET state = 'starting', ready_at = NULL, created_at = now() - $1::interval, deployment = 'own'`
	exec(t, s.pool, starts, "5 minutes")
	s.standsSince()
	want(t, find(t, s.pool, "standstills", Config{}), Fine)
	exec(t, s.pool, starts, "11 minutes")
	want(t, find(t, s.pool, "standstills", Config{}), Critical, "gpu-1 is starting")

	exec(t, s.pool, `SELECT penstock.remove_instance('m', 'gpu-1', true)`)
	want(t, find(t, s.pool, "standstills", Config{}), Fine)
	exec(t, s.pool, `SELECT penstock.set_scale_setting('scale.off', 'true')`)
	want(t, find(t, s.pool, "standstills", Config{}), Critical, "none of the 0 instances of model m")
	exec(t, s.pool, `SELECT penstock.set_scale_setting('scale.off', NULL)`)
	exec(t, s.pool, `SELECT penstock.remove_deployment('own')`)
	want(t, find(t, s.pool, "standstills", Config{}), Critical, "none of the 0 instances of model m")
}

const holdSQL = `
INSERT INTO penstock.slot (instance_id, number, token, node_id, leased_at)
SELECT id, n, 1000 + n, $1, now() - interval '5 minutes' FROM penstock.instance, generate_series(0, $2::int - 1) n`

// locks makes the node run so many entries of another queue.
func (s *standstill) locks(of string, n int) {
	s.Helper()
	exec(s.T, s.pool, `
INSERT INTO penstock.lock (queue_id, lock_key, token, node_id, claim_id, flow, priority, entry_count, last_entry_id, claimed_at, pos, cost)
SELECT q.id, '#' || 900 + n, 900 + n, $2, 1, '', 1, 1, 900 + n, now() - interval '10 minutes', 1, 1
  FROM penstock.queue q, generate_series(1, $3::int) n WHERE q.name = $1`, of, live, n)
}

// Slots and threads that live nodes use for another queue, and slots of gateways, come free by themselves.
func TestAQueueThatWaitsForTheWorkOfOthersDoesNotStandStill(t *testing.T) {
	s := newStandstill(t)
	exec(t, s.pool, `SELECT penstock.create_queue('other', '{"kind": "inference", "model": "m"}')`)
	exec(t, s.pool, holdSQL, live, 2)
	s.locks("other", 2)
	s.standsSince()
	if text := s.explained(); text != "2 of 2 slots of model m are held" {
		t.Errorf("explained as %q", text)
	}
	want(t, find(t, s.pool, "standstills", Config{}), Fine)
	exec(t, s.pool, `DELETE FROM penstock.lock`)
	exec(t, s.pool, `UPDATE penstock.node SET kind = 'gateway', threads = 0 WHERE id = $1`, dead)
	exec(t, s.pool, `UPDATE penstock.node SET beat_at = clock_timestamp() WHERE id = $1`, dead)
	exec(t, s.pool, `UPDATE penstock.slot SET node_id = $1`, dead)
	if text := s.explained(); text != "2 of 2 slots of model m are held" {
		t.Errorf("explained as %q", text)
	}
	want(t, find(t, s.pool, "standstills", Config{}), Fine)

	exec(t, s.pool, `DELETE FROM penstock.slot`)
	exec(t, s.pool, `DELETE FROM penstock.node WHERE id = $1`, dead)
	s.locks("other", 8)
	if text := s.explained(); !strings.Contains(text, "all 8 processing threads") {
		t.Errorf("explained as %q", text)
	}
	want(t, find(t, s.pool, "standstills", Config{}), Fine)
}

// A client that went away leaves a slot in doubt: its node lives, and penstock slot dead has nothing of it.
func TestSlotsInDoubtAreNotThoseOfDeadNodes(t *testing.T) {
	s := newStandstill(t)
	exec(t, s.pool, holdSQL, live, 2)
	exec(t, s.pool, `UPDATE penstock.slot SET doubt_at = now() - interval '2 minutes', doubt = 'online call was broken off'`)
	want(t, find(t, s.pool, "dead slots", Config{}), Fine)
	if text := s.explained(); text != "2 of 2 slots of model m are held, 2 of them by calls that no node follows" {
		t.Errorf("explained as %q", text)
	}
	s.standsSince()
	want(t, find(t, s.pool, "standstills", Config{}), Critical, "2 of 2 slots of model m are held")
}

// The leader samples the less often the longer it takes. What it stored last is then older than half a minute.
func TestAQueueThatIsSampledSeldomIsSeenToStandStill(t *testing.T) {
	s := newStandstill(t)
	s.standsSince()
	const move = `UPDATE penstock.sample SET at = at - $1::interval`
	exec(t, s.pool, `DELETE FROM penstock.sample WHERE at NOT IN (SELECT at FROM penstock.sample ORDER BY at DESC LIMIT 2)`)
	exec(t, s.pool, `UPDATE penstock.sample SET at = at - interval '110 seconds' WHERE at = (SELECT min(at) FROM penstock.sample)`)
	exec(t, s.pool, move, "2 minutes")
	want(t, find(t, s.pool, "standstills", Config{}), Critical, "none has left it for 1 m")
	exec(t, s.pool, move, "6 minutes") // the leader is gone
	want(t, find(t, s.pool, "standstills", Config{}), Fine)
}
