package scale

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/penstock/penstock/internal/duty"
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
	failing duty.FailingEach

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
	Desired, Ready, Started int  // Started: starts under way that are not stuck
	Stuck                   int  // starts that are
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
