package scale

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/duty"
	"github.com/penstock/penstock/internal/postgres"
)

// Config sets how the duty runs. Its zero value means the defaults.
type Config struct {
	Pause time.Duration // between two decisions: 1 s
	Keep  time.Duration // a state that changed without a decision is written after it: 5 s
	Log   *slog.Logger  // nowhere
}

func (c Config) withDefaults() Config {
	c.Pause = cmp.Or(max(c.Pause, 0), time.Second)
	c.Keep = cmp.Or(max(c.Keep, 0), 5*time.Second)
	c.Log = cmp.Or(c.Log, slog.New(slog.DiscardHandler))
	return c
}

// Duty is the duty of the elected leader that decides for every model with a deployment. Its decisions
// are rows; a backend that cannot be reached delays none of them.
type Duty struct {
	cfg     Config
	db      postgres.DB
	fence   duty.Fence
	written map[string]time.Time // when the state of a model was stored
	states  map[string]State     // newer than what is stored
	arrived map[string]int64     // as of the states
}

// New returns the duty for one term. It reads through db and writes through fence.
func New(db postgres.DB, fence duty.Fence, cfg Config) *Duty {
	return &Duty{
		cfg: cfg.withDefaults(), db: db, fence: fence,
		written: map[string]time.Time{}, states: map[string]State{}, arrived: map[string]int64{},
	}
}

// Run decides until ctx ends. It returns an error when passes go on failing, see duty.Loop.
func (s *Duty) Run(ctx context.Context) error {
	l := duty.Loop{Name: "scale", Pause: s.cfg.Pause, Log: s.cfg.Log}
	return l.Run(ctx, func(ctx context.Context) (time.Duration, error) {
		return s.cfg.Pause, s.Pass(ctx)
	})
}

// inputSQL reads the inputs of all decisions, and the clock that all leaders share.
const inputSQL = `
SELECT model, policy, mode, override, override_until, running, waiting, arrived, arrived_before, state, service,
       ready, starting, draining, unhealthy, off, zero_off, max_all, clock_timestamp() AS at
  FROM penstock.scale_input`

// input is a row of penstock.scale_input.
type input struct {
	Model         string
	Policy        []byte
	Mode          string
	Override      *int
	OverrideUntil *time.Time
	Running       int
	Waiting       int
	Arrived       int64
	ArrivedBefore *int64
	State         []byte
	Service       float64
	Ready         int
	Starting      []time.Time
	Draining      int
	Unhealthy     int
	Off           bool
	ZeroOff       bool
	MaxAll        int
	At            time.Time
}

// Pass reads the inputs of all models, decides, and stores what changed within the term.
func (s *Duty) Pass(ctx context.Context) error {
	inputs, err := pgx.CollectRows(postgres.Query(ctx, s.db, inputSQL), pgx.RowToStructByName[input])
	if err != nil {
		return fmt.Errorf("read inputs of scaling: %w", err)
	}
	var rows outcome
	for _, in := range inputs {
		if err := s.decide(in, &rows); err != nil {
			s.cfg.Log.ErrorContext(ctx, "cannot decide for a model", "model", in.Model, "error", err)
		}
	}
	if len(rows.Models) == 0 {
		return nil
	}
	err = s.fence.InTx(ctx, func(tx pgx.Tx) error {
		_, err := tx.Exec(ctx, storeSQL, rows.arguments()...)
		return err
	})
	if err != nil {
		for _, model := range rows.Models { // the next pass decides from what is stored
			delete(s.states, model)
			delete(s.arrived, model)
		}
		return fmt.Errorf("store decisions of scaling: %w", err)
	}
	for i, model := range rows.Models {
		s.written[model] = rows.At[i]
	}
	return nil
}

// decide adds the row of one model if it is to be stored: the number changed, or the state is old.
func (s *Duty) decide(in input, rows *outcome) error {
	var policy Policy
	if err := json.Unmarshal(in.Policy, &policy); err != nil {
		return fmt.Errorf("read policy: %w", err)
	}
	policy.Mode = Mode(in.Mode)
	if err := policy.Check(); err != nil {
		return err
	}
	state, before, err := s.past(in)
	if err != nil {
		return err
	}
	decision, next := Decide(in.At, policy, in.observe(before), state)
	s.states[in.Model], s.arrived[in.Model] = next, in.Arrived
	changed := decision.Desired != decision.Current
	if changed || in.At.Sub(s.written[in.Model]) >= s.cfg.Keep {
		return rows.add(in, decision, next, changed)
	}
	return nil
}

// past is the state of the decision before: this leader's own, or the stored one of the leader before it.
func (s *Duty) past(in input) (State, int64, error) {
	if state, known := s.states[in.Model]; known {
		return state, s.arrived[in.Model], nil
	}
	var state State
	if in.State != nil {
		if err := json.Unmarshal(in.State, &state); err != nil {
			return State{}, 0, fmt.Errorf("read state: %w", err)
		}
	}
	if in.ArrivedBefore == nil {
		return state, in.Arrived, nil
	}
	return state, *in.ArrivedBefore, nil
}

// observe turns counters into arrivals since the decision before. A counter that fell began again.
// A start counts from its registration as an instance in state starting: a number that is only
// published (backends advise and keda, mode advise) may have been followed by no start at all.
func (in input) observe(before int64) Obs {
	arrived := in.Arrived - before
	if arrived < 0 {
		arrived = in.Arrived
	}
	o := Obs{
		Waiting: in.Waiting, Running: in.Running, Arrived: float64(arrived), Service: in.Service,
		Ready: in.Ready, Starting: in.Starting, Draining: in.Draining, Unhealthy: in.Unhealthy,
		Switches: Switches{Off: in.Off, ZeroOff: in.ZeroOff, MaxAll: in.MaxAll, Override: in.Override},
	}
	if in.OverrideUntil != nil {
		o.Switches.OverrideUntil = *in.OverrideUntil
	}
	return o
}

// storeSQL stores the states, and the decisions that changed a number.
const storeSQL = `
WITH decided AS (
    SELECT model, at, state, arrived, before, desired, base, raw, stabilised, ready, metric, applied, notes, why, changed
      FROM unnest($1::text[], $2::timestamptz[], $3::jsonb[], $4::bigint[], $5::integer[], $6::integer[], $7::integer[],
                  $8::integer[], $9::integer[], $10::integer[], $11::float8[], $12::boolean[], $13::jsonb[], $14::text[],
                  $15::boolean[])
           AS d(model, at, state, arrived, before, desired, base, raw, stabilised, ready, metric, applied, notes, why, changed)
     WHERE EXISTS (SELECT FROM penstock.model m WHERE m.name = d.model)
), history AS (
    INSERT INTO penstock.scale_decision (at, model, before, desired, base, raw, stabilised, ready, applied, notes, why)
    SELECT at, model, before, desired, base, raw, stabilised, ready, applied, notes, why FROM decided WHERE changed
)
INSERT INTO penstock.scale_state AS s (model, state, arrived, desired, base, raw, stabilised, ready, metric, why, decided_at)
SELECT model, state, arrived, desired, base, raw, stabilised, ready, metric, why, at FROM decided
ON CONFLICT (model) DO UPDATE
   SET state = excluded.state, arrived = excluded.arrived, desired = excluded.desired, base = excluded.base,
       raw = excluded.raw, stabilised = excluded.stabilised, ready = excluded.ready, metric = excluded.metric,
       why = excluded.why, decided_at = excluded.decided_at`

// outcome has the rows that a pass stores, by column.
type outcome struct {
	Models                               []string
	At                                   []time.Time
	States, Notes                        []string
	Arrived                              []int64
	Before, Desired, Base, Raw, Levelled []int
	Ready                                []int
	Metric                               []float64
	Applied, Changed                     []bool
	Why                                  []string
}

func (r *outcome) arguments() []any {
	return []any{
		r.Models, r.At, r.States, r.Arrived, r.Before, r.Desired, r.Base, r.Raw, r.Levelled, r.Ready, r.Metric,
		r.Applied, r.Notes, r.Why, r.Changed,
	}
}

func (r *outcome) add(in input, d Decision, next State, changed bool) error {
	state, err := json.Marshal(next)
	if err != nil {
		return fmt.Errorf("write state: %w", err)
	}
	if d.Notes == nil {
		d.Notes = []Note{}
	}
	notes, err := json.Marshal(d.Notes)
	if err != nil {
		return fmt.Errorf("write notes: %w", err)
	}
	r.Models, r.At = append(r.Models, in.Model), append(r.At, in.At)
	r.States, r.Notes = append(r.States, string(state)), append(r.Notes, string(notes))
	r.Arrived, r.Before = append(r.Arrived, in.Arrived), append(r.Before, d.Current)
	r.Desired, r.Base = append(r.Desired, d.Desired), append(r.Base, d.Base)
	r.Raw, r.Levelled = append(r.Raw, d.Raw), append(r.Levelled, d.Stabilised)
	r.Ready, r.Metric = append(r.Ready, in.Ready), append(r.Metric, float64(in.Running+in.Waiting))
	r.Applied, r.Changed = append(r.Applied, d.Apply), append(r.Changed, changed)
	r.Why = append(r.Why, d.Explain())
	return nil
}
