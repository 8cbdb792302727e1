package inference

import (
	"context"
	"encoding/json"

	"github.com/penstock/penstock/internal/postgres"
)

// The verbs of the schema as the tests give them. Operators have them in pkg/operator.

// SetOverride lays fields over a model for all nodes, without a restart; nil takes the override away again.
func SetOverride(ctx context.Context, db postgres.DB, name string, override json.RawMessage, by By) error {
	_, err := db.Exec(ctx, `SELECT penstock.set_model_override($1, $2, $3, $4)`, name, override, by.Reason, postgres.Given(by.Actor))
	return explained("set override of model "+name, err)
}

// DrainInstance sends an instance no new calls; those in flight end.
func DrainInstance(ctx context.Context, db postgres.DB, model, server string, by By) error {
	_, err := db.Exec(ctx, `SELECT penstock.drain_instance($1, $2, $3, $4)`, model, server, by.Reason, postgres.Given(by.Actor))
	return explained("drain instance "+server, err)
}

// RemoveInstance forgets an instance. It refuses with invalidation.ErrState while slots of it are held, unless forced.
func RemoveInstance(ctx context.Context, db postgres.DB, model, server string, force bool, by By) error {
	_, err := db.Exec(ctx, `SELECT penstock.remove_instance($1, $2, $3, $4, $5)`, model, server, force, by.Reason, postgres.Given(by.Actor))
	return explained("remove instance "+server, err)
}
