package main

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
	"github.com/penstock/penstock/pkg/scale/backend"
)

// scaledModel is the model of which the autoscaler starts and stops workers: one, and up to three under load.
const (
	scaledModel      = "faces"
	scaledDeployment = "faces-local"
)

// localInstances says where the leader keeps the workers that it starts, and what it may start.
func (p *platform) localInstances(o devOptions) (dir, commands string, err error) {
	worker, err := beside("worker")
	if err != nil {
		return "", "", err
	}
	text, err := json.Marshal(map[string]backend.LocalCommand{scaledModel: {
		Command: []string{
			worker, "serve", "--listen", "127.0.0.1:${PORT}", "--slots", fmt.Sprint(o.slots), "--models", scaledModel,
		},
		Endpoint: "http://127.0.0.1:${PORT}/" + scaledModel, Slots: o.slots,
	}})
	if err != nil {
		return "", "", fmt.Errorf("write local commands: %w", err)
	}
	dir, commands = filepath.Join(p.logs, "instances"), filepath.Join(p.logs, "commands.json")
	if err := os.WriteFile(commands, text, 0o600); err != nil {
		return "", "", fmt.Errorf("write local commands: %w", err)
	}
	return dir, commands, nil
}

// deploy makes the deployment of the scaled model. Its times are short, so that a first batch shows what happens.
func (p *platform) deploy(ctx context.Context, o devOptions) error {
	options := map[string]any{
		"backend": "local", "target": map[string]any{"command": scaledModel},
		"policy": map[string]any{
			"min": 1, "max": 3, "slots": o.slots, "slo_seconds": 1, "drain_seconds": 1, "hold_seconds": 10,
		},
	}
	return operator.New(p.pool).SetDeployment(ctx, scaledDeployment, scaledModel, options,
		invalidation.By{Actor: "penstock dev", Reason: "first start"})
}

// stopInstances ends the workers that the leader started: they outlive it.
func (p *platform) stopInstances(ctx context.Context) error {
	local, err := backend.NewLocal(backend.LocalConfig{
		Dir: filepath.Join(p.logs, "instances"), Grace: 5 * time.Second,
	})
	if err != nil {
		return err
	}
	return local.StopAll(ctx)
}

const decisionsAfterSQL = `
SELECT at, why FROM penstock.scale_decision WHERE model = $1 AND at > $2 ORDER BY at`

// explainScaling prints each decision that changed the number of workers, until ctx ends.
func (p *platform) explainScaling(ctx context.Context) {
	var last time.Time
	for ticks := time.NewTicker(300 * time.Millisecond); ; {
		var why string
		_, err := pgx.ForEachRow(postgres.Query(ctx, p.pool, decisionsAfterSQL, scaledModel, last), []any{&last, &why},
			func() error {
				_, err := fmt.Fprintf(p.out, "%s %s %s\n", last.Local().Format(time.TimeOnly), scaledModel, why)
				return err
			})
		if err != nil && ctx.Err() == nil {
			fmt.Fprintln(p.out, "cannot read decisions of the autoscaler:", err)
		}
		select {
		case <-ctx.Done():
			ticks.Stop()
			return
		case <-ticks.C:
		}
	}
}
