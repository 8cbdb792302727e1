package gateway

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/durable"
	"github.com/penstock/penstock/internal/postgres"
)

// Settings are those of operators for pools, flows and tokens.
type Settings struct {
	Policies map[string]PoolPolicy   `json:"policies"` // by model
	Flows    map[string]FlowState    `json:"flows"`
	Tokens   []TokenState            `json:"tokens"`
	Budgets  map[string]Budget       `json:"budgets"` // of GPU time, by the name of the token
	Paused   map[string]PauseState   `json:"paused"`  // models that may not be called
	Starts   map[string]Starts       `json:"starts"`  // by model; none: no instance may start
	Readings map[int32]InstanceState `json:"-"`       // latest probes, by instance
}

// PauseState is an order that no call may begin.
type PauseState struct {
	Reason string    `json:"reason"` // empty: there is none
	Until  time.Time `json:"until"`  // by the clock of this machine; zero: until it is ended
}

// holds says whether no call may begin at a time.
func (p PauseState) holds(now time.Time) bool {
	return p.Reason != "" && (p.Until.IsZero() || now.Before(p.Until))
}

// longer returns the one of two pauses that ends later.
func (p PauseState) longer(other PauseState) PauseState {
	switch {
	case p.Reason == "":
		return other
	case other.Reason == "" || p.Until.IsZero():
		return p
	case other.Until.IsZero() || other.Until.After(p.Until):
		return other
	}
	return p
}

// SetBudgets replaces the budgets, and those of the tokens by their names.
func (s *Settings) SetBudgets(budgets map[string]Budget) {
	s.Budgets = budgets
	s.Tokens = slices.Clone(s.Tokens) // a snapshot may be written from the old ones
	for i := range s.Tokens {
		s.Tokens[i].Budget = budgets[s.Tokens[i].Name]
	}
}

// These read the settings. They are small tables; the queries go in one round trip.
const (
	policiesSQL = `SELECT model, config FROM penstock.gateway_policy`
	flowsSQL    = `
SELECT coalesce(c.flow, w.flow), coalesce(c.criticality, ''), coalesce(w.weight, 0)::float8
  FROM penstock.flow_criticality c
  FULL JOIN (SELECT flow, weight FROM penstock.flow_weight WHERE queue_id IS NULL) w ON w.flow = c.flow`
	// A rate that is no number, or infinite, of before that was refused, is no bound: snapshots cannot have it.
	tokensSQL = `
SELECT t.hash, t.name, t.flows, CASE WHEN l.limited THEN m.models ELSE coalesce(g.models, '{}') END, l.limited,
       coalesce(g.criticality, ''), g.criticality IS NULL,
       CASE WHEN g.rate < 'Infinity' THEN g.rate ELSE 0 END::float8, coalesce(g.in_flight, 0),
       coalesce(g.waiting, 0), t.priority_max,
       CASE WHEN t.rate < 'Infinity' THEN t.rate ELSE 0 END::float8, coalesce(t.burst, 0),
       extract(epoch FROM CASE WHEN isfinite(t.expires_at) THEN t.expires_at - clock_timestamp() END)::float8
  FROM penstock.api_token t
 CROSS JOIN LATERAL (SELECT cardinality(t.queues) + cardinality(t.applications) > 0 AS limited) l
  LEFT JOIN penstock.gateway_token g ON g.name = t.name
 CROSS JOIN LATERAL (
       SELECT coalesce(array_agg(q.model), '{}') AS models FROM penstock.queue q
        WHERE l.limited AND q.kind = 'inference' AND q.model IS NOT NULL
          AND (t.queues = '{}' OR q.name = ANY(t.queues))
          AND (t.applications = '{}' OR q.application = ANY(t.applications))
          AND (coalesce(g.models, '{}') = '{}' OR q.model = ANY(g.models))) m
 WHERE t.revoked_at IS NULL AND coalesce(t.expires_at > clock_timestamp(), true) AND t.scopes && ARRAY['call', 'admin']`
	pausesSQL = `
SELECT q.model, coalesce(nullif(p.reason, ''), 'by an operator'),
       extract(epoch FROM CASE WHEN isfinite(p.until) THEN p.until - clock_timestamp() END)::float8
  FROM penstock.queue q
  JOIN penstock.pause p ON penstock.paused_until(p.until)
   AND (p.scope = 'model' AND p.value = q.model OR p.scope = 'application' AND p.value = q.application)
 WHERE q.kind = 'inference' AND q.model IS NOT NULL
UNION ALL
SELECT q.model, coalesce(nullif(q.paused_reason, ''), 'by an operator'),
       extract(epoch FROM CASE WHEN isfinite(q.paused_until) THEN q.paused_until - clock_timestamp() END)::float8
  FROM penstock.queue q
 WHERE q.kind = 'inference' AND q.model IS NOT NULL AND q.paused_at IS NOT NULL
   AND penstock.paused_until(q.paused_until)`
	pausedFlowsSQL = `
SELECT value, coalesce(nullif(reason, ''), 'by an operator'),
       extract(epoch FROM CASE WHEN isfinite(until) THEN until - clock_timestamp() END)::float8
  FROM penstock.pause WHERE scope = 'flow' AND queue_id IS NULL AND penstock.paused_until(until)`
	readingsSQL = `
SELECT id, checked_at, extract(epoch FROM clock_timestamp() - checked_at)::float8, queued, kv_usage::float8
  FROM penstock.instance WHERE checked_at IS NOT NULL`
	budgetsSQL = `
SELECT t.name, t.gpu_ms, t.gpu_period, s.ms, s.ends_in
  FROM penstock.api_token t
 CROSS JOIN LATERAL penstock.gpu_spent(t.flows, t.gpu_period) s
 WHERE t.gpu_ms IS NOT NULL AND t.revoked_at IS NULL AND coalesce(t.expires_at > clock_timestamp(), true)`
	startsSQL = `
SELECT d.model, coalesce((SELECT percentile_cont(0.95) WITHIN GROUP (ORDER BY x.seconds)
                            FROM (SELECT c.seconds FROM penstock.cold_start c WHERE c.model = d.model
                                   ORDER BY c.at DESC LIMIT 50) x), 0)
  FROM (SELECT DISTINCT y.model FROM penstock.deployment y
         WHERE y.mode IN ('up-only', 'full')
           AND CASE WHEN jsonb_typeof(y.policy->'max') = 'number' THEN (y.policy->>'max')::numeric > 0 ELSE true END) d
 WHERE NOT EXISTS (SELECT FROM penstock.setting s WHERE s.name = 'scale.off' AND s.value = 'true')`
)

// ReadSettings reads all of them but the budgets, which stay those of old. A policy that is not valid keeps the one
// before, if old has it.
func ReadSettings(ctx context.Context, db postgres.DB, old Settings) (Settings, []error, error) {
	s := Settings{
		Policies: map[string]PoolPolicy{}, Flows: map[string]FlowState{}, Paused: map[string]PauseState{},
		Starts: map[string]Starts{}, Readings: map[int32]InstanceState{},
	}
	var wrong []error
	b := &pgx.Batch{}
	b.Queue(policiesSQL).Query(func(rows pgx.Rows) error { return s.readPolicies(rows, old, &wrong) })
	b.Queue(flowsSQL).Query(s.readFlows)
	b.Queue(pausedFlowsSQL).Query(s.readPausedFlows)
	b.Queue(tokensSQL).Query(s.readTokens)
	b.Queue(pausesSQL).Query(s.readPauses)
	b.Queue(readingsSQL).Query(func(rows pgx.Rows) error { return s.readReadings(rows, old) })
	b.Queue(startsSQL).Query(s.readStarts)
	if err := db.SendBatch(ctx, b).Close(); err != nil {
		return old, nil, fmt.Errorf("read settings of the gateway: %w", err)
	}
	s.SetBudgets(old.Budgets)
	return s, wrong, nil
}

// ReadBudgets reads the budgets of tokens, by their names, and how much of each is spent. Its sums over the use of a
// day take longer than the rest of the settings, which must not wait for them: a token that is revoked is refused at
// once.
func ReadBudgets(ctx context.Context, db postgres.DB) (map[string]Budget, error) {
	budgets := map[string]Budget{}
	var name string
	var seconds float64
	var b Budget
	_, err := pgx.ForEachRow(postgres.Query(ctx, db, budgetsSQL),
		[]any{&name, &b.MS, &b.Period, &b.Spent, &seconds}, func() error {
			b.Ends = time.Now().Add(time.Duration(seconds * float64(time.Second)))
			budgets[name] = b
			return nil
		})
	if err != nil {
		return nil, fmt.Errorf("read budgets of tokens: %w", err)
	}
	return budgets, nil
}

func (s *Settings) readPolicies(rows pgx.Rows, old Settings, wrong *[]error) error {
	var model string
	var config []byte
	_, err := pgx.ForEachRow(rows, []any{&model, &config}, func() error {
		policy, err := ReadPolicy(config)
		if err != nil {
			*wrong = append(*wrong, fmt.Errorf("policy of model %q: %w", model, err))
			before, known := old.Policies[model]
			if !known {
				before = DefaultPolicy()
			}
			policy = before
		}
		s.Policies[model] = policy
		return nil
	})
	return err
}

func (s *Settings) readFlows(rows pgx.Rows) error {
	var name, criticality string
	var weight float64
	_, err := pgx.ForEachRow(rows, []any{&name, &criticality, &weight}, func() error {
		f := FlowState{Weight: weight, Set: criticality != ""}
		f.Criticality, _ = ReadCriticality(criticality) // the table takes no other words
		s.Flows[name] = f
		return nil
	})
	return err
}

// readTokens reads the tokens, and in how many seconds they end.
func (s *Settings) readTokens(rows pgx.Rows) error {
	var t TokenState
	var hash []byte
	var criticality string
	var left *float64
	_, err := pgx.ForEachRow(rows, []any{
		&hash, &t.Name, &t.Flows, &t.Models, &t.Limited, &criticality, &t.CriticalityOfFlow, &t.Rate, &t.InFlightMax,
		&t.WaitingMax, &t.PriorityMax, &t.PushRate, &t.PushBurst, &left,
	},
		func() error {
			fresh := t
			copy(fresh.Hash[:], hash)
			fresh.Criticality, _ = ReadCriticality(criticality) // the table takes no other words
			fresh.ExpiresAt = endsIn(left)
			s.Tokens = append(s.Tokens, fresh)
			t.Flows, t.Models, t.PriorityMax = nil, nil, nil
			return nil
		})
	return err
}

func (s *Settings) readPauses(rows pgx.Rows) error {
	return eachPause(rows, func(model string, p PauseState) { s.Paused[model] = s.Paused[model].longer(p) })
}

func (s *Settings) readPausedFlows(rows pgx.Rows) error {
	return eachPause(rows, func(flow string, p PauseState) {
		f := s.Flows[flow]
		f.Paused = f.Paused.longer(p)
		s.Flows[flow] = f
	})
}

// eachPause reads names, the reasons of their pauses, and in how many seconds these end.
func eachPause(rows pgx.Rows, found func(name string, p PauseState)) error {
	var name string
	var p PauseState
	var left *float64
	_, err := pgx.ForEachRow(rows, []any{&name, &p.Reason, &left}, func() error {
		p.Until = endsIn(left)
		found(name, p)
		return nil
	})
	return err
}

// endsIn is the time so many seconds from now, on the monotonic clock of this process; none for nil. It is called for
// each row when that has come: those behind it may be evaluated much later.
func endsIn(left *float64) time.Time {
	if left == nil {
		return time.Time{}
	}
	return time.Now().Add(time.Duration(min(*left, endKnown.Seconds()) * float64(time.Second)))
}

// endKnown is how far off the end of a pause or of a token is taken to be at most.
const endKnown = 100 * 24 * time.Hour

// readReadings reads the latest probes. One that was read before keeps its time, by which a pool knows it.
func (s *Settings) readReadings(rows pgx.Rows, old Settings) error {
	now := time.Now()
	var r InstanceState
	var age float64
	_, err := pgx.ForEachRow(rows, []any{&r.ID, &r.probed, &age, &r.Queued, &r.KV}, func() error {
		r.At = now.Add(-time.Duration(age * float64(time.Second)))
		if before, known := old.Readings[r.ID]; known && before.probed.Equal(r.probed) {
			r.At = before.At
		}
		s.Readings[r.ID] = r
		r.Queued, r.KV = nil, nil
		return nil
	})
	return err
}

func (s *Settings) readStarts(rows pgx.Rows) error {
	var model string
	var seconds float64
	_, err := pgx.ForEachRow(rows, []any{&model, &seconds}, func() error {
		s.Starts[model] = Starts{May: true, P95: time.Duration(seconds * float64(time.Second))}
		return nil
	})
	return err
}

// SavedState is the data with which a gateway can serve when it starts while the database is away.
// Headers are kept as references to secrets, and tokens as hashes.
type SavedState struct {
	Version  int          `json:"version"`
	At       time.Time    `json:"at"`
	Models   []ModelState `json:"models"`
	Settings Settings     `json:"settings"`
}

// savedVersion is that of the fields of SavedState. It changes with each of them: a field that a snapshot does not have
// would say that a model is not asynchronous, or not paused.
const savedVersion = 9

// StateKept is how old a snapshot may be.
const StateKept = 15 * time.Minute

// aheadMax is by how much the clock of this machine may have been set back since a snapshot was written.
const aheadMax = time.Minute

// Write stores the snapshot, readable by its owner alone.
func (s SavedState) Write(path string) error {
	s.Version = savedVersion
	text, err := json.Marshal(s)
	if err == nil {
		err = durable.WriteFile(path, text)
	}
	if err != nil {
		return fmt.Errorf("write snapshot: %w", err)
	}
	return nil
}

// ReadSavedState reads a snapshot of this version of the gateway that is not too old.
func ReadSavedState(path string, now time.Time) (SavedState, error) {
	var s SavedState
	text, err := os.ReadFile(path) //nolint:gosec // the operator's own path
	if err != nil {
		return s, fmt.Errorf("read snapshot: %w", err)
	}
	var of struct{ Version int }
	if err := json.Unmarshal(text, &of); err != nil {
		return s, fmt.Errorf("read snapshot %s: %w", path, err)
	}
	if of.Version != savedVersion {
		return s, fmt.Errorf("snapshot %s is of another version of the gateway (its fields are version %d, not %d)",
			path, of.Version, savedVersion)
	}
	if err := json.Unmarshal(text, &s); err != nil {
		return s, fmt.Errorf("read snapshot %s: %w", path, err)
	}
	switch age := now.Sub(s.At); {
	case age > StateKept:
		return s, fmt.Errorf("snapshot %s is %s old, more than %s", path, age.Round(time.Second), StateKept)
	case age < -aheadMax:
		return s, fmt.Errorf("snapshot %s is of a time %s ahead: how old it is cannot be known", path,
			(-age).Round(time.Second))
	}
	return s, nil
}
