package web

import (
	"context"
	"fmt"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
)

// numbered returns a verb of operators for one object that pkg/operator does by its id.
func (d *Dashboard) numbered(v operator.Verb, effect, done string) verb {
	return verb{
		name: string(v), title: capital(v.String()), role: operatorRole, objects: []string{"id"},
		effect: effect,
		do: func(ctx context.Context, in form, by invalidation.By) (string, error) {
			id, err := in.ID("id")
			if err != nil {
				return "", err
			}
			return d.do(ctx, v, id, by, time.Time{}, fmt.Sprintf(done, id))
		},
	}
}

func (d *Dashboard) entryVerbs() {
	for _, v := range []verb{
		d.numbered(operator.DisableEntry, "The entry is not claimed until it is enabled. A run goes on to "+
			"its end.",
			"Entry %d is disabled."),
		d.numbered(operator.EnableEntry, "The entry goes back to its position.", "Entry %d is enabled."),
	} {
		v.preview = d.previewEntry
		d.verb(v)
	}
	retry := d.numbered(operator.RetryFailure,
		"The entry goes back into its queue under the same id, with no attempt spent.", "Entry %d is in its "+
			"queue again.")
	retry.next = func(in form) string { return "entries/" + in.Get("id") }
	discard := d.numbered(operator.DiscardFailure, "The failure is deleted. Only the audit keeps a record.",
		"The failure of entry %d is deleted.")
	discard.destroys, discard.next = true, func(form) string { return "failures" }
	d.verb(retry)
	d.verb(discard)
	d.verb(verb{
		name: "cancel_entry", title: "Cancel entry", role: operatorRole, objects: []string{"id"},
		destroys: true,
		effect:   "The entry ends as cancelled. If a node runs it, the node is asked to stop the run.",
		preview:  d.previewEntry,
		do: func(ctx context.Context, in form, by invalidation.By) (string, error) {
			id, err := in.ID("id")
			if err != nil {
				return "", err
			}
			result, err := d.change.CancelEntry(ctx, id, by)
			if result == operator.CancelRequested {
				return fmt.Sprintf("The node that runs entry %d is asked to cancel it.", id), err
			}
			return fmt.Sprintf("Entry %d is cancelled.", id), err
		},
	})
}

// previewEntry tells the state of the entry that a change is about.
func (d *Dashboard) previewEntry(ctx context.Context, in form) (preview, error) {
	id, err := in.ID("id")
	if err != nil {
		return preview{}, err
	}
	e, err := d.db.Entry(ctx, id)
	if err != nil {
		return preview{}, err
	}
	return preview{Facts: []fact{{"queue", e.Queue}, {"state", e.State}}}, nil
}
