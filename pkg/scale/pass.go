package scale

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/oneline"
	"github.com/penstock/penstock/internal/postgres"
)

// decideFor decides for some models, in a time that does not grow with the number of all. whole says that a budget was
// set since the last pass over all: it decided for none, and a pass over all is to be made.
func (s *Duty) decideFor(ctx context.Context, models []string) (whole bool, err error) {
	s.hints.begin(models)
	idle, err := s.makeDeployments(ctx, models)
	if err != nil {
		return false, err
	}
	deployments, err := s.deployments(ctx, models)
	if err != nil {
		return false, err
	}
	undecided := map[string]bool{}
	inputs, err := s.inputs(ctx, models, undecided)
	if err != nil {
		return false, err
	}
	if len(inputs) > 0 && inputs[0].Budget > 0 && !s.budget {
		return true, nil
	}
	all := make([]*modelDecision, 0, len(inputs))
	for _, in := range inputs {
		d, err := s.decide(in, deployments[in.Model])
		s.note(ctx, "decide for a model", in.Model, err)
		if err != nil {
			undecided[in.Model] = true
			continue
		}
		if d != nil {
			all = append(all, d)
		}
	}
	limitByBudget(all, deployments)
	for _, d := range all {
		s.past[d.in.Model] = d.past()
	}
	s.publish(models, all, undecided, idle)
	return false, s.store(ctx, all)
}

// note takes note of the outcome of a step for a model, see duty.Failing.
func (s *Duty) note(ctx context.Context, step, model string, err error) {
	s.failing.Note(ctx, s.cfg.Log, slog.LevelError, step, step+" "+model, err, "model", model)
}

// inputStep is the name in the log of a reading of the input of one model.
const inputStep = "read the input of a model"

// inputs reads the inputs of models. Where the row of one cannot be read, each is read alone, and it becomes undecided.
func (s *Duty) inputs(ctx context.Context, models []string, undecided map[string]bool) ([]input, error) {
	read := func(models []string) ([]input, error) {
		return pgx.CollectRows(postgres.Query(ctx, s.db, inputSQL, models), pgx.RowToStructByName[input])
	}
	all, err := read(models)
	for _, in := range all {
		s.note(ctx, inputStep, in.Model, nil)
	}
	if ofData(err) {
		all, err = nil, nil
		for _, model := range models {
			one, failed := read([]string{model})
			if ofData(failed) {
				s.note(ctx, inputStep, model, failed)
				undecided[model] = true
				continue
			}
			all, err = append(all, one...), failed
			if err != nil {
				break
			}
			s.note(ctx, inputStep, model, nil)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("read inputs of scaling: %w", err)
	}
	return all, nil
}

// errData wraps errors about the data of one model.
var errData = errors.New("a value cannot be calculated with")

// ofData says whether an error may be about the data of one model, and not about all: a number that is out of a range,
// or a row that is refused.
func ofData(err error) bool {
	var scan pgx.ScanArgError
	return errors.Is(err, errData) || errors.As(err, &scan) || postgres.RefusesRow(err)
}

// deployments reads the deployments by model.
func (s *Duty) deployments(ctx context.Context, models []string) (map[string][]deploymentRow, error) {
	rows, err := pgx.CollectRows(postgres.Query(ctx, s.db, deploymentsOfSQL, models),
		pgx.RowToStructByName[deploymentRow])
	if err != nil {
		return nil, fmt.Errorf("read deployments: %w", err)
	}
	byModel := map[string][]deploymentRow{}
	for _, row := range rows {
		byModel[row.Model] = append(byModel[row.Model], row)
	}
	return byModel, nil
}

// modelDecision is the decision of a pass about one model, with what it was made from.
type modelDecision struct {
	Decision
	in          input
	deployments []deploymentRow
	next        State
	read        past // with the counters up to which requests are counted
	used        used
	parts       map[string]int // instances of each deployment
	kept        map[string]int // of these, those that stay only until others are ready
	starts      int            // under way and not stuck
	stuck       int
}

// past is what the next decision starts from.
func (d *modelDecision) past() past {
	return past{state: d.next, counters: d.read.counters}
}

// decide decides for one model. It returns nil while no backend of it has reported its instances.
func (s *Duty) decide(in input, deployments []deploymentRow) (*modelDecision, error) {
	if len(deployments) == 0 {
		return nil, fmt.Errorf("its deployments were removed just now")
	}
	for i := range deployments {
		deployments[i].read()
	}
	unreported := func(row deploymentRow) bool {
		return s.cfg.Backends[row.Backend] != nil && row.lists() && row.SeenAt == nil
	}
	if !slices.ContainsFunc(deployments, func(row deploymentRow) bool { return !unreported(row) }) {
		return nil, nil //nolint:nilnil // not before a backend has told what exists
	}
	before, known := s.past[in.Model]
	if !known {
		before, _ = in.stored() // of one that cannot be read nothing is known
	}
	if before.outlived(deployments) {
		before = before.anew()
		delete(s.written, in.Model) // what is stored tells the number of others
	}
	policy := policyOf(deployments)
	stuckAfter := stuckAfterOf(policy, in.ColdStartP95)
	u := in.since(before.counters)
	o := in.observe(u, deployments, stuckAfter)
	o.Floor = floorOf(deployments, in.At)
	decision, next := Decide(in.At, policy, o, before.state)
	d := &modelDecision{in: in, deployments: deployments, Decision: decision, next: next, read: before}
	d.noteFlaws()
	for _, began := range o.Starting {
		if in.At.Sub(began) > stuckAfter {
			d.stuck++
		}
	}
	d.starts = len(o.Starting) - d.stuck
	if next.Counted.Equal(in.At) { // otherwise a later decision counts the requests up to now
		d.used, d.read = u, past{counters: in.counters(before.counters)}
	}
	if d.Apply {
		starts := modelStarts{coldP95: in.ColdStartP95}
		if len(deployments) > 1 {
			starts.stuck = next.Stuck
		}
		d.parts, d.kept = shares(d.Desired, in.unmanaged(stuckAfter), deployments, starts, in.At)
		for _, row := range deployments {
			if unreported(row) && !row.overridden(in.At) { // a number for what exists would end it
				delete(d.parts, row.Name)
			}
		}
	}
	s.minuteOf(in.Model, in.At).add(d, o)
	return d, nil
}

// flawMax bounds what a note tells about a policy, in characters.
const flawMax = 200

// noteFlaws notes what is not allowed in the stored policies of the model.
func (d *modelDecision) noteFlaws() {
	for _, s := range d.deployments {
		for _, flaw := range s.flaws {
			d.Notes = append(d.Notes, Note{Code: NotePolicy, Text: oneline.Short(s.Name+": "+flaw, flawMax)})
		}
	}
}

// publish keeps the figures of a pass for metrics, and which of its models sleep. A model that could not be decided
// keeps the figures of its last decision: alerts on them go on.
func (s *Duty) publish(models []string, all []*modelDecision, undecided map[string]bool, idle []templated) {
	zero := map[string][]int32{}
	for _, t := range idle {
		zero[t.Model] = t.Queues
	}
	for _, d := range all {
		if d.Desired == 0 && d.mayGrow() {
			zero[d.in.Model] = d.in.Queues
		}
	}
	s.hints.end(models, zero)
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, m := range models {
		if !undecided[m] {
			delete(s.models, m)
		}
	}
	for _, d := range all {
		s.models[d.in.Model] = ModelStatus{
			Model: d.in.Model, Metric: d.metric(), Waiting: d.in.Waiting + d.in.Urgent,
			Base: d.Base, Raw: d.Raw, Stabilised: d.Stabilised, Desired: d.Desired, Ready: d.in.Ready,
			Started: d.starts, Stuck: d.stuck, Applied: d.Apply, Fleet: d.fleet(),
		}
	}
}

// mayGrow says whether a request may give the model an instance: its decisions are applied, and the policy of
// a deployment, and not an override, sets the number.
func (d *modelDecision) mayGrow() bool {
	return d.Apply && slices.ContainsFunc(d.deployments, func(s deploymentRow) bool {
		return (s.Mode == Full || s.Mode == UpOnly) && !s.overridden(d.in.At) && s.policy.WithDefaults().Max > 0
	})
}

func (d *modelDecision) metric() float64 { return float64(d.in.Running + d.in.Waiting + d.in.Urgent) }
