package invalidation

import (
	"context"
	"encoding/json"

	"github.com/penstock/penstock/internal/postgres"
)

// The verbs of operators as psql has them, for tests of what they do to the life of an entry.

// limitOptions are those of penstock.set_limit.
type limitOptions struct {
	MaxUnits *int    `json:"max_units,omitempty"`
	Rate     float64 `json:"rate,omitempty"`
	Burst    float64 `json:"burst,omitempty"`
	PerFlow  bool    `json:"per_flow,omitempty"`
	PerKey   bool    `json:"per_key,omitempty"`
}

func setLimit(ctx context.Context, db postgres.DB, name string, l limitOptions) error {
	return control(ctx, db, "set limit", `SELECT penstock.set_limit($1, $2)`, name, l)
}

func useLimit(ctx context.Context, db postgres.DB, queue, limit string, units int) error {
	return control(ctx, db, "use limit", `SELECT penstock.use_limit($1, $2, $3)`, queue, limit, units)
}

const (
	cancelDone      = "cancelled"
	cancelRequested = "requested"
)

func cancelEntry(ctx context.Context, db postgres.DB, id EntryID, by By) (answer string, err error) {
	err = db.QueryRow(ctx, `SELECT penstock.cancel_entry($1, $2, $3)`, id, by.Reason, by.Actor).Scan(&answer)
	return answer, withDuty(err)
}

func disableEntry(ctx context.Context, db postgres.DB, id EntryID, by By) error {
	return control(ctx, db, "disable entry", `SELECT penstock.disable_entry($1, $2, $3)`, id, by.Reason, by.Actor)
}

func enableEntry(ctx context.Context, db postgres.DB, id EntryID, by By) error {
	return control(ctx, db, "enable entry", `SELECT penstock.enable_entry($1, $2, $3)`, id, by.Reason, by.Actor)
}

// explanation is as much of penstock.explain_entry's answer as the tests of claims look at.
type explanation struct {
	State   string
	Reasons []struct{ Code, Text string }
}

func explain(ctx context.Context, db postgres.DB, id EntryID) (e explanation, err error) {
	var text []byte
	if err := db.QueryRow(ctx, `SELECT penstock.explain_entry($1)`, id).Scan(&text); err != nil {
		return e, withDuty(err)
	}
	return e, json.Unmarshal(text, &e)
}
