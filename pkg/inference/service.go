package inference

import (
	"context"
	"log/slog"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/worker"
)

// ServiceConfig is the configuration of everything that a node needs to run inference. The zero
// value works.
type ServiceConfig struct {
	Adapters worker.Config
	// Freed is called when slots came free by themselves: the scheduling threads may try again. nil: nothing is.
	Freed func()
	// Objects is where results go that are too large for their row; nil: all are stored in their row.
	Objects ObjectStore
	// Reports is where asynchronous workers report; nil: Cog models cannot be run so, and others are polled alone.
	Reports *Reports
	Log     *slog.Logger
}

// Service has the parts that a task node needs to run entries of inference queues: the gate that
// its permits pass, the handler for all of its inference queues, and the duties that keep both up
// to date.
type Service struct {
	Registry   *Registry
	Pool       *SlotPool   // a gate of the task node
	Dispatcher *Dispatcher // the handler of every inference queue
	Prober     *Prober     // a duty of any process
	Usage      *UsageMeter // of calls; to be ended with the pool
}

// NewService puts the parts together. node returns the incarnation of the task node; it is not
// asked before the first permit is.
func NewService(config ServiceConfig, db postgres.DB, node func() invalidation.NodeID) *Service {
	return newService(config, usualTuning(), db, node)
}

func newService(config ServiceConfig, t tuning, db postgres.DB, node func() invalidation.NodeID) *Service {
	registry := NewRegistry(db, config.Adapters, t.poll, config.Log)
	pool := newSlotPool(config, t, db, registry, node)
	dispatcher := newDispatcher(config, t, db, registry, pool)
	return &Service{
		Registry:   registry,
		Pool:       pool,
		Dispatcher: dispatcher,
		Usage:      dispatcher.usage,
		Prober:     newProber(t, db, registry, config.Log),
	}
}

// Noticed is called when a gateway misses slots of a model, or an instance of it became ready. It does not
// block.
func (s *Service) Noticed(model string) {
	s.Pool.Wanted(model)
	if !s.Registry.serves(model) {
		s.Registry.Wake() // entries may wait for that instance
	}
}

// Starting is called when an instance of a model was announced: it is probed until it is ready. It does not
// block.
func (s *Service) Starting(string) { s.Prober.Wake() }

// Duties are the loops that the node runs beside itself. End the context of the pool's only when
// the node's last run has ended.
func (s *Service) Duties() map[string]func(ctx context.Context) error {
	return map[string]func(ctx context.Context) error{
		"inference registry": s.Registry.Run, "inference slots": s.Pool.Run, "inference health": s.Prober.Run,
		"inference usage": s.Usage.Run,
	}
}
