package scale

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"golang.org/x/sync/errgroup"

	"github.com/penstock/penstock/internal/duty"
	"github.com/penstock/penstock/internal/oneline"
	"github.com/penstock/penstock/internal/postgres"
)

// Config sets how the duty runs. Its zero value means the defaults.
type Config struct {
	Pause time.Duration // between two decisions: 1 s
	Log   *slog.Logger  // nowhere

	// Backends start and stop instances, by the names that deployments have for them. A deployment with
	// another one, advise and keda among them, only has its number published.
	Backends map[string]Backend

	keep time.Duration // a state that changed without a decision is written after it: 5 s; tests set it
}

func (c Config) withDefaults() Config {
	c.Pause = cmp.Or(max(c.Pause, 0), time.Second)
	c.keep = cmp.Or(max(c.keep, 0), 5*time.Second)
	c.Log = cmp.Or(c.Log, slog.New(slog.DiscardHandler))
	return c
}

// Duty is the duty of the elected leader that decides for every model with a deployment, and has backends
// follow. Decisions are rows; a backend that cannot be reached delays none of them.
type Duty struct {
	cfg     Config
	db      postgres.DB
	fence   duty.Fence
	written map[string]time.Time // when the state of a model was stored
	past    map[string]past      // newer than what is stored
	minutes map[string]*minute   // not stored yet
	applier *applier
	hints   *wakeups
	woken   pace // of passes for models that are due
	slice   int  // models of a slice
	budget  bool // one is known to be set

	mu     sync.Mutex
	status DutyStatus // without Models
	models map[string]ModelStatus
}

// DutyStatus is the figures of the duty for metrics.
type DutyStatus struct {
	Models []ModelStatus
	Passes int64         // since the start of the term
	Woken  int64         // by a push or a request for a model without instances
	Took   time.Duration // the last pass over all models
	Orders OrderStatus
}

// ModelStatus is the newest decision about a model.
type ModelStatus struct {
	Model                   string
	Metric                  float64 // requests that run and wait
	Waiting                 int     // of these
	Base, Raw, Stabilised   int
	Desired, Ready, Started int // Started: starts under way that are not stuck
	Stuck                   int // starts that are
	Limited                 bool
	Applied                 bool // backends are told, and not advised alone
	Fleet
}

// New returns the duty for one term. It reads through db and writes through fence.
func New(db postgres.DB, fence duty.Fence, cfg Config) *Duty {
	cfg = cfg.withDefaults()
	return &Duty{
		cfg: cfg, db: db, fence: fence, hints: newWakeups(), slice: sliceMax, models: map[string]ModelStatus{},
		written: map[string]time.Time{}, past: map[string]past{}, minutes: map[string]*minute{},
		applier: newApplier(db, fence, cfg),
	}
}

// Run decides until ctx ends. It returns an error when passes go on failing, see duty.Loop.
func (s *Duty) Run(ctx context.Context) error {
	s.applier.seen = s.hints.now // decisions wait for the first report of a backend
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return duty.Protect(ctx, s.cfg.Log, func() error { return s.applier.run(ctx) }) })
	group.Go(func() error {
		l := duty.Loop{Name: "scale", Pause: s.cfg.Pause, Log: s.cfg.Log}
		ticks := time.NewTicker(s.cfg.Pause)
		defer ticks.Stop()
		next := s.Pass
		return l.Run(ctx, func(ctx context.Context) (time.Duration, error) {
			decide := next
			next = s.Pass // after one that failed
			if err := decide(ctx); err != nil {
				return s.cfg.Pause, err
			}
			next = s.next(ctx, ticks.C)
			return 0, nil
		})
	})
	return group.Wait()
}

// next waits for a tick, or until models that are due may be decided, and returns which pass that is. Ticks come first:
// their pass decides for the models that are due, too.
func (s *Duty) next(ctx context.Context, ticks <-chan time.Time) func(context.Context) error {
	for {
		select {
		case <-ticks:
			return s.Pass
		default:
		}
		var permitted <-chan time.Time
		if s.hints.any() {
			wait := s.woken.left(time.Now())
			if wait == 0 {
				return s.passDue
			}
			permitted = time.After(wait)
		}
		select {
		case <-ctx.Done():
			return s.Pass
		case <-ticks:
			return s.Pass
		case <-permitted:
		case <-s.hints.wake:
		}
	}
}

// WakeQueue has the duty decide at once if the queue's model has no instance. It does not block.
func (s *Duty) WakeQueue(queue int32) { s.hints.queue(queue) }

// WakeModel has the duty decide at once if the model has no instance. It does not block.
func (s *Duty) WakeModel(model string) { s.hints.model(model) }

// Status returns the figures of the newest pass.
func (s *Duty) Status() DutyStatus {
	s.mu.Lock()
	defer s.mu.Unlock()
	status := s.status
	for _, m := range slices.Sorted(maps.Keys(s.models)) {
		status.Models = append(status.Models, s.models[m])
	}
	status.Orders = s.applier.figures()
	return status
}

func (s *Duty) count(change func(*DutyStatus)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change(&s.status)
}

// sliceMax is how many models are read, decided and stored at once.
const sliceMax = 100

// modelsSQL reads the models that have a deployment or may get one, and whether there is a budget.
const modelsSQL = `
SELECT (SELECT coalesce(array_agg(m.model ORDER BY m.model), '{}')
          FROM (SELECT model FROM penstock.deployment UNION SELECT model FROM penstock.deployment_template) m),
       EXISTS (SELECT FROM penstock.setting v WHERE v.name = 'scale.budget' AND v.value::float8 > 0)`

// Pass reads the inputs of all models, decides, and stores what changed within the term. It does so for slices of the
// models, between which it decides for those that are due: a wake-up waits for a slice and not for all. Under a budget,
// which the numbers of all deployments share, there is one slice.
func (s *Duty) Pass(ctx context.Context) error {
	began := time.Now()
	whole, err := s.passSlices(ctx)
	if err == nil && whole {
		_, err = s.passSlices(ctx) // which are one now
	}
	if err != nil {
		return err
	}
	s.count(func(st *DutyStatus) { st.Passes, st.Took = st.Passes+1, time.Since(began) })
	return nil
}

// passSlices decides for all models, slice after slice. whole says that a budget was set since it began: it ended
// there, and a pass over all is to be made.
func (s *Duty) passSlices(ctx context.Context) (whole bool, err error) {
	var models []string
	if err := s.db.QueryRow(ctx, modelsSQL).Scan(&models, &s.budget); err != nil {
		return false, fmt.Errorf("read models with a deployment: %w", err)
	}
	s.retain(models)
	size := s.slice
	if s.budget {
		size = max(1, len(models))
	}
	for slice := range slices.Chunk(models, size) {
		if !s.budget {
			if whole, err := s.decideDue(ctx); whole || err != nil {
				return whole, err
			}
		}
		if whole, err := s.decideFor(ctx, slice); whole || err != nil {
			return whole, err
		}
	}
	return false, nil
}

// passDue decides for models that are due, where their rate permits it: under a budget for all.
func (s *Duty) passDue(ctx context.Context) error {
	whole, err := s.decideDue(ctx)
	if err == nil && whole {
		return s.Pass(ctx)
	}
	return err
}

// decideDue decides for models that are due, where their rate permits it. whole says that there is a budget: it decided
// for none, and a pass over all is to be made.
func (s *Duty) decideDue(ctx context.Context) (whole bool, err error) {
	now := time.Now()
	due := s.hints.some(s.slice)
	if len(due) == 0 || s.woken.left(now) > 0 {
		return false, nil
	}
	s.count(func(st *DutyStatus) { st.Woken++ })
	if s.budget {
		s.woken.spend(now, wholePause)
		return true, nil
	}
	s.woken.spend(now, wokenPause)
	return s.decideFor(ctx, due)
}

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
		if err != nil {
			s.cfg.Log.ErrorContext(ctx, "cannot decide for a model", "model", in.Model, "error", err)
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

// inputs reads the inputs of models. Where the row of one cannot be read, each is read alone, and it becomes undecided.
func (s *Duty) inputs(ctx context.Context, models []string, undecided map[string]bool) ([]input, error) {
	read := func(models []string) ([]input, error) {
		return pgx.CollectRows(postgres.Query(ctx, s.db, inputSQL, models), pgx.RowToStructByName[input])
	}
	all, err := read(models)
	if ofData(err) {
		all, err = nil, nil
		for _, model := range models {
			one, failed := read([]string{model})
			if ofData(failed) {
				s.cfg.Log.ErrorContext(ctx, "cannot read the input of a model", "model", model, "error", failed)
				undecided[model] = true
				continue
			}
			all, err = append(all, one...), failed
			if err != nil {
				break
			}
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

// retain forgets all models but those that exist.
func (s *Duty) retain(models []string) {
	exists := make(map[string]bool, len(models))
	for _, m := range models {
		exists[m] = true
	}
	s.hints.retain(exists)
	for m := range s.past {
		if !exists[m] {
			delete(s.past, m)
			delete(s.written, m)
			delete(s.minutes, m)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	maps.DeleteFunc(s.models, func(m string, _ ModelStatus) bool { return !exists[m] })
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
	u := in.since(before.counters)
	o := in.observe(u, deployments)
	o.Floor = floorOf(deployments, in.At)
	decision, next := Decide(in.At, policy, o, before.state)
	d := &modelDecision{in: in, deployments: deployments, Decision: decision, next: next, read: before}
	d.noteFlaws()
	for _, began := range o.Starting {
		if in.At.Sub(began) > stuckAfterOf(policy, in.ColdStartP95) {
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
		unmanaged := in.unmanaged(stuckAfterOf(policy, in.ColdStartP95))
		d.parts, d.kept = shares(d.Desired, unmanaged, deployments, starts, in.At)
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
			Started: d.starts, Stuck: d.stuck, Limited: d.Desired < d.Raw, Applied: d.Apply, Fleet: d.fleet(),
		}
	}
}

// mayGrow says whether a request may give the model an instance: its decisions are applied, and the policy of
// a deployment, and not an override, sets the number.
func (d *modelDecision) mayGrow() bool {
	return d.Apply && slices.ContainsFunc(d.deployments, func(s deploymentRow) bool {
		mode := cmp.Or(Mode(s.Mode), Full)
		return (mode == Full || mode == UpOnly) && !s.overridden(d.in.At) && s.policy.WithDefaults().Max > 0
	})
}

func (d *modelDecision) metric() float64 { return float64(d.in.Running + d.in.Waiting + d.in.Urgent) }
