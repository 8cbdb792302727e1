package scale

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

// storeSQL stores the states, and the decisions that changed a number.
const storeSQL = `
WITH decided AS (
    SELECT d.* FROM jsonb_to_recordset($1) AS d(
           model text, at timestamptz, state jsonb, counters jsonb, arrived bigint, before integer, desired integer,
           base integer, raw integer, stabilised integer, ready integer, metric float8, applied boolean, notes jsonb,
           why text, changed boolean)
     WHERE EXISTS (SELECT FROM penstock.model m WHERE m.name = d.model)
     ORDER BY d.model COLLATE "C"
), history AS (
    INSERT INTO penstock.scale_decision
           (at, model, before, desired, base, raw, stabilised, ready, applied, notes, why)
    SELECT at, model, before, desired, base, raw, stabilised, ready, applied, notes, why FROM decided WHERE changed
)
INSERT INTO penstock.scale_state AS s
       (model, state, counters, arrived, desired, base, raw, stabilised, ready, metric, why, decided_at)
SELECT model, state, counters, arrived, desired, base, raw, stabilised, ready, metric, why, at FROM decided
ON CONFLICT (model) DO UPDATE
   SET state = excluded.state, counters = excluded.counters, arrived = excluded.arrived, desired = excluded.desired,
       base = excluded.base, raw = excluded.raw, stabilised = excluded.stabilised, ready = excluded.ready,
       metric = excluded.metric, why = excluded.why, decided_at = excluded.decided_at`

// minutesSQL adds what happened to the minutes of models.
const minutesSQL = `
INSERT INTO penstock.model_minute AS m
       (minute, model, arrived, online, calls, busy_seconds, refused, starts, cold_seconds, waiting, running, base, raw,
        stabilised, desired, ready, starting)
SELECT minute, model, arrived, online, calls, busy_seconds, refused, starts, cold_seconds, waiting, running, base, raw,
       stabilised, desired, ready, starting
  FROM jsonb_to_recordset($1) AS d(
       minute timestamptz, model text, arrived float8, online float8, calls bigint, busy_seconds float8, refused float8,
       starts integer, cold_seconds float8, waiting integer, running integer, base integer, raw integer,
       stabilised integer, desired integer, ready integer, starting integer)
 ORDER BY model COLLATE "C", minute
ON CONFLICT (model, minute) DO UPDATE
   SET arrived = m.arrived + excluded.arrived, online = m.online + excluded.online, calls = m.calls + excluded.calls,
       busy_seconds = m.busy_seconds + excluded.busy_seconds, refused = m.refused + excluded.refused,
       starts = m.starts + excluded.starts, cold_seconds = m.cold_seconds + excluded.cold_seconds,
       waiting = greatest(m.waiting, excluded.waiting), running = greatest(m.running, excluded.running),
       base = greatest(m.base, excluded.base), raw = greatest(m.raw, excluded.raw),
       stabilised = greatest(m.stabilised, excluded.stabilised), desired = greatest(m.desired, excluded.desired),
       ready = greatest(m.ready, excluded.ready), starting = greatest(m.starting, excluded.starting)`

// storeDeploymentsSQL stores what deployments are to have, in the order of their names, in which all lock their rows.
// replace_before says that starts older than a time are stuck.
const storeDeploymentsSQL = `
INSERT INTO penstock.deployment_state AS s (name, desired, decided_at, replace_before)
SELECT d.name, d.desired, clock_timestamp(), d.replace_before
  FROM jsonb_to_recordset($1) AS d(name text, desired integer, replace_before timestamptz)
 WHERE EXISTS (SELECT FROM penstock.deployment x WHERE x.name = d.name)
 ORDER BY d.name COLLATE "C"
ON CONFLICT (name) DO UPDATE
   SET desired = excluded.desired, decided_at = excluded.decided_at,
       replace_before = coalesce(excluded.replace_before, s.replace_before)`

type storedDecision struct {
	Model      string          `json:"model"`
	At         time.Time       `json:"at"`
	State      json.RawMessage `json:"state"`
	Counters   json.RawMessage `json:"counters"`
	Arrived    int64           `json:"arrived"`
	Before     int             `json:"before"`
	Desired    int             `json:"desired"`
	Base       int             `json:"base"`
	Raw        int             `json:"raw"`
	Stabilised int             `json:"stabilised"`
	Ready      int             `json:"ready"`
	Metric     float64         `json:"metric"`
	Applied    bool            `json:"applied"`
	Notes      []Note          `json:"notes"`
	Why        string          `json:"why"`
	Changed    bool            `json:"changed"`
}

type storedDeployment struct {
	Name          string     `json:"name"`
	Desired       int        `json:"desired"`
	ReplaceBefore *time.Time `json:"replace_before,omitempty"`
}

// minute is what a model did in a minute, as far as it is not stored.
type minute struct {
	Minute     time.Time `json:"minute"`
	Model      string    `json:"model"`
	Arrived    float64   `json:"arrived"`
	Online     float64   `json:"online"`
	Calls      int64     `json:"calls"`
	Busy       float64   `json:"busy_seconds"`
	Refused    float64   `json:"refused"`
	Starts     int64     `json:"starts"`
	Cold       float64   `json:"cold_seconds"`
	Waiting    int       `json:"waiting"`
	Running    int       `json:"running"`
	Base       int       `json:"base"`
	Raw        int       `json:"raw"`
	Stabilised int       `json:"stabilised"`
	Desired    int       `json:"desired"`
	Ready      int       `json:"ready"`
	Starting   int       `json:"starting"`
}

// minuteOf is the row of the minute of now. One of a minute before that is not stored yet is added to it:
// states, and minutes with them, are stored several times a minute.
func (s *Duty) minuteOf(model string, now time.Time) *minute {
	m := s.minutes[model]
	if m == nil {
		m = &minute{Model: model}
		s.minutes[model] = m
	}
	m.Minute = now.UTC().Truncate(time.Minute)
	return m
}

func (m *minute) add(d *modelDecision, o Obs) {
	u := d.used
	m.Arrived += u.queued + u.online
	m.Online += u.online
	m.Calls += u.calls
	m.Busy += u.busy
	m.Refused += u.refused
	m.Starts += u.becameReady
	m.Cold += u.cold
	m.Waiting, m.Running = max(m.Waiting, o.Waiting), max(m.Running, o.Running)
	m.Base, m.Raw = max(m.Base, d.Base), max(m.Raw, d.Raw)
	m.Stabilised, m.Desired = max(m.Stabilised, d.Stabilised), max(m.Desired, d.Desired)
	m.Ready, m.Starting = max(m.Ready, o.Ready), max(m.Starting, len(o.Starting))
}

// outcome is the rows that a pass stores.
type outcome struct {
	decisions   []storedDecision
	minutes     []*minute
	deployments []storedDeployment
	models      []string // of the deployments
}

// storeStep is the name in the log of a writing of the decision about one model.
const storeStep = "store the decision about a model"

// store writes what changed, and the states that are due to be stored, in one transaction within the term. Where a row
// is refused, each model is stored alone, so that one of them stops no other.
func (s *Duty) store(ctx context.Context, all []*modelDecision) error {
	err := s.storeOnce(ctx, all)
	if !ofData(err) {
		for _, d := range all {
			if err == nil {
				s.note(ctx, storeStep, d.in.Model, nil)
			}
		}
		return err
	}
	for i, d := range all {
		if err := s.storeOnce(ctx, []*modelDecision{d}); ofData(err) {
			s.note(ctx, storeStep, d.in.Model, err)
			s.forget(d.in.Model)
		} else if err != nil {
			for _, d := range all[i+1:] {
				s.forget(d.in.Model)
			}
			return err
		}
	}
	return nil
}

// forget has the next pass decide from what is stored.
func (s *Duty) forget(model string) {
	delete(s.past, model)
	delete(s.minutes, model)
}

func (s *Duty) storeOnce(ctx context.Context, all []*modelDecision) error {
	var rows outcome
	for _, d := range all {
		if err := s.collect(d, &rows); err != nil {
			return err
		}
	}
	if len(rows.decisions) == 0 && len(rows.deployments) == 0 {
		return nil
	}
	err := s.fence.InTx(ctx, func(tx pgx.Tx) error {
		for _, one := range []struct {
			sql  string
			rows any
			n    int
		}{
			{storeSQL, rows.decisions, len(rows.decisions)},
			{minutesSQL, rows.minutes, len(rows.minutes)},
			{storeDeploymentsSQL, rows.deployments, len(rows.deployments)},
		} {
			if one.n == 0 {
				continue
			}
			text, err := json.Marshal(one.rows)
			if err != nil {
				return fmt.Errorf("write rows: %w: %w", errData, err)
			}
			if _, err := tx.Exec(ctx, one.sql, string(text)); err != nil {
				return err
			}
		}
		return nil
	})
	if err != nil {
		for _, d := range rows.decisions {
			if !ofData(err) {
				s.forget(d.Model)
			}
		}
		return fmt.Errorf("store decisions of scaling: %w", err)
	}
	for _, d := range rows.decisions {
		s.written[d.Model] = d.At
		delete(s.minutes, d.Model)
	}
	s.applier.nudge(rows.models...)
	return nil
}

// collect adds the rows of one model that are to be stored: its number changed, starts of it are
// replaced, or its state is old.
func (s *Duty) collect(d *modelDecision, rows *outcome) error {
	at := d.in.At
	for _, row := range d.deployments {
		n, decided := d.parts[row.Name]
		stored := storedDeployment{Name: row.Name, Desired: n}
		if d.Replace > 0 {
			before := at.Add(-row.stuckAfter(d.in.ColdStartP95))
			stored.ReplaceBefore = &before
		}
		if decided && row.told() && (n != row.Desired || row.DecidedAt == nil || stored.ReplaceBefore != nil) {
			rows.deployments = append(rows.deployments, stored)
			rows.models = append(rows.models, d.in.Model)
		}
	}
	changed := d.Desired != d.Current
	kept := at.Sub(s.written[d.in.Model]) // below 0 where the clock was set back
	if !changed && d.Replace == 0 && kept >= 0 && kept < s.cfg.keep {
		return nil
	}
	state, err := json.Marshal(d.next)
	if err != nil {
		return fmt.Errorf("write state: %w: %w", errData, err)
	}
	counters, err := json.Marshal(d.read.counters)
	if err != nil {
		return fmt.Errorf("write counters: %w: %w", errData, err)
	}
	if d.Notes == nil {
		d.Notes = []Note{}
	}
	rows.decisions = append(rows.decisions, storedDecision{
		Model: d.in.Model, At: at, State: state, Counters: counters, Arrived: d.in.Arrived,
		Before: d.Current, Desired: d.Desired, Base: d.Base, Raw: d.Raw, Stabilised: d.Stabilised,
		Ready: d.in.Ready, Metric: d.metric(), Applied: d.Apply, Notes: d.Notes, Why: d.Explain(),
		Changed: changed,
	})
	rows.minutes = append(rows.minutes, s.minutes[d.in.Model])
	return nil
}
