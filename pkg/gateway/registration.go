package gateway

import (
	"cmp"
	"context"
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"log/slog"
	"sync/atomic"
	"time"

	"github.com/penstock/penstock/internal/duty"
	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// RegistrationConfig of a Registration. Name is required.
type RegistrationConfig struct {
	Name        string
	Application string
	Lease       time.Duration         // how long the gateway may be silent before its slots are freed: 30 s
	Beat        time.Duration         // between heartbeats: 5 s
	Status      func() map[string]any // reported with each heartbeat; nil: nothing
	Drain       func(reason string)   // called once when a drain is ordered
	Log         *slog.Logger
}

// Registration is the gateway's row among the nodes, under whose id it holds slots.
type Registration struct {
	config      RegistrationConfig
	db          postgres.DB
	log         *slog.Logger
	incarnation atomic.Int64
	drained     bool
	renewed     time.Time // start of the last registration or heartbeat that was answered; zero: there was none
}

// NewRegistration returns a gateway that is not registered yet.
func NewRegistration(config RegistrationConfig, db postgres.DB) *Registration {
	config.Application = cmp.Or(config.Application, "default")
	config.Lease = cmp.Or(config.Lease, 30*time.Second)
	config.Beat = cmp.Or(config.Beat, 5*time.Second)
	m := &Registration{config: config, db: db, log: cmp.Or(config.Log, slog.Default())}
	m.renew()
	return m
}

// ID returns the incarnation.
func (r *Registration) ID() invalidation.NodeID { return invalidation.NodeID(r.incarnation.Load()) }

func (r *Registration) renew() {
	var b [8]byte
	_, _ = rand.Read(b[:])                                           // never fails
	r.incarnation.Store(int64(binary.BigEndian.Uint64(b[:])>>1) | 1) //nolint:gosec // 63 bits
}

const registerSQL = `SELECT penstock.register_gateway($1, $2, $3, $4)`

// Register makes the gateway known.
func (r *Registration) Register(ctx context.Context) error {
	start := time.Now()
	if _, err := r.db.Exec(ctx, registerSQL, r.ID(), r.config.Name, r.config.Application, r.config.Lease); err != nil {
		return fmt.Errorf("register gateway %q: %w", r.config.Name, err)
	}
	r.renewed = start
	return nil
}

// Run sends heartbeats until ctx ends.
func (r *Registration) Run(ctx context.Context) error {
	ticks := time.NewTicker(r.config.Beat)
	defer ticks.Stop()
	var failing duty.Failing
	for {
		err := r.beat(ctx)
		var args []any
		if !r.renewed.IsZero() {
			args = duty.LeaseArgs(r.renewed, r.config.Lease)
		}
		failing.Note(ctx, r.log, slog.LevelWarn, "heartbeat", err, args...)
		select {
		case <-ctx.Done():
			return nil
		case <-ticks.C:
		}
	}
}

func (r *Registration) beat(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, r.config.Beat)
	defer cancel()
	b, start := invalidation.Beat{}, time.Now()
	if r.config.Status != nil {
		b.Load = r.config.Status()
	}
	orders, err := invalidation.Renew(ctx, r.db, r.ID(), b)
	if errors.Is(err, invalidation.ErrNodeGone) {
		r.log.Warn("gateway was forgotten, registering as another incarnation")
		r.renew()
		return r.Register(ctx)
	}
	if err != nil {
		return err
	}
	r.renewed = start
	if orders.Draining && !r.drained && r.config.Drain != nil {
		r.drained = true
		r.config.Drain(orders.Reason)
	}
	return nil
}

// Leave removes the gateway's row once its slots are given back, so that others need not wait for its lease to lapse.
func (r *Registration) Leave(ctx context.Context) error {
	_, err := invalidation.RemoveNode(ctx, r.db, r.ID())
	return err
}
