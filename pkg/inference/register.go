package inference

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// By says who changes something and why, for the audit.
type By struct{ Actor, Reason string }

func (b By) actor() *string {
	if b.Actor == "" {
		return nil
	}
	return &b.Actor
}

// RegisterModel makes a model known, or replaces what was registered under its name, and returns its queue. It checks
// the model first; the error then wraps a *FieldError.
func RegisterModel(ctx context.Context, db postgres.DB, m Model, by By) (queue string, err error) {
	text, err := json.Marshal(m)
	if err != nil {
		return "", fmt.Errorf("register model %q: %w", m.Name, err)
	}
	if _, err := ReadModel(m.Name, text, nil); err != nil {
		return "", err
	}
	err = db.QueryRow(ctx, `SELECT penstock.register_model($1, $2, $3, $4)`, m.Name, text, by.Reason, by.actor()).Scan(&queue)
	return queue, explained("register model "+m.Name, err)
}

// SetOverride lays fields over a model for all nodes, without a restart; nil takes the override away again. The model
// that results is checked first.
func SetOverride(ctx context.Context, db postgres.DB, name string, override json.RawMessage, by By) error {
	if override != nil {
		var config []byte
		err := db.QueryRow(ctx, `SELECT coalesce((SELECT config FROM penstock.model WHERE name = $1), '{}')`, name).Scan(&config)
		if err != nil {
			return fmt.Errorf("read model %q: %w", name, err)
		}
		if _, err := ReadModel(name, config, override); err != nil && string(config) != "{}" {
			return err
		}
	}
	_, err := db.Exec(ctx, `SELECT penstock.set_model_override($1, $2, $3, $4)`, name, override, by.Reason, by.actor())
	return explained("set override of model "+name, err)
}

// RegisterInstance makes an endpoint of a model known under the name of its server, or changes it, and returns its id.
// The model's queue and limits follow. It ends a drain and a quarantine.
func RegisterInstance(ctx context.Context, db postgres.DB, model, server, endpoint string, slots int, labels map[string]string, by By) (id int32, err error) {
	if _, err := parseEndpoint(endpoint); err != nil {
		return 0, fmt.Errorf("register instance %s of model %q: %w", server, model, err)
	}
	if labels == nil {
		labels = map[string]string{}
	}
	err = db.QueryRow(ctx, `SELECT penstock.register_instance($1, $2, $3, $4, $5, $6, $7)`,
		model, server, endpoint, slots, labels, by.Reason, by.actor()).Scan(&id)
	return id, explained("register instance "+server, err)
}

// DrainInstance sends an instance no new calls; those in flight end.
func DrainInstance(ctx context.Context, db postgres.DB, model, server string, by By) error {
	_, err := db.Exec(ctx, `SELECT penstock.drain_instance($1, $2, $3, $4)`, model, server, by.Reason, by.actor())
	return explained("drain instance "+server, err)
}

// RemoveInstance forgets an instance. It refuses with invalidation.ErrState while slots of it are held, unless forced.
func RemoveInstance(ctx context.Context, db postgres.DB, model, server string, force bool, by By) error {
	_, err := db.Exec(ctx, `SELECT penstock.remove_instance($1, $2, $3, $4, $5)`, model, server, force, by.Reason, by.actor())
	return explained("remove instance "+server, err)
}

const quarantineSQL = `SELECT penstock.quarantine_instance($1, $2, $3)`

func quarantine(ctx context.Context, db postgres.DB, instance int32, lasts time.Duration, reason string) error {
	_, err := db.Exec(ctx, quarantineSQL, instance, lasts, reason)
	if err != nil {
		return fmt.Errorf("quarantine instance %d: %w", instance, err)
	}
	return nil
}

// explained gives the schema's own errors the sentinels that callers know.
func explained(what string, err error) error {
	if err == nil {
		return nil
	}
	var pg *pgconn.PgError
	if errors.As(err, &pg) {
		sentinel := map[string]error{
			"PS002": invalidation.ErrInvalid, "PS006": invalidation.ErrState, "PS008": invalidation.ErrNotFound,
		}[pg.Code]
		if sentinel != nil {
			return fmt.Errorf("%s: %s. %s: %w", what, pg.Message, pg.Hint, sentinel)
		}
	}
	return fmt.Errorf("%s: %w", what, err)
}
