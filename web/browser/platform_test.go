package browser

import (
	"encoding/json"
	"fmt"
)

// platform adds gateways with their pools, deployments with an hour of decisions, and an entry that has ended with
// an answer and a callback.
func (s *stage) platform() {
	s.Helper()
	ctx := s.Context()
	for i, name := range []string{"gateway-1", "gateway-2"} {
		load, err := json.Marshal(map[string]any{
			"kind": "gateway", "listen": fmt.Sprintf("10.2.1.%d:8430", i+1),
			"pools": map[string]any{
				"llama-70b": map[string]any{
					"mode": "queue", "ceiling": 12, "stock": 11 + i, "held": 12,
					"waiting": map[string]int{"critical": 2, "default": 31 + 4*i, "sheddable": 9},
					"dropped": map[string]int{"overloaded": 1240, "queue_timeout": 17, "client_closed": 96, "rate_limit_exceeded": 408},
				},
				"whisper-v3": map[string]any{
					"mode": "pass", "ceiling": 8, "stock": 3, "held": 8, "waiting": map[string]int{}, "dropped": map[string]int{},
				},
			},
		})
		s.must(err)
		s.exec(`INSERT INTO penstock.node (id, name, application, threads, lease, kind, load, started_at)
		        VALUES ($1, $2, 'default', 0, '1 hour', 'gateway', $3::jsonb, now() - interval '26 h')`, 7101+i, name, load)
	}
	s.exec(`INSERT INTO penstock.slot (instance_id, number, token, node_id, leased_at)
	        SELECT i.id, n, i.id * 1000 + 500 + n, 7101 + n % 2, now() - n * interval '1 s'
	          FROM penstock.instance i, generate_series(14, 20) n WHERE i.server <> 'gpu-a2'`)
	s.must(s.change.SetGatewayPolicy(ctx, "llama-70b", []byte(`{"total": 500, "queue_ttl": 20}`), tester))
	s.must(s.change.SetFlowCriticality(ctx, "acme", "critical", tester))
	s.must(s.change.SetDeployment(ctx, "llama-own", "llama-70b", map[string]any{
		"policy": map[string]any{"slots": 24, "max": 8, "slo_seconds": 30}, "cost": 2.4,
	}, tester))
	s.must(s.change.SetDeployment(ctx, "llama-spot", "llama-70b", map[string]any{"fill_order": 1, "cost": 0.9}, tester))
	s.must(s.change.SetDeployment(ctx, "whisper", "whisper-v3", map[string]any{"mode": "up-only"}, tester))
	s.exec(`INSERT INTO penstock.model_minute (minute, model, arrived, online, calls, busy_seconds, refused, starts, cold_seconds,
	                waiting, running, base, raw, stabilised, desired, ready, starting)
	        SELECT date_trunc('minute', now()) - n * interval '1 min', 'llama-70b', x.load * 60 / 5.2, 0, (x.load * 60 / 5.2)::int, x.load * 60,
	               0, 0, 0, greatest(0, (x.load - x.ready * 24)::int), least(x.load, x.ready * 24)::int, x.raw, x.raw, x.held, x.held, x.ready, 0
	          FROM generate_series(0, 59) n
	         CROSS JOIN LATERAL (SELECT 40 + 30 * sin(n / 9.0) + 12 * sin(n / 2.3) AS load) l
	         CROSS JOIN LATERAL (SELECT l.load, ceil(l.load / 20)::int AS raw,
	                ceil((40 + 30 * sin(ceil(n / 6.0) * 6 / 9.0) + 12) / 20)::int AS held,
	                ceil((40 + 30 * sin(ceil((n + 3) / 6.0) * 6 / 9.0) + 12) / 20)::int AS ready) x`)
	s.exec(`INSERT INTO penstock.scale_decision (at, model, before, desired, base, raw, stabilised, ready, applied, notes, why)
	        SELECT m.minute + interval '7 s', m.model, m.before, m.desired, m.base, m.raw, m.stabilised, m.ready, true, '[]',
	               CASE WHEN m.desired > m.before THEN 'the backlog needs ' || m.desired || ': ' || (m.waiting + 18) || ' wait, with ' || (m.waiting + 18) * 5 || ' slot-seconds of work'
	                    ELSE m.desired || ' were needed lately: no fewer for another 240 s' END
	          FROM (SELECT x.*, lag(desired) OVER (ORDER BY minute) AS before FROM penstock.model_minute x) m
	         WHERE m.before <> m.desired`)
	s.exec(`INSERT INTO penstock.scale_state (model, state, arrived, desired, base, raw, stabilised, ready, metric, why, decided_at)
	        SELECT model, '{}', 0, desired, base, raw, stabilised, ready, waiting + running,
	               'the load needs 3: with so many all along, requests would wait 4.1 s in the queue, with one fewer 38.0 s; ' || desired || ' were needed lately: no fewer for another 240 s', now()
	          FROM penstock.model_minute ORDER BY minute DESC LIMIT 1`)
	s.exec(`INSERT INTO penstock.usage_hour (hour, queue_id, model, flow, calls, gpu_ms, wasted_ms, tokens_in, tokens_cached, tokens_out)
	        SELECT date_trunc('hour', now()) - n * interval '1 h', q.id, q.model, 'acme', 27700, 144040000, 2100000, 41000000, 9000000, 8000000
	          FROM penstock.queue q, generate_series(0, 1) n WHERE q.model = 'llama-70b'`)
	s.ended()
}

// endedEntry is the id of an entry that has ended.
const endedEntry = 990_001

// ended makes an entry that was retried once, and ended with an answer whose first byte came after 310 ms.
func (s *stage) ended() {
	s.Helper()
	s.exec(`INSERT INTO penstock.result (entry_id, created_at, finished_at, queue_id, node_id, token, run_ms, attempt, outcome, result, meta)
	        SELECT $1, now() - interval '12 s', now() - interval '4 s', q.id, 7001, 71, 2900, 1, 'done',
	               '{"text": "Water hammer is a pressure surge.", "tokens": 412}',
	               '{"model": "llama-70b", "instance": "gpu-a1", "slot": 3, "run_ms": 2600, "first_byte_ms": 310.5, "gpu_ms": 2560,
	                 "status": 200, "tokens_in": 1840, "tokens_out": 412}'
	          FROM penstock.queue q WHERE q.name = 'embeddings'`, endedEntry)
	s.exec(`INSERT INTO penstock.callback_sent (entry_id, callback_id, at) VALUES ($1, $2, now() - interval '4 s')`, endedEntry, endedEntry+1)
	s.exec(`INSERT INTO penstock.result (entry_id, created_at, finished_at, queue_id, node_id, token, run_ms, attempt, outcome)
	        SELECT $1, now() - interval '4 s', now() - interval '2 s', q.id, 7001, 72, 180, 0, 'done'
	          FROM penstock.queue q WHERE q.name = 'webhook'`, endedEntry+1)
}

// hostilePlatform adds a text of an attacker to what gateways report and to the decisions of the autoscaler.
func (s *stage) hostilePlatform(i int, text string) {
	s.Helper()
	s.exec(`INSERT INTO penstock.node (id, name, application, threads, kind, lease, load)
	        VALUES ($1, $2, 'default', 0, 'gateway', '1 hour', jsonb_build_object('listen', $2::text, 'pools', jsonb_build_object(
	               'llama-70b', jsonb_build_object('mode', $2::text, 'dropped', jsonb_build_object($2::text, 3)))))`, 8500+i, text)
	s.exec(`INSERT INTO penstock.flow_criticality (flow, criticality) VALUES ($1, 'default')`, text)
	s.exec(`INSERT INTO penstock.scale_decision (at, model, before, desired, base, raw, stabilised, ready, applied, notes, why)
	        VALUES (now() - $1 * interval '1 s', 'llama-70b', 1, 2, 2, 3, 3, 2, true, '[]', $2)`, i, text)
}
