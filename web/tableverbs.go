package web

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
)

func (d *Dashboard) pauseVerbs() {
	d.verb(verb{
		name: "pause", title: "Pause", role: operatorRole,
		effect: "Claims of what is named stop within one heartbeat. Runs go on to their end. Names, lock " +
			"keys and flows need their queue.",
		fields: []field{
			{
				Name: "scope", Label: "What", Kind: "select",
				Choices: operator.Scopes(),
			},
			{Name: "value", Label: "Its name", Kind: "text", Required: true},
			{
				Name: "queue", Label: "Queue", Kind: "text",
				Hint: "of a name or lock key; of a flow, empty: in all queues",
			},
			lasts,
		},
		do: func(ctx context.Context, in form, by invalidation.By) (string, error) {
			until, err := d.endOf(ctx, in)
			if err != nil {
				return "", err
			}
			s := in.Subject()
			replaced, err := d.change.Pause(ctx, s, by, until)
			return fmt.Sprintf("%s is paused.", capital(s.String())) + replacing(replaced), err
		},
		next: func(form) string { return "pauses" },
	})
	d.verb(verb{
		name: "resume", title: "Resume", role: operatorRole, objects: []string{
			"scope", "value",
			"queue",
		}, optional: []string{"queue", "value"},
		effect: "Nodes claim it again, within one heartbeat.",
		do: func(ctx context.Context, in form, by invalidation.By) (string, error) {
			s := in.Subject()
			return fmt.Sprintf("%s is resumed.", capital(s.String())), d.change.Resume(ctx, s, by)
		},
	})
}

func (d *Dashboard) limitVerbs() {
	d.verb(verb{
		name: "set_limit", title: "Set limit", role: administrator,
		effect: "Makes the limit, or changes it. Locks that exist are kept: a lower limit is reached as " +
			"they end.",
		fields: []field{
			{Name: "name", Label: "Name", Kind: "text", Required: true},
			{
				Name: "max_units", Label: "Units in use at once", Kind: "number",
				Hint: "empty: no bound, or as it is",
			},
			{Name: "rate", Label: "Units a second", Kind: "number", Hint: "empty: no bound, or as it is"},
			{
				Name: "burst", Label: "Units that may be saved up", Kind: "number",
				Hint: "empty: a second's worth",
			},
			{
				Name: "scope", Label: "Counted", Kind: "select",
				Choices: []string{"as it is", "over all flows", "for each flow", "for each lock key"},
			},
		},
		do: func(ctx context.Context, in form, by invalidation.By) (string, error) {
			options := map[string]any{}
			for _, name := range []string{"max_units", "rate", "burst"} {
				if in.Get(name) == "" {
					continue
				}
				n, err := in.Float(name)
				if err != nil {
					return "", err
				}
				options[name] = n
			}
			switch in.Get("scope") {
			case "over all flows":
				options["per_flow"], options["per_key"] = false, false
			case "for each flow":
				options["per_flow"] = true
			case "for each lock key":
				options["per_key"] = true
			}
			return fmt.Sprintf("Limit %s is set.", in.Get("name")), d.change.SetLimit(ctx, in.Get("name"),
				options, by)
		},
		next: func(form) string { return "limits" },
	})
	d.verb(verb{
		name: "use_limit", title: "Apply limit to queue", role: administrator, objects: []string{"limit"},
		effect: "Each lock of the queue takes this many units of the limit. 0 units take the queue from " +
			"under it.",
		fields: []field{
			{Name: "queue", Label: "Queue", Kind: "text", Required: true},
			{Name: "units", Label: "Units a lock", Kind: "number", Value: "1", Required: true},
		},
		do: func(ctx context.Context, in form, by invalidation.By) (string, error) {
			units, err := in.Number("units", 0, math.MaxInt32)
			if err != nil {
				return "", err
			}
			done := fmt.Sprintf("Queue %s uses limit %s.", in.Get("queue"), in.Get("limit"))
			if units == 0 {
				done = fmt.Sprintf("Queue %s does not use limit %s any more.", in.Get("queue"), in.Get("limit"))
			}
			return done, d.change.UseLimit(ctx, in.Get("queue"), in.Get("limit"), int(units), by)
		},
		next: func(form) string { return "limits" },
	})
}

func (d *Dashboard) tokenVerbs() {
	d.verb(verb{
		name: "create_token", title: "Create token", role: administrator, reveals: "token",
		effect: "The secret is displayed once. It allows what its scopes allow until it expires.",
		fields: []field{
			{
				Name: "name", Label: "Name", Kind: "text", Required: true,
				Hint: "the actor in the audit: a person or a program",
			},
			{
				Name: "scopes", Label: "Scopes", Kind: "select",
				Choices: []string{"read", "push", "read push", "operate", "admin"},
			},
			{
				Name: "queues", Label: "Queues", Kind: "text",
				Hint: "to which it is limited; empty: to none. A limited token cannot log in here.",
			},
			{
				Name: "days", Label: "Days", Kind: "number", Value: "365", Required: true,
				Hint: "after which it ends",
			},
		},
		do: func(ctx context.Context, in form, by invalidation.By) (string, error) {
			days, err := in.Number("days", 1, 3650)
			if err != nil {
				return "", err
			}
			return d.change.CreateToken(ctx, operator.Grant{
				Name: in.Get("name"), Scopes: words(in.Get("scopes")), Queues: words(in.Get("queues")),
				Lifetime: time.Duration(days) * 24 * time.Hour,
			}, by)
		},
		next: func(form) string { return "tokens" },
	})
	d.verb(verb{
		name: "rotate_token", title: "Rotate token", role: administrator, objects: []string{"name"},
		reveals: "token",
		effect:  "Makes another secret with the same rights. The old one ends after the overlap.",
		fields: []field{{
			Name: "overlap", Label: "Overlap", Kind: "text", Value: "24h", Required: true,
			Hint: "such as 1h or 24h",
		}},
		do: func(ctx context.Context, in form, by invalidation.By) (string, error) {
			overlap, err := in.Duration("overlap", 0)
			if err != nil {
				return "", err
			}
			return d.change.RotateToken(ctx, in.Get("name"), overlap, time.Time{}, by)
		},
	})
	d.verb(verb{
		name: "revoke_token", title: "Revoke token", role: administrator, objects: []string{"name"},
		destroys: true,
		effect:   "Every secret of this name ends now. Leaders accept it for five seconds more.",
		do: func(ctx context.Context, in form, by invalidation.By) (string, error) {
			return fmt.Sprintf("Token %s is revoked.", in.Get("name")), d.change.RevokeToken(ctx,
				in.Get("name"), by)
		},
	})
}

// webhookVerbs are there where the program can change the endpoints of callbacks.
func (d *Dashboard) webhookVerbs() {
	if d.cfg.DisableWebhook == nil {
		return
	}
	d.verb(verb{
		name: "disable_webhook", title: "Disable webhook", role: administrator, objects: []string{"url"},
		effect: "Callbacks to this address end as failures, until it is registered again: penstock " +
			"webhook register.",
		do: func(ctx context.Context, in form, by invalidation.By) (string, error) {
			return "The webhook is disabled.", d.cfg.DisableWebhook(ctx, in.Get("url"), by)
		},
	})
}

// alterable are the settings that the form of a queue offers, with the sorts of their values.
var alterable = []struct{ name, kind, hint string }{
	{"priority", "number", "weight between queues; 2 is served twice as much as 1"},
	{"max_concurrent", "number", "locks at once; none: write null"},
	{"max_concurrent_per_node", "number", ""},
	{"max_concurrent_per_name", "number", "entries of one name at once; for those that are pushed later"},
	{"max_weight", "number", "the largest weight of entries, 1 to 1000; a weight is times the units of each limit"},
	{"shards", "number", "flows over which entries without one are spread; for those that are pushed later"},
	{"capacity", "number", "entries that have not ended; more pushes are refused"},
	{"capacity_per_flow", "number", "entries of one flow that have not ended"},
	{"capacity_per_slot", "number", "entries for each slot of the model"},
	{"on_no_instance", "text", "wait or fail, while no instance of the model takes calls"},
	{"no_instance_timeout", "text", "such as 1 minute: for how long, before waiting entries fail"},
	{"run_timeout", "text", "such as 5 minutes"},
	{"start_within", "text", "such as 1 hour: entries that have not started by then expire"},
	{"finish_within", "text", "such as 2 hours: entries that have not finished by then expire"},
	{"on_failure", "text", "continue, or block_key: later entries of a lock key wait until it is unblocked"},
	{"crash_limit", "number", "crashes of nodes after which an entry fails"},
	{"result_retention", "text", "such as 1 day"},
	{"failure_retention", "text", "such as 30 days"},
	{"retry", "textarea", "JSON"},
}

func (d *Dashboard) alterVerb() {
	fields := make([]field, len(alterable))
	for i, a := range alterable {
		kind := a.kind
		if kind == "number" {
			kind = "text" // which takes null
		}
		fields[i] = field{Name: a.name, Label: strings.ReplaceAll(a.name, "_", " "), Kind: kind, Hint: a.hint}
	}
	d.verb(verb{
		name: "alter_queue", title: "Change settings", role: administrator, objects: []string{"name"},
		fields: fields,
		effect: "Only fields that are filled in are changed; null resets a setting. Nodes read them again " +
			"within a heartbeat.",
		preview: d.previewSettings,
		do: func(ctx context.Context, in form, by invalidation.By) (string, error) {
			options := map[string]any{}
			for _, a := range alterable {
				text := in.Get(a.name)
				switch {
				case text == "":
				case text == "null":
					options[a.name] = nil
				case a.kind == "number":
					n, err := in.Float(a.name)
					if err != nil {
						return "", err
					}
					options[a.name] = n
				case a.kind == "textarea":
					var v map[string]any
					if err := json.Unmarshal([]byte(text), &v); err != nil {
						return "", fmt.Errorf("%s is no JSON object: %w", a.name, invalidation.ErrInvalid)
					}
					options[a.name] = v
				default:
					options[a.name] = text
				}
			}
			if len(options) == 0 {
				return "", fmt.Errorf("no setting is filled in: %w", invalidation.ErrInvalid)
			}
			return fmt.Sprintf("Settings of queue %s are changed.", in.Get("name")), d.change.AlterQueue(ctx,
				in.Get("name"), options, by)
		},
	})
}

// previewSettings lists the present values of the settings that the form offers.
func (d *Dashboard) previewSettings(ctx context.Context, in form) (preview, error) {
	settings, _, err := d.db.QueueSettings(ctx, in.Get("name"))
	if err != nil {
		return preview{}, err
	}
	facts := settingsOf(settings)
	return preview{Facts: slices.DeleteFunc(facts, func(f fact) bool {
		for _, a := range alterable {
			if strings.ReplaceAll(a.name, "_", " ") == f.Label {
				return false
			}
		}
		return true
	})}, nil
}
