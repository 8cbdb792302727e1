package browser

import (
	"encoding/json"
	"fmt"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
)

// seed makes a platform of a few tenants at work: queues, nodes with locks, models with slots, results of an hour,
// failures, cron jobs, batches and operations. The numbers are the same in each run, the times relative to now.
func (s *stage) seed() {
	s.Helper()
	ctx := s.Context()
	s.exec(`CREATE TABLE penstock.sample_ever PARTITION OF penstock.sample FOR VALUES FROM (MINVALUE) TO (MAXVALUE)`)
	s.exec(`INSERT INTO penstock.leader (name, term, holder, elected_at, renewed_at, lease)
	        VALUES ('leader', 12, 'leader-1', now() - interval '3 h', now() + interval '1 day', '4 s')`)
	for i, server := range []string{"gpu-a1", "gpu-a2", "gpu-b1"} {
		if i == 0 {
			s.must(ignore(s.change.RegisterModel(ctx, "llama-70b", []byte(`{"protocol": "openai"}`), tester)))
			s.must(ignore(s.change.RegisterModel(ctx, "whisper-v3", []byte(`{"protocol": "cog"}`), tester)))
		}
		model := "llama-70b"
		if server == "gpu-b1" {
			model = "whisper-v3"
		}
		s.must(s.change.RegisterInstance(ctx, operator.Instance{
			Model: model, Server: server, Endpoint: fmt.Sprintf("http://10.2.0.%d:8000", i+11), Slots: 24, Labels: json.RawMessage(`{}`),
		}, tester))
	}
	queues := map[string]int{"thumbnails": 60, "embeddings": 140, "reports": 24, "emails": 12}
	n := 0
	for name, entries := range queues {
		s.queue(name, entries, n)
		n++
	}
	s.nodes()
	s.exec(`UPDATE penstock.instance SET state = 'ready', active = 9, queued = 2, checked_at = now() - interval '2 s'`)
	s.exec(`UPDATE penstock.instance SET state = 'unhealthy', quarantined_until = now() + interval '4 min',
	               quarantine_reason = 'four device errors within a minute: CUDA error 719' WHERE server = 'gpu-a2'`)
	s.exec(`INSERT INTO penstock.slot (instance_id, number, token, node_id, leased_at, doubt_at, doubt)
	        SELECT i.id, n, i.id * 1000 + n, 7001 + n % 2, now() - n * interval '2 s',
	               CASE WHEN n = 11 THEN now() END, CASE WHEN n = 11 THEN 'its node is gone' END
	          FROM penstock.instance i, generate_series(0, 13) n WHERE i.server <> 'gpu-a2'`)
	s.must(s.change.CreateQueue(ctx, "nightly", map[string]any{"kind": "cron"}, tester))
	for job, spec := range map[string]string{"invoices": "30 2 * * *", "probe-mirrors": "*/5 * * * *", "vacuum-cache": "0 */2 * * *"} {
		s.must(s.change.CreateCronJob(ctx, job, "nightly", spec, nil, tester))
	}
	s.exec(`INSERT INTO penstock.cron_firing (job_id, nominal_at, fired_at, entry_id, manual)
	        SELECT id, now() - n * interval '2 h', now() - n * interval '2 h' + interval '80 ms', n, n = 2
	          FROM penstock.cron_job, generate_series(1, 4) n`)
	s.must(ignore(s.change.CreateBatch(ctx, "reindex 2026-03", "embeddings", map[string]any{"items": []int{1, 2, 3}}, tester)))
	s.exec(`DELETE FROM penstock.batch_part`)
	s.exec(`INSERT INTO penstock.batch_part (batch_id, no, outcome, entry_id, ended_at, items)
	        SELECT b.id, n, CASE WHEN n < 260 THEN 'done' WHEN n < 268 THEN 'failed' END::penstock.outcome,
	               CASE WHEN n < 300 THEN n END, CASE WHEN n < 268 THEN now() END, '[]'
	          FROM penstock.batch b, generate_series(1, 400) n`)
	s.exec(`UPDATE penstock.batch SET status = 'running'`)
	s.must(ignore(s.change.StartOperation(ctx, operator.OperationRequest{
		Queue: "reports", Verb: operator.DisableAll, Filter: operator.Filter{Name: "render"}, By: tester,
	})))
	s.must(ignore(s.change.Do(ctx, operator.PauseQueue, "emails",
		invalidation.By{Actor: "ada", Reason: "the relay is being moved"}, time.Time{})))
	s.must(s.change.SetFlowWeight(ctx, "acme", "", 2, tester))
	s.platform()
}

func ignore[T any](_ T, err error) error { return err }

// queue makes a queue with entries, samples of an hour, results and failures.
func (s *stage) queue(name string, entries, seed int) {
	s.Helper()
	ctx := s.Context()
	q, err := invalidation.Create(ctx, s.pool, name, invalidation.Config{})
	s.must(err)
	pushes := make([]invalidation.Push, entries)
	for i := range pushes {
		pushes[i] = invalidation.Push{
			Payload: json.RawMessage(fmt.Sprintf(`{"document": %d, "tenant": "acme"}`, i)),
			Flow:    []string{"acme", "globex", "initech"}[i%3], Name: "render",
		}
		if i%4 == 0 {
			pushes[i].LockKey = fmt.Sprintf("document-%d", i%16)
		}
		if i%9 == 0 {
			pushes[i].DueAt = time.Now().Add(20 * time.Minute)
		}
	}
	_, err = q.Push(ctx, pushes...)
	s.must(err)
	s.exec(`INSERT INTO penstock.sample (queue_id, at, initial, pending, disabled, computing, failed, estimated, serving, head_age,
	                accepted, gone, dead_tuples, in_per_second, out_per_second)
	        SELECT $1, clock_timestamp() - n * interval '5 s', $2 / 9, $2 + (sin(n / 30.0) * $2 / 3)::int, 0, 8 + n % 5, 18, false, 2,
	               4 + 3 * sin(n / 40.0), 1000 - n, 900, 17, 12 + 5 * sin(n / 25.0 + $3) + n % 3, 11 + 4 * sin(n / 31.0 + $3)
	          FROM generate_series(0, 700) n`, q.ID, entries, seed)
	s.exec(`INSERT INTO penstock.result (entry_id, created_at, finished_at, queue_id, node_id, token, run_ms, attempt, outcome, result, meta)
	        SELECT 900000 + n, now() - (5000 - n) * interval '0.7 s' - (300 + 900 * abs(sin(n * 12.9898)) ^ 3 * 12) * interval '1 ms',
	               now() - (5000 - n) * interval '0.7 s', $1, 7001, n, (300 + 900 * abs(sin(n * 78.233)) ^ 2 * 6)::bigint, 1, 'done', '{"ok": true}',
	               '{"instance": "gpu-a1", "slot": 3, "model": "llama-70b"}'
	          FROM generate_series(1, 5000) n`, q.ID)
	s.exec(`INSERT INTO penstock.failure (entry_id, created_at, queue_id, priority, attempt, crashes, flow, class, error, fingerprint, payload, failed_at)
	        SELECT $2 + n, now() - interval '1 h', $1, 1, 3, 0, 'acme', CASE WHEN n % 3 = 0 THEN 'timeout' ELSE 'permanent' END,
	               CASE WHEN n % 3 = 0 THEN 'no answer within 30 s from gpu-a2' ELSE 'worker answered 422: page ' || n || ' is not a picture' END,
	               CASE WHEN n % 3 = 0 THEN 'no answer within # s from gpu-a#' ELSE 'worker answered #: page # is not a picture' END,
	               '{"document": 7}', clock_timestamp() - n * interval '90 s'
	          FROM generate_series(1, 18) n`, q.ID, 500_000+1000*seed)
	s.exec(`INSERT INTO penstock.usage (service, lift, at, queue_id, priority, whole, flow)
	        SELECT x.service, 0, now(), $1, 1, false, x.flow FROM (VALUES (900.0, 'acme'), (420.0, 'globex'), (260.0, 'initech')) x(service, flow)`, q.ID)
}

// nodes registers two nodes that hold locks, and one that is dead.
func (s *stage) nodes() {
	s.Helper()
	ctx := s.Context()
	var ids []int32
	rows, err := s.pool.Query(ctx, `SELECT id FROM penstock.queue WHERE kind = 'task' ORDER BY id`)
	s.must(err)
	for rows.Next() {
		var id int32
		s.must(rows.Scan(&id))
		ids = append(ids, id)
	}
	s.must(rows.Err())
	claim := int32(0)
	for i, name := range []string{"node-a", "node-b"} {
		id := invalidation.NodeID(7001 + i)
		s.must(invalidation.Register(ctx, s.pool, invalidation.Node{
			ID: id, Name: name, Application: "default", Lease: time.Hour, Queues: ids,
		}))
		var tokens []invalidation.Token
		for _, queue := range []string{"thumbnails", "embeddings", "reports"} {
			q, err := invalidation.Open(ctx, s.pool, queue)
			s.must(err)
			for _, flow := range []string{"acme", "globex"} {
				claim++
				c, err := q.Claim(ctx, invalidation.ClaimRequest{
					Node: id, Lane: invalidation.Lane{Priority: 1, Flow: flow}, Limit: 4, ClaimID: claim,
				})
				s.must(err)
				for _, l := range c.Locks {
					tokens = append(tokens, l.Token)
				}
			}
		}
		_, err := invalidation.Renew(ctx, s.pool, id, invalidation.Beat{Tokens: tokens, Load: map[string]any{
			"version": "v0.9.0", "hints": "heard", "claims": 41200, "claimed": 39800, "runs": 39700, "run_errors": 212, "claim_ms": 61000,
			"refusals": map[string]int{"slots": 1840, "threads": 310, "memory_high": 12 * i},
			"governor": map[string]any{"levels": []map[string]any{
				{"resource": "cpu", "used": 0.47 + 0.47*float64(i), "high": 0.9, "low": 0.75, "closed": i == 1, "declared_only": true},
				{"resource": "memory", "used": 0.71 + 0.21*float64(i), "high": 0.9, "low": 0.8, "closed": i == 1},
			}},
		}})
		s.must(err)
	}
	s.exec(`UPDATE penstock.node SET threads = 32, started_at = now() - interval '26 h'`)
	s.age()
	s.exec(`INSERT INTO penstock.node (id, name, application, threads, beat_at, lease) VALUES (7009, 'node-c', 'default', 32, now() - interval '40 s', '10 s')`)
}

// age makes samples and heartbeats recent and locks a few seconds old, as those of runs at work.
func (s *stage) age() {
	s.Helper()
	s.exec(`UPDATE penstock.lock SET claimed_at = now() - (abs(sin(token * 12.9898)) * 7) * interval '1 s'`)
	s.exec(`UPDATE penstock.sample SET at = at + (SELECT clock_timestamp() - max(at) FROM penstock.sample)`)
	s.exec(`UPDATE penstock.node SET beat_at = now() - interval '1 s' WHERE lease > interval '1 min'`)
}
