package inference

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/worker"
)

// By is the actor of a change and its reason, for the audit.
type By = invalidation.By

// RegisterModel makes a model known, or replaces the model of that name, and returns its queue. It
// checks the model first; the error then wraps a *FieldError.
func RegisterModel(ctx context.Context, db postgres.DB, m worker.Model, by By) (queue string, err error) {
	text, err := json.Marshal(m)
	if err != nil {
		return "", fmt.Errorf("register model %q: %w", m.Name, err)
	}
	if _, err := worker.ReadModel(m.Name, text, nil); err != nil {
		return "", err
	}
	err = db.QueryRow(ctx, `SELECT penstock.register_model($1, $2, $3, $4)`, m.Name, text, by.Reason,
		postgres.Given(by.Actor)).Scan(&queue)
	return queue, explained("register model "+m.Name, err)
}

// RegisterInstance makes an endpoint of a model known under the name of its server, or changes it,
// and returns its id. The model's queue and limits follow. It ends a drain and a quarantine.
func RegisterInstance(ctx context.Context, db postgres.DB, model, server, endpoint string, slots int,
	labels map[string]string, by By,
) (id int32, err error) {
	if err := worker.CheckEndpoint(endpoint); err != nil {
		return 0, fmt.Errorf("register instance %s of model %q: %w", server, model, err)
	}
	if labels == nil {
		labels = map[string]string{}
	}
	err = db.QueryRow(ctx, `SELECT penstock.register_instance($1, $2, $3, $4, $5, $6, $7)`,
		model, server, endpoint, slots, labels, by.Reason, postgres.Given(by.Actor)).Scan(&id)
	return id, explained("register instance "+server, err)
}

// explained gives the schema's own errors the sentinels that callers know.
func explained(what string, err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("%s: %w", what, invalidation.Translate(err))
}
