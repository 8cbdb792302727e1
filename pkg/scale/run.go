package scale

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"golang.org/x/sync/errgroup"

	"github.com/penstock/penstock/internal/duty"
	"github.com/penstock/penstock/internal/postgres"
)

// Config sets how the duty runs. Its zero value means the defaults.
type Config struct {
	Pause time.Duration // between two decisions: 1 s
	Keep  time.Duration // a state that changed without a decision is written after it: 5 s
	Log   *slog.Logger  // nowhere

	// Backends start and stop instances, by the names that deployments have for them. A deployment with
	// another one, advise and keda among them, only has its number published.
	Backends map[string]Backend
}

func (c Config) withDefaults() Config {
	c.Pause = cmp.Or(max(c.Pause, 0), time.Second)
	c.Keep = cmp.Or(max(c.Keep, 0), 5*time.Second)
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
	wake    chan struct{} // holds one

	mu       sync.Mutex
	sleeping map[int32]bool  // queues of models that have no instance
	zero     map[string]bool // these models
	status   DutyStatus
}

// DutyStatus is the figures of the duty for metrics.
type DutyStatus struct {
	Models []ModelStatus
	Passes int64         // since the start of the term
	Woken  int64         // of them by a push or a request for a model without instances
	Took   time.Duration // the last pass
	Orders OrderStatus
}

// ModelStatus is the newest decision about a model.
type ModelStatus struct {
	Model                   string
	Metric                  float64 // requests that run and wait
	Base, Raw, Stabilised   int
	Desired, Ready, Started int // Started: starts under way
	Limited                 bool
}

// New returns the duty for one term. It reads through db and writes through fence.
func New(db postgres.DB, fence duty.Fence, cfg Config) *Duty {
	cfg = cfg.withDefaults()
	return &Duty{
		cfg: cfg, db: db, fence: fence, wake: make(chan struct{}, 1),
		written: map[string]time.Time{}, past: map[string]past{}, minutes: map[string]*minute{},
		applier: newApplier(db, fence, cfg),
	}
}

// Run decides until ctx ends. It returns an error when passes go on failing, see duty.Loop.
func (s *Duty) Run(ctx context.Context) error {
	reported := make(chan struct{}, 1) // decisions wait for the first report of a backend
	s.applier.seen = func() {
		select {
		case reported <- struct{}{}:
		default:
		}
	}
	group, ctx := errgroup.WithContext(ctx)
	group.Go(func() error { return s.applier.run(ctx) })
	group.Go(func() error {
		l := duty.Loop{Name: "scale", Pause: s.cfg.Pause, Log: s.cfg.Log}
		var woken pace
		ticks := time.NewTicker(s.cfg.Pause)
		defer ticks.Stop()
		return l.Run(ctx, func(ctx context.Context) (time.Duration, error) {
			err := s.Pass(ctx)
			if err != nil {
				return s.cfg.Pause, err
			}
			select {
			case <-ctx.Done():
			case <-ticks.C:
			case <-reported:
				return woken.wait(time.Now()), nil
			case <-s.wake:
				s.count(func(st *DutyStatus) { st.Woken++ })
				return woken.wait(time.Now()), nil
			}
			return 0, nil
		})
	})
	return group.Wait()
}

// Bounds of passes beside the tick: pushes and reports of backends may come at any rate. The first request of a
// model needs three: one makes its deployment, the report of its backend is followed by one that decides, and the
// next request may be of another model.
const (
	wokenPause = 200 * time.Millisecond // between two in the long run
	wokenBurst = 5                      // at once
)

// pace spaces passes by the generic cell rate algorithm of ATM. Its zero value permits a burst.
type pace struct {
	full time.Time // when a burst is permitted again
}

// wait is how long the next pass has to wait; it counts that pass.
func (p *pace) wait(now time.Time) time.Duration {
	left := max(0, p.full.Sub(now))
	p.full = now.Add(left + wokenPause)
	return max(0, left-(wokenBurst-1)*wokenPause)
}

// WakeQueue has the duty decide at once if the queue's model has no instance. It does not block.
func (s *Duty) WakeQueue(queue int32) {
	s.mu.Lock()
	sleeps := s.sleeping[queue]
	s.mu.Unlock()
	if sleeps {
		s.nudge()
	}
}

// WakeModel has the duty decide at once if the model has no instance. It does not block.
func (s *Duty) WakeModel(model string) {
	s.mu.Lock()
	sleeps := s.zero[model]
	s.mu.Unlock()
	if sleeps {
		s.nudge()
	}
}

func (s *Duty) nudge() {
	select {
	case s.wake <- struct{}{}:
	default:
	}
}

// Status returns the figures of the newest pass.
func (s *Duty) Status() DutyStatus {
	s.mu.Lock()
	defer s.mu.Unlock()
	status := s.status
	status.Models = slices.Clone(status.Models)
	status.Orders = s.applier.figures()
	return status
}

func (s *Duty) count(change func(*DutyStatus)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change(&s.status)
}

// Pass reads the inputs of all models, decides, and stores what changed within the term.
func (s *Duty) Pass(ctx context.Context) error {
	began := time.Now()
	idle, err := s.makeWanted(ctx)
	if err != nil {
		return err
	}
	shares, err := s.shares(ctx)
	if err != nil {
		return err
	}
	inputs, err := pgx.CollectRows(postgres.Query(ctx, s.db, inputSQL), pgx.RowToStructByName[input])
	if err != nil {
		return fmt.Errorf("read inputs of scaling: %w", err)
	}
	all := make([]*verdict, 0, len(inputs))
	for _, in := range inputs {
		v, err := s.decide(in, shares[in.Model])
		if err != nil {
			s.cfg.Log.ErrorContext(ctx, "cannot decide for a model", "model", in.Model, "error", err)
			continue
		}
		if v != nil {
			all = append(all, v)
		}
	}
	limitByBudget(all)
	for _, v := range all {
		s.past[v.in.Model] = past{state: v.next, arrived: v.in.Arrived, counters: v.in.counters()}
	}
	s.publish(all, idle)
	if err := s.store(ctx, all); err != nil {
		return err
	}
	s.count(func(st *DutyStatus) { st.Passes, st.Took = st.Passes+1, time.Since(began) })
	return nil
}

// shares reads the deployments by model. One whose policy cannot be read keeps its model from being decided.
func (s *Duty) shares(ctx context.Context) (map[string][]share, error) {
	rows, err := pgx.CollectRows(postgres.Query(ctx, s.db, sharesSQL), pgx.RowToStructByNameLax[share])
	if err != nil {
		return nil, fmt.Errorf("read deployments: %w", err)
	}
	byModel := map[string][]share{}
	for _, row := range rows {
		byModel[row.Model] = append(byModel[row.Model], row)
	}
	return byModel, nil
}

// verdict is one model's decision of a pass.
type verdict struct {
	in     input
	shares []share
	d      Decision
	next   State
	used   used
	parts  map[string]int // instances of each deployment
}

// decide decides for one model. It returns nil while a backend has not reported its instances.
func (s *Duty) decide(in input, shares []share) (*verdict, error) {
	if len(shares) == 0 {
		return nil, fmt.Errorf("its deployments were removed just now")
	}
	for i := range shares {
		if err := shares[i].read(); err != nil {
			return nil, err
		}
	}
	for _, sh := range shares {
		if s.cfg.Backends[sh.Backend] != nil && sh.lists() && sh.SeenAt == nil {
			return nil, nil //nolint:nilnil // not before its backend has told what exists
		}
	}
	before, known := s.past[in.Model]
	if !known {
		var err error
		if before, err = in.stored(); err != nil {
			return nil, err
		}
	}
	policy := policyOf(shares)
	used := in.since(before.counters, before.arrived)
	o := in.observe(used, shares)
	o.Floor = floorAt(policy.Floors, in.At)
	d, next := Decide(in.At, policy, o, before.state)
	v := &verdict{in: in, shares: shares, d: d, next: next, used: used}
	if d.Apply {
		v.parts = spread(d.Desired, in.Unmanaged, shares, in.At)
	}
	s.minuteOf(in.Model, in.At).add(v, o)
	return v, nil
}

// limitByBudget lowers what the deployments of all models get to the budget of the installation.
func limitByBudget(all []*verdict) {
	if len(all) == 0 || all[0].in.Budget <= 0 {
		return
	}
	wanted := map[string]int{}
	var shares []share
	for _, v := range all {
		for name, n := range v.parts {
			wanted[name] = n
		}
		shares = append(shares, v.shares...)
	}
	left := affordable(all[0].in.Budget, wanted, shares)
	for _, v := range all {
		cut := 0
		for name, n := range v.parts {
			cut += n - left[name]
			v.parts[name] = left[name]
		}
		if cut == 0 {
			continue
		}
		v.d.Notes = append(v.d.Notes, Note{
			Code: NoteBudget, Args: [3]float64{float64(v.d.Desired - cut), float64(v.d.Desired)},
		})
		v.d.Desired -= cut
		v.d.Limited, v.next.Desired = v.d.Desired, v.d.Desired
		v.next.Changes = withoutGrowth(v.next.Changes, v.in.At, cut)
	}
}

// withoutGrowth takes what a limit behind Decide left out from the last change.
func withoutGrowth(changes []Step, at time.Time, cut int) []Step {
	changes = slices.Clone(changes)
	if last := len(changes) - 1; last >= 0 && changes[last].At.Equal(at) {
		changes[last].By -= cut
	}
	return changes
}

// publish keeps the figures of a pass for metrics, and which models sleep.
func (s *Duty) publish(all []*verdict, idle []wanted) {
	models := make([]ModelStatus, 0, len(all))
	sleeping, zero := map[int32]bool{}, map[string]bool{}
	for _, w := range idle {
		zero[w.Model] = true
		for _, q := range w.Queues {
			sleeping[q] = true
		}
	}
	for _, v := range all {
		models = append(models, ModelStatus{
			Model: v.in.Model, Metric: v.metric(), Base: v.d.Base, Raw: v.d.Raw, Stabilised: v.d.Stabilised,
			Desired: v.d.Desired, Ready: v.in.Ready, Started: len(v.in.Starting), Limited: v.d.Desired < v.d.Raw,
		})
		if v.d.Desired > 0 || !v.mayGrow() {
			continue
		}
		zero[v.in.Model] = true
		for _, q := range v.in.Queues {
			sleeping[q] = true
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.status.Models, s.sleeping, s.zero = models, sleeping, zero
}

// mayGrow says whether a request may give the model an instance: its decisions are applied, and the policy of
// a deployment, and not an override, sets the number.
func (v *verdict) mayGrow() bool {
	return v.d.Apply && slices.ContainsFunc(v.shares, func(s share) bool {
		mode := cmp.Or(Mode(s.Mode), Full)
		return (mode == Full || mode == UpOnly) && !s.overridden(v.in.At) && s.policy.WithDefaults().Max > 0
	})
}

func (v *verdict) metric() float64 { return float64(v.in.Running + v.in.Waiting + v.in.Urgent) }
