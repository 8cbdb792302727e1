package scale

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
)

// templated is a model that has a template and no deployment: its first request makes one.
type templated struct {
	Model  string
	Queues []int32
	Waits  bool `db:"wanted"` // something waits
}

const (
	wantedSQL = `SELECT model, queues, wanted FROM penstock.scale_wanted WHERE model = ANY ($1)`
	makeSQL   = `SELECT penstock.make_wanted_deployments($1)`
	pruneSQL  = `SELECT penstock.prune_deployments($1)`
)

var errTargetTaken = errors.New("models have no deployment: the target of their template belongs to another one")

// pruneMax bounds the deployments that a pass removes.
const pruneMax = 100

// makeDeployments makes the deployments of those of the models for which something waits, and returns the ones that
// still have none.
func (s *Duty) makeDeployments(ctx context.Context, models []string) ([]templated, error) {
	all, err := pgx.CollectRows(postgres.Query(ctx, s.db, wantedSQL, models), pgx.RowToStructByName[templated])
	if err != nil {
		return nil, fmt.Errorf("read models without a deployment: %w", err)
	}
	var missing []string
	for _, t := range all {
		if t.Waits {
			missing = append(missing, t.Model)
		}
	}
	if len(missing) == 0 {
		return all, nil
	}
	var made []string
	err = s.fence.InTx(ctx, func(tx pgx.Tx) error { return tx.QueryRow(ctx, makeSQL, missing).Scan(&made) })
	if err != nil {
		return nil, fmt.Errorf("make deployments on demand: %w", err)
	}
	for _, name := range made {
		s.cfg.Log.InfoContext(ctx, "made a deployment on demand", "deployment", name)
	}
	if len(made) < len(missing) {
		err = errTargetTaken
	}
	s.failing.Note(ctx, s.cfg.Log, slog.LevelWarn, "make deployments on demand", "make", err)
	s.applier.nudge(missing...) // its backend is asked at once what exists
	s.applier.count(func(st *OrderStatus) { st.Made += int64(len(made)) })
	return slices.DeleteFunc(all, func(t templated) bool { return t.Waits }), nil
}

// prune removes deployments that were made on demand and have not been used for the idle time of their template.
func (a *applier) prune(ctx context.Context) {
	var names []string
	err := a.fence.InTx(ctx, func(tx pgx.Tx) error { return tx.QueryRow(ctx, pruneSQL, pruneMax).Scan(&names) })
	a.failing.Note(ctx, a.cfg.Log, slog.LevelWarn, "remove idle deployments", "prune", err)
	if err != nil {
		return
	}
	for _, name := range names {
		a.cfg.Log.InfoContext(ctx, "removed a deployment that was made on demand", "deployment", name)
	}
	a.count(func(st *OrderStatus) { st.Pruned += int64(len(names)) })
}
