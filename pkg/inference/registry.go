package inference

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/duty"
	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/worker"
)

// Registry is the copy of models and instances in a process. It reads the tables anew whenever
// their version number has changed, so that nothing needs a restart; each poll reads the number, and
// the load of all instances.
type Registry struct {
	db      postgres.DB
	config  worker.Config
	log     *slog.Logger
	poll    time.Duration
	current atomic.Pointer[catalog]
	pressed atomic.Pointer[map[int32]bool] // instances that are pressed, as last probed
	reading sync.Mutex
	wake    chan struct{} // holds one
	changed []func()
}

// catalog is one version of the tables.
type catalog struct {
	version   int64
	models    map[string]worker.Model
	instances map[int32]*Endpoint
	byModel   map[string][]*Endpoint
	queues    map[string]modelQueue
	queueOf   map[string]string // by model: the first of its queues, by name
}

// modelQueue is an inference queue.
type modelQueue struct{ model, application string }

func newCatalog() *catalog {
	return &catalog{
		models: map[string]worker.Model{}, instances: map[int32]*Endpoint{}, byModel: map[string][]*Endpoint{},
		queues: map[string]modelQueue{}, queueOf: map[string]string{},
	}
}

// Endpoint is a registered instance, with the adapter that speaks to it.
type Endpoint struct {
	ID       int32
	Model    worker.Model
	Server   string
	Address  string // the endpoint's URL
	Slots    int
	Labels   map[string]string
	State    worker.HealthState // as last probed; empty before the first probe
	Draining bool
	Starts   bool // it has not been ready since it was started

	quarantined time.Time // on this process's monotonic clock; zero: not
	adapter     worker.Adapter
	follower    *worker.Follower
	key         string // what adapter and follower were made from
}

// Usable says whether calls may be sent to the instance.
func (e *Endpoint) Usable(now time.Time) bool {
	return !e.Draining && (e.State == "" || e.State.Serving()) && !now.Before(e.quarantined)
}

// NewRegistry returns an empty registry; Run or Refresh fills it. A poll of 0 is taken as 1 s.
func NewRegistry(db postgres.DB, config worker.Config, poll time.Duration, log *slog.Logger) *Registry {
	poll = cmp.Or(poll, time.Second)
	log = cmp.Or(log, slog.Default())
	r := &Registry{db: db, config: config, poll: poll, log: log, wake: make(chan struct{}, 1)}
	r.current.Store(newCatalog())
	return r
}

// Run keeps the registry up to date until ctx ends.
func (r *Registry) Run(ctx context.Context) error {
	ticks := time.NewTicker(r.poll)
	defer ticks.Stop()
	var failing duty.Failing
	for {
		failing.Note(ctx, r.log, slog.LevelError, "read inference registry", r.Refresh(ctx))
		select {
		case <-ctx.Done():
			return nil
		case <-ticks.C:
		case <-r.wake:
		}
	}
}

// Wake has Run read the tables now if they have changed. It does not block.
func (r *Registry) Wake() {
	select {
	case r.wake <- struct{}{}:
	default:
	}
}

// serves says whether an instance of the model is known that may be called.
func (r *Registry) serves(model string) bool {
	now := time.Now()
	return slices.ContainsFunc(r.Endpoints(model), func(e *Endpoint) bool { return e.Usable(now) })
}

// Refresh reads the tables if they have changed.
func (r *Registry) Refresh(ctx context.Context) error {
	r.reading.Lock()
	defer r.reading.Unlock()
	old := r.current.Load()
	var version int64
	var ids []int32
	if err := r.db.QueryRow(ctx, versionSQL).Scan(&version, &ids); err != nil {
		return fmt.Errorf("read version of models and instances: %w", err)
	}
	pressed := make(map[int32]bool, len(ids))
	for _, id := range ids {
		pressed[id] = true
	}
	r.pressed.Store(&pressed)
	if version == old.version {
		return nil
	}
	fresh, err := r.read(ctx, old)
	if err != nil {
		return err
	}
	// What was read first may be older than the rest, never newer: then the number says so at the
	// next poll.
	fresh.version = version
	r.current.Store(fresh)
	for _, tell := range r.changed {
		tell()
	}
	return nil
}

// versionSQL reads the version of the tables, and which instances are pressed, which changes without it.
const versionSQL = `
SELECT v.version, ARRAY(SELECT i.id FROM penstock.instance i WHERE penstock.pressed(i))
  FROM penstock.inference_version v`

// Pressed returns the instances that had better get no more calls while others of their model are
// there. The map is not to be changed.
func (r *Registry) Pressed() map[int32]bool {
	if p := r.pressed.Load(); p != nil {
		return *p
	}
	return nil
}

// OnChange has fn called after each change of models or instances. Call it before Run.
func (r *Registry) OnChange(fn func()) { r.changed = append(r.changed, fn) }

// Model returns a model with its override and defaults.
func (r *Registry) Model(name string) (worker.Model, bool) {
	m, ok := r.current.Load().models[name]
	return m, ok
}

// Models returns every model that is registered and valid, by name.
func (r *Registry) Models() map[string]worker.Model { return r.current.Load().models }

// QueueModel returns the model of an inference queue, empty for other queues.
func (r *Registry) QueueModel(queue string) string { return r.current.Load().queues[queue].model }

// ModelQueue returns the queue of a model's entries, empty if there is none.
func (r *Registry) ModelQueue(model string) string { return r.current.Load().queueOf[model] }

// Endpoints returns the instances of a model.
func (r *Registry) Endpoints(model string) []*Endpoint { return r.current.Load().byModel[model] }

// Threads is how many entries of an application's queues workers can run at once: the slots of their
// models, times the entries that a call may carry.
func (r *Registry) Threads(application string) int {
	c := r.current.Load()
	models := map[string]bool{}
	for _, q := range c.queues {
		if q.application == application {
			models[q.model] = true
		}
	}
	threads := 0
	for name := range models {
		for _, e := range c.byModel[name] {
			threads += e.Slots * max(e.Model.Batch.Items, 1)
		}
	}
	return threads
}

// Endpoint returns an instance by its id, nil if it is not registered any more.
func (r *Registry) Endpoint(id int32) *Endpoint { return r.current.Load().instances[id] }

// catalogSQL reads every model with its instances.
const catalogSQL = `
SELECT m.name, m.config, m.override, coalesce(i.id, 0), coalesce(i.server, ''), coalesce(i.endpoint, ''),
       coalesce(i.slots, 0), coalesce(i.labels, '{}'), coalesce(nullif(i.state, 'unknown'), ''),
       i.draining_at IS NOT NULL,
       coalesce(greatest(0, extract(epoch FROM i.quarantined_until - clock_timestamp())), 0)::float8,
       coalesce(penstock.starts(i), false)
  FROM penstock.model m
  LEFT JOIN penstock.instance i ON i.model = m.name
 ORDER BY i.id`

func (r *Registry) read(ctx context.Context, old *catalog) (*catalog, error) {
	fresh := newCatalog()
	var (
		name             string
		config, override []byte
		labels           []byte
		quarantine       float64
		row              Endpoint
	)
	_, err := pgx.ForEachRow(postgres.Query(ctx, r.db, catalogSQL), []any{
		&name, &config, &override, &row.ID, &row.Server, &row.Address,
		&row.Slots, &labels, &row.State, &row.Draining, &quarantine, &row.Starts,
	}, func() error {
		model, known := fresh.models[name]
		if !known {
			var usable bool
			if model, usable = r.model(name, config, override, old); !usable {
				return nil
			}
			fresh.models[name] = model
		}
		if row.ID == 0 {
			return nil
		}
		e := row
		e.Model, e.Labels = model, readLabels(labels)
		if quarantine > 0 {
			// From now on: the statement may have waited for long before it was evaluated.
			e.quarantined = time.Now().Add(time.Duration(quarantine * float64(time.Second)))
		}
		e.key = string(config) + "\x00" + string(override) + "\x00" + e.Address + fmt.Sprint("\x00", e.Slots)
		r.connect(&e, old.instances[e.ID], fresh)
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read models and instances: %w", err)
	}
	return fresh, r.readQueues(ctx, fresh)
}

const queueModelsSQL = `
SELECT name, model, application
  FROM penstock.queue
 WHERE kind = 'inference' AND model IS NOT NULL`

func (r *Registry) readQueues(ctx context.Context, fresh *catalog) error {
	var queue string
	var of modelQueue
	into := []any{&queue, &of.model, &of.application}
	_, err := pgx.ForEachRow(postgres.Query(ctx, r.db, queueModelsSQL), into, func() error {
		fresh.queues[queue] = of
		if first, known := fresh.queueOf[of.model]; !known || queue < first {
			fresh.queueOf[of.model] = queue
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("read queues of models: %w", err)
	}
	return nil
}

// model reads one model. One that is not valid keeps what it was before: a slip in an override must
// not stop the work.
func (r *Registry) model(name string, config, override []byte, old *catalog) (worker.Model, bool) {
	m, err := worker.ReadModel(name, config, override)
	if err == nil {
		return m, true
	}
	before, known := old.models[name]
	r.log.Error("model is not valid", "model", name, "kept", known, "error", err)
	return before, known
}

// connect gives the instance its adapter: the one it had, with its open connections, if nothing
// about it has changed.
func (r *Registry) connect(e, before *Endpoint, fresh *catalog) {
	if before != nil && before.key == e.key {
		e.adapter, e.follower = before.adapter, before.follower
	} else {
		adapter, err := worker.New(e.Model, worker.Instance{Endpoint: e.Address, Slots: e.Slots}, r.config)
		if err != nil {
			r.log.Error("instance is not usable", "model", e.Model.Name, "server", e.Server, "error", err)
			return
		}
		e.adapter, e.follower = adapter, worker.NewFollower(adapter, e.Model)
	}
	fresh.instances[e.ID] = e
	fresh.byModel[e.Model.Name] = append(fresh.byModel[e.Model.Name], e)
}

func readLabels(text []byte) map[string]string {
	var labels map[string]string
	_ = json.Unmarshal(text, &labels) // labels that are no texts are for people alone
	return labels
}
