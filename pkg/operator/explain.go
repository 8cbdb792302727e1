package operator

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/penstock/penstock/pkg/invalidation"
)

// Explanation is the state of an entry and the reasons why it does not run. Without a reason it is
// next.
type Explanation struct {
	ID      int64    `json:"id"`
	Queue   string   `json:"queue"`
	State   string   `json:"state"` // initial, pending, disabled, computing, or an outcome
	Reasons []Reason `json:"reasons"`
}

// Reason is one condition of the claim that does not hold, or the entries before it.
type Reason struct {
	// Code is one of paused, queue_disabled, limit, node_limit, no_node, nodes_paused, disabled, not_due,
	// promotion_late, cron_paused, expired, cancel_requested, throttled, delayed, rate, no_thread,
	// no_resources, no_instance, no_slot, handed_back, running, key_held, key_pushed, key_blocked, ahead_in_key,
	// ahead_in_lane, ended.
	Code    string         `json:"code"`
	Text    string         `json:"text"`    // a sentence for operators
	Numbers map[string]any `json:"numbers"` // those in the text
}

// Explain evaluates the conditions of the claim for one entry, all at one moment.
// It returns invalidation.ErrEntryNotFound if there is no such entry and no outcome of it is kept.
func (d *Database) Explain(ctx context.Context, id int64) (Explanation, error) {
	var text []byte
	if err := d.db.QueryRow(ctx, `SELECT penstock.explain_entry($1)`, id).Scan(&text); err != nil {
		return Explanation{}, fmt.Errorf("explain entry %d: %w", id, invalidation.Translate(err))
	}
	var e Explanation
	if err := json.Unmarshal(text, &e); err != nil {
		return Explanation{}, fmt.Errorf("read explanation of entry %d: %w", id, err)
	}
	return e, nil
}
