package api

import (
	"context"
	"fmt"
	"net/http"
	"slices"
	"time"

	"github.com/penstock/penstock/pkg/operator"
)

// InQueue is the input of requests about one queue.
type InQueue struct {
	Queue string `path:"queue" maxLength:"48"`
}

// OfOneQueue narrows a list to a queue. A token that is limited must give it.
type OfOneQueue struct {
	Queue string `query:"queue" maxLength:"48"`
}

func (a *API) queueRoutes() {
	const one = "/v1/queues/{queue}"
	add(a, route{
		method: "GET", path: "/v1/queues", id: "list-queues",
		summary: "State of each queue: entries by state, age of the first, rates",
		scope:   read,
	}, a.listQueues)
	change(a, route{
		path: "/v1/queues", status: http.StatusCreated, id: "create-queue", summary: "Make a queue",
		scope: admin, of: ofPlatform,
	}, a.createQueue)
	add(a, route{
		method: "GET", path: one, id: "show-queue", summary: "One queue with its settings, lanes and limits",
		scope: read, of: ofQueue,
	}, a.showQueue)
	change(a, route{
		method: "PATCH", path: one, id: "alter-queue", summary: "Change settings of a queue",
		scope: admin, of: ofQueue,
	}, a.alterQueue)
	change(a, route{
		method: "DELETE", path: one, id: "drop-queue", summary: "Remove a queue",
		scope: admin, of: ofQueue,
	}, a.dropQueue)
	add(a, route{
		method: "GET", path: one + "/lanes", id: "list-lanes",
		summary: "Lanes with work, the longest waiting first, at most 200",
		scope:   read, of: ofQueue,
	}, a.listLanes)
	add(a, route{
		method: "GET", path: one + "/samples", id: "list-samples", summary: "Samples of a queue's state, oldest first",
		scope: read, of: ofQueue,
	}, a.listSamples)
	pauseVerb[queuePause](a, operator.PauseQueue, route{
		path: one + "/pause", id: "pause-queue", summary: "Pause claims from a queue; runs go on",
		scope: operate, of: ofQueue,
	})
	verb[queueVerb](a, operator.ResumeQueue, route{
		path: one + "/resume", id: "resume-queue", summary: "Resume a queue",
		scope: operate, of: ofQueue,
	})
	verb[queueVerb](a, operator.DisableQueue, route{
		path: one + "/disable", id: "disable-queue", summary: "Take a queue out of service; it still accepts entries",
		scope: operate, of: ofQueue,
	})
	verb[queueVerb](a, operator.EnableQueue, route{
		path: one + "/enable", id: "enable-queue", summary: "Put a queue back into service",
		scope: operate, of: ofQueue,
	})
}

func (a *API) listQueues(ctx context.Context, in *Paging) (*answer[list[operator.Queue]], error) {
	c := callerOf(ctx)
	return pagedAllowed(c, *in, func(after string, limit int) ([]operator.Queue, error) {
		return a.operator.QueuesAfter(ctx, after, limit)
	}, func(q operator.Queue) string { return q.Name },
		func(q operator.Queue) bool { return c.allows(q.Name, q.Application) })
}

type queueCreation struct {
	Body struct {
		ReasonBody
		Name     string         `json:"name" minLength:"1" maxLength:"48"`
		Settings map[string]any `json:"settings,omitempty" doc:"As the columns of penstock.queue are named."`
	}
}

func (a *API) createQueue(ctx context.Context, in *queueCreation) error {
	return a.operator.CreateQueue(ctx, in.Body.Name, in.Body.Settings, in.Body.by(ctx))
}

func (a *API) showQueue(ctx context.Context, in *InQueue) (*tagged[operator.QueueDetail], error) {
	found, err := a.operator.Queue(ctx, in.Queue)
	return &tagged[operator.QueueDetail]{etag(found.Settings), found}, err
}

type queueAlteration struct {
	InQueue
	Conditional
	Body settingsBody
}

// tenantSettings are the settings of a queue that a limited token may change: those that stay within the
// queue. The others are quotas that were set for its owner (capacity, payload_limit, max_concurrent), decide
// what share other queues get, or are texts that the database or nodes evaluate (grouping, statements).
var tenantSettings = []string{
	"entry_priority", "algorithm", "mergeable", "merge", "retry", "crash_limit", "run_timeout", "start_within",
	"finish_within", "quantum_count", "quantum_time",
	"result_retention", "failure_retention", "lapse", "on_failure", "on_no_instance", "no_instance_timeout",
}

func (a *API) alterQueue(ctx context.Context, in *queueAlteration) error {
	for setting := range in.Body.Settings {
		if callerOf(ctx).limited() && !slices.Contains(tenantSettings, setting) {
			return fmt.Errorf("%w: it is limited, and %s of a queue concerns more than the queue", errForbidden,
				setting)
		}
	}
	return a.alter(ctx, in.Conditional, ofQueue, in.Queue,
		func(d *operator.Database) (string, error) {
			found, err := d.Queue(ctx, in.Queue)
			return etag(found.Settings), err
		},
		func(d *operator.Database) error {
			return d.AlterQueue(ctx, in.Queue, in.Body.Settings, in.Body.by(ctx))
		})
}

type queueDrop struct {
	InQueue
	ReasonQuery
	Force bool `query:"force" doc:"Also if it has entries, which are lost."`
}

func (a *API) dropQueue(ctx context.Context, in *queueDrop) error {
	a.queues.Forget(in.Queue)
	return a.operator.DropQueue(ctx, in.Queue, in.Force, in.by(ctx))
}

func (a *API) listLanes(ctx context.Context, in *InQueue) (*answer[list[operator.Lane]], error) {
	if _, err := a.queues.Get(ctx, in.Queue); err != nil {
		return nil, err
	}
	lanes, err := a.operator.Lanes(ctx, in.Queue, 200)
	return pageOf(lanes, Paging{Limit: 200}, nil), err
}

type samplesOver struct {
	InQueue
	Minutes int `query:"minutes" minimum:"1" maximum:"43200" default:"60" doc:"How far back. Up to 60 as it was sampled, about every five seconds; beyond by the minute."`
}

func (a *API) listSamples(ctx context.Context, in *samplesOver) (*answer[list[operator.Sample]], error) {
	samples, err := a.operator.Samples(ctx, in.Queue, time.Duration(in.Minutes)*time.Minute)
	return pageOf(samples, Paging{Limit: len(samples)}, nil), err
}
