package web

import (
	"context"
	"fmt"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
)

// lasts is the field for the end of a pause.
var lasts = field{
	Name: "for", Label: "For", Kind: "text",
	Hint: "30m, 2h or 1h30m, after which it ends by itself; empty: until it is resumed",
}

// endOf returns the end of a pause that a form asks for; zero: it has none.
func (d *Dashboard) endOf(ctx context.Context, in form) (time.Time, error) {
	lasts, err := in.OptionalDuration("for")
	if err != nil {
		return time.Time{}, err
	}
	return d.change.At(ctx, operator.Moment{In: lasts})
}

// named returns a verb of operators for one object that pkg/operator does by its name.
func (d *Dashboard) named(v operator.Verb, effect, done string, fields ...field) verb {
	return verb{
		name: string(v), title: capital(v.String()), role: operatorRole, objects: []string{"name"}, fields: fields,
		effect: effect,
		do: func(ctx context.Context, in form, by invalidation.By) (string, error) {
			until, err := d.endOf(ctx, in)
			if err != nil {
				return "", err
			}
			return d.do(ctx, v, in.Get("name"), by, until, fmt.Sprintf(done, in.Get("name")))
		},
	}
}

// do applies a verb of pkg/operator, and returns the text about what is done.
func (d *Dashboard) do(ctx context.Context, v operator.Verb, thing any, by invalidation.By, until time.Time,
	done string,
) (string, error) {
	replaced, err := d.change.Do(ctx, v, thing, by, until)
	return done + replacing(replaced), err
}

// replacing is the sentence about the pause that another one has replaced, with a space before it; empty: there was
// none.
func replacing(r *operator.Replaced) string {
	if r == nil {
		return ""
	}
	return " This replaced " + r.String() + "."
}

func (d *Dashboard) queueVerbs() {
	pause := d.named(operator.PauseQueue,
		"Nodes claim nothing more from the queue, within one heartbeat. Runs go on to their end, and pushes "+
			"are accepted.",
		"Queue %s is paused.", lasts)
	pause.preview = d.previewQueue
	resume := d.named(operator.ResumeQueue, "Nodes claim from the queue again.",
		"Queue %s is resumed.")
	resume.preview = d.previewQueue
	disable := d.named(operator.DisableQueue,
		"The queue is out of service until it is enabled: it accepts entries, and none is run.", "Queue %s "+
			"is disabled.")
	disable.preview = d.previewQueue
	enable := d.named(operator.EnableQueue, "The queue is back in service.",
		"Queue %s is enabled.")
	enable.preview = d.previewQueue
	for _, v := range []verb{pause, resume, disable, enable} {
		d.verb(v)
	}
}

// previewQueue counts the entries that a change of a whole queue is about.
func (d *Dashboard) previewQueue(ctx context.Context, in form) (preview, error) {
	found, err := d.db.Queues(ctx, in.Get("name"))
	if err != nil {
		return preview{}, err
	}
	if len(found) == 0 {
		return preview{}, fmt.Errorf("queue %q: %w", in.Get("name"), invalidation.ErrQueueNotFound)
	}
	q := found[0]
	p := preview{Facts: []fact{
		{"waiting", countOf(q.AwaitingCompute, q.Estimated)},
		{"computing", countOf(q.Computing, false)},
		{"nodes that serve it", countOf(int64(q.Serving), false)},
	}}
	if q.Paused {
		p.Warning = "It is paused by " + q.PausedBy
		if q.PausedReason != "" {
			p.Warning += ": " + q.PausedReason
		}
	}
	return p, nil
}
