package scale

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/duty"
	"github.com/penstock/penstock/internal/postgres"
)

// applier has backends follow the numbers that were decided. Each deployment has at most one round under way:
// a backend that hangs delays no other.
type applier struct {
	cfg   Config
	db    postgres.DB
	fence duty.Fence
	wake  chan struct{}      // holds one: there are due models
	conns chan struct{}      // holds as many as there are rounds of a tick that use the database
	limit time.Duration      // of a round
	seen  func(model string) // called when a backend reported for the first time

	mu     sync.Mutex
	due    map[string]bool   // models whose deployments are not to wait for the next tick
	notes  map[string]*notes // by deployment
	status OrderStatus

	hearing hearing
	failing duty.FailingEach
}

// OrderStatus is the counters of orders to backends since the start of the term. Failed counts as well how often a
// backend did not list its instances.
type OrderStatus struct {
	Applied, Failed, Drained, Expired int64
	Made, Pruned                      int64 // deployments on demand
}

func newApplier(db postgres.DB, fence duty.Fence, cfg Config) *applier {
	return &applier{
		cfg: cfg, db: db, fence: fence, wake: make(chan struct{}, 1), conns: make(chan struct{}, connsMax),
		limit: roundMax, due: map[string]bool{}, notes: map[string]*notes{}, seen: func(string) {},
	}
}

// nudge has the deployments of the models applied at once.
func (a *applier) nudge(models ...string) {
	if len(models) == 0 {
		return
	}
	a.mu.Lock()
	for _, m := range models {
		a.due[m] = true
	}
	a.mu.Unlock()
	select {
	case a.wake <- struct{}{}:
	default:
	}
}

func (a *applier) figures() OrderStatus {
	a.mu.Lock()
	defer a.mu.Unlock()
	return a.status
}

func (a *applier) count(change func(*OrderStatus)) {
	a.mu.Lock()
	defer a.mu.Unlock()
	change(&a.status)
}

// Limits of a round of one deployment, and of instances whose time to live ended.
const (
	roundMax    = 30 * time.Second
	expireEvery = 2 * time.Second
	pruneEvery  = time.Minute
	trimEvery   = time.Hour
	backoffMax  = 5 * time.Minute
)

// run goes through the deployments until ctx ends, and waits for the rounds that are under way. It returns an error
// where it or a watch panics.
func (a *applier) run(term context.Context) error {
	var group sync.WaitGroup
	defer group.Wait()
	ctx, end := context.WithCancelCause(term)
	defer end(nil)
	for _, b := range a.cfg.Backends {
		w, watches := b.(Watcher)
		if !watches {
			continue
		}
		group.Go(func() {
			err := duty.Protect(ctx, a.cfg.Log, func() error {
				w.Watch(ctx, func(model string) { a.nudge(model) })
				return nil
			})
			if err != nil {
				end(fmt.Errorf("watch a backend: %w", err))
			}
		})
	}
	ticks := time.NewTicker(a.cfg.Pause)
	defer ticks.Stop()
	var expired, pruned, trimmed time.Time
	var asked map[string]bool // models of the next rounds; nil for all
	for {
		err := a.startRounds(ctx, &group, asked)
		a.failing.Note(ctx, a.cfg.Log, slog.LevelError, "read deployments", "", err)
		if now := time.Now(); now.Sub(expired) >= expireEvery {
			expired = now
			a.expire(ctx)
			if now.Sub(pruned) >= pruneEvery {
				pruned = now
				a.prune(ctx)
			}
			if now.Sub(trimmed) >= trimEvery {
				trimmed = now
				a.trim(ctx)
			}
		}
		select {
		case <-ctx.Done():
			if term.Err() == nil {
				return context.Cause(ctx)
			}
			return nil
		case <-ticks.C:
			asked = nil
		case <-a.wake:
			asked = a.take()
		}
	}
}

// take returns the models whose deployments are due.
func (a *applier) take() map[string]bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	models := maps.Clone(a.due)
	clear(a.due)
	return models
}

const trimSQL = `DELETE FROM penstock.cold_start WHERE at < clock_timestamp() - interval '7 days'`

func (a *applier) trim(ctx context.Context) {
	if err := a.exec(ctx, trimSQL); err != nil && ctx.Err() == nil {
		a.cfg.Log.WarnContext(ctx, "cannot remove old cold starts", "error", err)
	}
}

// startRounds starts a round of each deployment that the leader drives and that has none: of the models that are asked
// for, or of all where asked is nil. One that is asked for and has a round gets another one behind it.
func (a *applier) startRounds(ctx context.Context, group *sync.WaitGroup, asked map[string]bool) error {
	changing := a.changing() // what is read of these may be out of date when their rounds have ended
	rows, err := a.deployments(ctx, asked)
	if err != nil {
		return err
	}
	if asked == nil {
		a.retain(rows)
	}
	if len(rows) == 0 {
		return nil
	}
	now := rows[0].now()
	bounded(rows, now)
	neighbours(rows, now)
	if asked == nil {
		rows = withoutResting(rows, now)
	} else {
		rows = slices.DeleteFunc(rows, func(s applied) bool { return !asked[s.Model] })
	}
	for _, s := range rows {
		if a.cfg.Backends[s.Backend] == nil && !s.managed() {
			continue
		}
		r := a.begin(s.Name, asked[s.Model])
		if r == nil {
			continue
		}
		if changing[s.Name] { // its round ended since
			if again := a.end(s.Name); again || asked[s.Model] {
				a.nudge(s.Model)
			}
			continue
		}
		group.Go(func() {
			limited, cancel := context.WithTimeout(ctx, a.limit)
			defer cancel()
			starts, err := a.protected(limited, s, r.urgent)
			a.failing.Note(ctx, a.cfg.Log, slog.LevelWarn, "apply a deployment", "deployment "+s.Name, err,
				"deployment", s.Name)
			if again := a.end(s.Name); again || starts { // starts are registered at once
				a.nudge(s.Model)
			}
		})
	}
	return nil
}

// protected is reconcile. One that panics has failed: the data of a deployment keeps no other from its number.
func (a *applier) protected(ctx context.Context, s applied, urgent <-chan struct{}) (starts bool, err error) {
	err = duty.Protect(ctx, a.cfg.Log, func() (err error) {
		starts, err = a.reconcile(ctx, s, urgent)
		return err
	})
	if errors.Is(err, duty.ErrPanic) {
		a.count(func(st *OrderStatus) { st.Failed++ })
		err = errors.Join(err, a.note(ctx, s, err))
	}
	return starts, err
}

// deployments reads the deployments of the models, or those of all: where asked is nil, and under a budget, since
// whether there is room for one more depends on all.
func (a *applier) deployments(ctx context.Context, asked map[string]bool) ([]applied, error) {
	if asked != nil {
		models := slices.Sorted(maps.Keys(asked))
		rows, err := pgx.CollectRows(postgres.Query(ctx, a.db, deploymentsOfSQL, models), readDeployment)
		if err != nil || len(rows) == 0 || rows[0].Budget == 0 {
			return rows, err
		}
	}
	return pgx.CollectRows(postgres.Query(ctx, a.db, deploymentsSQL), readDeployment)
}

// registeredSQL reads the instances of deployment $1, and those that belong to none and have the name or the endpoint
// of one that its backend reported.
const registeredSQL = `
SELECT n.id, n.server, n.endpoint, penstock.present(n) AS ready, n.ready_at IS NOT NULL AS ever_ready,
       n.draining_at IS NOT NULL AS draining, coalesce(n.drain_by = 'autoscaler', false) AS drained_by_us,
       coalesce(n.drain_by = 'removed', false) AS removed, coalesce(n.drain_by = 'expired', false) AS expired,
       n.draining_at,
       coalesce(n.quarantined_until > clock_timestamp(), false) AS quarantined,
       penstock.unhealthy(n) AS unhealthy,
       (SELECT count(*) FROM penstock.instance x JOIN penstock.slot s ON s.instance_id = x.id
         WHERE x.deployment = n.deployment AND x.server = n.server) AS held,
       coalesce(n.template_hash, '') AS template_hash, n.created_at, n.backend_began_at,
       n.deployment IS DISTINCT FROM $1 AS unmanaged
  FROM penstock.instance n
 WHERE n.model = $2
   AND (n.deployment = $1 OR (n.server = ANY ($3) OR n.endpoint = ANY ($4)) AND penstock.unmanaged(n))
 ORDER BY n.server`

// reconcile brings one deployment nearer to its number: it asks the backend what exists, writes what follows,
// and gives the order. It says whether it ordered starts from a backend that lists them.
func (a *applier) reconcile(ctx context.Context, s applied, urgent <-chan struct{}) (starts bool, err error) {
	backend := a.cfg.Backends[s.Backend]
	if backend == nil {
		return false, a.lacks(ctx, s)
	}
	place, err := placeOf(backend, s)
	if err != nil {
		return false, errors.Join(err, a.note(ctx, s, err))
	}
	found, err := backend.List(ctx, s.backendTarget())
	listed := err == nil
	if err != nil && !errors.Is(err, ErrUnlisted) {
		a.count(func(st *OrderStatus) { st.Failed++ })
		return false, errors.Join(err, a.note(ctx, s, err))
	}
	todo, err := a.prepare(ctx, s, place, found, listed, urgent)
	if err != nil || todo.order == nil {
		return false, err
	}
	if todo.anew {
		now := s.now()
		s.OrderedAt = &now
	}
	err = backend.Apply(ctx, *todo.order)
	a.noted(s.Name, func(n *notes) { n.answered(*todo.order, err, time.Now()) })
	if err != nil && !errors.Is(err, ErrCarriedOut) {
		if noted, failed := a.noRoom(ctx, s, todo, err); noted {
			return false, failed
		}
		a.count(func(st *OrderStatus) { st.Failed++ })
		if !todo.order.starts() {
			return false, err
		}
		return false, errors.Join(err, a.fail(ctx, s, err))
	}
	a.count(func(st *OrderStatus) { st.Applied++ })
	a.noted(s.Name, func(n *notes) { n.removed = strings.Join(todo.order.Remove, " ") })
	return listed && todo.order.Count > s.Ordered, a.confirm(ctx, s, todo.order)
}

// connsMax is how many rounds of a tick use the database at once. Deployments that nobody waits for would else take all
// connections of the leader once a second, and the one that is waited for would come behind each of them.
const connsMax = 3

// acquire waits until a round may use the database, which the caller ends, or until the round is urgent: then it does
// not wait for others.
func (a *applier) acquire(ctx context.Context, urgent <-chan struct{}) (done func(), err error) {
	select {
	case <-urgent:
		return func() {}, nil
	default:
	}
	select {
	case <-urgent:
		return func() {}, nil
	case a.conns <- struct{}{}:
		return func() { <-a.conns }, nil
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// prepare writes what follows from the report of a backend, and returns the steps, with the order that is to be given.
// Until it is urgent it waits for its turn to use the database.
func (a *applier) prepare(
	ctx context.Context, s applied, place string, found []BackendInstance, listed bool, urgent <-chan struct{},
) (steps, error) {
	done, err := a.acquire(ctx, urgent)
	if err != nil {
		return steps{}, fmt.Errorf("wait for a turn to use the database: %w", err)
	}
	defer done()
	registered, err := pgx.CollectRows(
		postgres.Query(ctx, a.db, registeredSQL, s.Name, s.Model, servers(found), endpoints(found)),
		pgx.RowToStructByName[registration])
	if err != nil {
		return steps{}, fmt.Errorf("read instances of deployment %q: %w", s.Name, err)
	}
	for _, r := range registered {
		if r.Unmanaged {
			s.others = append(s.others, r)
		}
	}
	registered = slices.DeleteFunc(registered, func(r registration) bool { return r.Unmanaged })
	if mayDrop(s, registered) {
		if err := a.readUsage(ctx, s.Model, registered); err != nil {
			return steps{}, fmt.Errorf("read which instances of deployment %q are in use: %w", s.Name, err)
		}
	}
	a.noted(s.Name, func(n *notes) { s.refused = n.refusedAt(time.Now()) })
	todo := plan(s, registered, found, listed, s.now())
	a.noted(s.Name, func(n *notes) {
		if o := todo.order; o != nil && (!listed && !n.isNews(s, o) || n.waits(*o, time.Now())) {
			todo.order = nil
		}
	})
	if err := a.write(ctx, s, place, &todo); err != nil {
		err = fmt.Errorf("write the state of deployment %q: %w", s.Name, err)
		return steps{}, errors.Join(err, a.note(ctx, s, err))
	}
	if s.SeenAt == nil {
		a.seen(s.Model)
	}
	return todo, nil
}

// placeOf is where the instances of a deployment are that a backend starts; empty where it is bound to no place. It
// returns an error wrapping ErrElsewhere where there are some in another one: here they would count as gone.
func placeOf(backend Backend, s applied) (string, error) {
	placed, bound := backend.(Placed)
	if !bound {
		return "", nil
	}
	place, err := placed.Place()
	if err != nil {
		return "", fmt.Errorf("place of the instances of deployment %q: %w", s.Name, err)
	}
	has := s.Registered+s.Draining+s.Ordered > 0 || s.Existing != nil && *s.Existing > 0
	if s.Place != "" && s.Place != place && has {
		return "", fmt.Errorf("deployment %q: %w: %s, this leader has %s; elect a leader there, or remove the "+
			"deployment and make it again", s.Name, ErrElsewhere, s.Place, place)
	}
	return place, nil
}
