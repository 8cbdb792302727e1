package api

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"

	"github.com/danielgtaylor/huma/v2"

	"github.com/penstock/penstock/pkg/operator"
)

func (a *API) batchRoutes() {
	const one = "/v1/batches/{id}"
	add(a, route{
		method: "GET", path: "/v1/batches", id: "list-batches", summary: "Batches with their progress, newest first",
		scope: read, of: ofQueue,
	}, a.listBatches)
	a.raw(route{
		method: "POST", path: "/v1/queues/{queue}/batches", id: "create-batch",
		summary: "Split a set into parts that this queue runs",
		scope:   operate, of: ofQueue, status: http.StatusCreated, bytesMax: a.cfg.BodyBytesMax,
	}, a.describeBatch, a.createBatch)
	add(a, route{
		method: "GET", path: one, id: "show-batch", summary: "One batch with its progress and result",
		scope: read, of: ofBatch,
	}, func(ctx context.Context, in *InID) (*answer[operator.Batch], error) {
		return answered(a.operator.Batch(ctx, in.ID))
	})
	pauseVerb[idPause](a, operator.PauseBatch, route{
		path: one + "/pause", id: "pause-batch", summary: "Pause a batch: its waiting parts leave the queue",
		scope: operate, of: ofBatch,
	})
	verb[idVerb](a, operator.ResumeBatch, route{
		path: one + "/resume", id: "resume-batch", summary: "Resume a batch",
		scope: operate, of: ofBatch,
	})
	verb[idVerb](a, operator.CancelBatch, route{
		path: one + "/cancel", id: "cancel-batch", summary: "End a batch; parts that run are asked to end",
		scope: operate, of: ofBatch,
	})
	verb[idVerb](a, operator.RetryBatch, route{
		path: one + "/retry", id: "retry-batch", summary: "Retry the parts of a batch that did not end as done",
		scope: operate, of: ofBatch,
	})
}

type batchFilter struct {
	Paging
	OfOneQueue
}

func (a *API) listBatches(ctx context.Context, in *batchFilter) (*answer[list[operator.Batch]], error) {
	return paged(in.Paging, func(before int64, limit int) ([]operator.Batch, error) {
		return a.operator.Batches(ctx, operator.BatchFilter{Queue: in.Queue, Before: before, Limit: limit})
	}, func(b operator.Batch) int64 { return b.ID })
}

type batchCreation struct {
	ReasonBody
	Name    string       `json:"name" minLength:"1" maxLength:"200"`
	Options batchOptions `json:"options"`
}

// batchOptions are not read here beyond their names: the items may be many.
type batchOptions struct {
	Items           json.RawMessage `json:"items,omitempty" doc:"The set: a list of any JSON values. Give items or query."`
	Query           json.RawMessage `json:"query,omitempty" doc:"A SELECT whose rows are the set. It needs scope admin without limits."`
	PartSize        json.RawMessage `json:"part_size,omitempty" doc:"Items of a part."`
	WindowParts     json.RawMessage `json:"window_parts,omitempty" doc:"Parts that are queued at once."`
	Detail          json.RawMessage `json:"detail,omitempty" doc:"Given to each part."`
	Flow            json.RawMessage `json:"flow,omitempty" doc:"Of the parts."`
	Priority        json.RawMessage `json:"priority,omitempty" doc:"Of the parts, 0 to 9."`
	CompletionQueue json.RawMessage `json:"completion_queue,omitempty" doc:"A queue that gets an entry at the end. It needs scope push, too."`
}

func (o *batchOptions) members() []member {
	return []member{
		{"items", &o.Items},
		{"query", &o.Query},
		{"part_size", &o.PartSize},
		{"window_parts", &o.WindowParts},
		{"detail", &o.Detail},
		{"flow", &o.Flow},
		{"priority", &o.Priority},
		{"completion_queue", &o.CompletionQueue},
	}
}

// given are the options that the body has.
func (o *batchOptions) given() map[string]any {
	options := map[string]any{}
	for _, m := range o.members() {
		if text, ok := m.into.(*json.RawMessage); ok && *text != nil {
			options[m.name] = *text
		}
	}
	return options
}

func (a *API) describeBatch(op *huma.Operation) {
	op.RequestBody = a.bodyOf(batchCreation{})
	op.Parameters = append(op.Parameters, queueParameter())
	op.Responses["201"] = &huma.Response{Description: "Created", Content: jsonOf(a.schema(created{}))}
}

// errNotRepeatable refuses a key which would promise that the same request, sent again, makes no second batch.
var errNotRepeatable = fmt.Errorf("%w: this address takes no Idempotency-Key: where the answer was lost, look for the "+
	"batch by its name in GET /v1/batches before it is created again", errInvalid)

// createBatch accepts a query from admins alone, since it is SQL, and a completion queue from callers that may
// push to it.
func (a *API) createBatch(w http.ResponseWriter, r *http.Request) error {
	if r.Header.Get("Idempotency-Key") != "" {
		return errNotRepeatable
	}
	var in batchCreation
	var text json.RawMessage
	give, err := a.readMembers(w, r, []member{{"reason", &in.Reason}, {"name", &in.Name}, {"options", &text}})
	defer give()
	if err != nil {
		return err
	}
	if err := cmp.Or(lengthOf("reason", in.Reason, 1, 1000), lengthOf("name", in.Name, 1, 200)); err != nil {
		return err
	}
	if text == nil {
		return flaw("options", errMissing)
	}
	if err := decodeWhole(text, in.Options.members()); err != nil {
		return flaw("options", err)
	}
	if err := cmp.Or(checkNumbers("options.items", in.Options.Items),
		checkNumbers("options.detail", in.Options.Detail)); err != nil {
		return err
	}
	ctx := r.Context()
	if err := a.mayCreate(ctx, in.Options); err != nil {
		return err
	}
	id, err := a.operator.CreateBatch(ctx, in.Name, r.PathValue("queue"), in.Options.given(), in.by(ctx))
	if err != nil {
		return err
	}
	writeJSON(w, "application/json", http.StatusCreated, created{id})
	return nil
}

// mayCreate tells whether the caller may use the options of a batch that reach beyond its queue.
func (a *API) mayCreate(ctx context.Context, o batchOptions) error {
	c := callerOf(ctx)
	if o.Query != nil && (!c.may(admin) || c.limited()) {
		return fmt.Errorf("%w: a query needs scope admin, without limits", errForbidden)
	}
	if o.CompletionQueue == nil {
		return nil
	}
	var other string
	if err := json.Unmarshal(o.CompletionQueue, &other); err != nil {
		return flaw("options.completion_queue", errors.New("want a text"))
	}
	if !c.may(push) {
		return fmt.Errorf("%w: a completion_queue needs scope push, for it gets an entry", errForbidden)
	}
	if c.limited() {
		return a.allowed(ctx, ofQueue, other, c)
	}
	return nil
}

// created names what was made.
type created struct {
	ID int64 `json:"id"`
}
