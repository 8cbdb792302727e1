package web

import (
	"context"
	"encoding/json"
	"fmt"
	"html/template"
	"slices"
	"strings"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
	"github.com/penstock/penstock/web/format"
	"github.com/penstock/penstock/web/picture"
)

const batchRows = 25

// batchesView is the newest batches and bulk operations.
type batchesView struct {
	Queue         string
	Batches       []batchRow
	Operations    []operationRow
	BeforeBatch   int64 // 0: there are no older ones
	BeforeOperate int64
}

// batchRow is a batch with its progress.
type batchRow struct {
	operator.Batch
	Bar   template.HTML
	Open  bool
	Again bool // its parts that are not done, or its completion alone, can be run again
}

// operationRow is a bulk operation with its progress.
type operationRow struct {
	operator.Operation
	Filtered string // the filter as JSON
	Bar      template.HTML
}

func (d *Dashboard) batchPages() {
	d.page(page{
		path: "operations", nav: "Batches", section: "Work", title: "Batches and operations", template: "batches",
		live: true, read: d.batches,
	})
	for _, v := range []struct {
		verb                operator.Verb
		title, effect, done string
		destroys            bool
		preview             func(context.Context, form) (preview, error)
	}{
		{
			operator.PauseBatch, "Pause batch", "No further part goes into the queue, and parts that do not run are " +
				"taken out of it. Parts that run go on.", "is paused", false, d.batchPreview,
		},
		{operator.ResumeBatch, "Resume batch", "Parts go into the queue again.", "goes on", false, d.batchPreview},
		{
			operator.CancelBatch, "Cancel batch", "Parts that do not run are cancelled, and the nodes are asked to " +
				"cancel those that run. Parts that are done stay done.", "is being cancelled", true, d.batchPreview,
		},
		{
			operator.RetryBatch, "Retry batch", "Runs the parts again that are not done, and then the completion of " +
				"the batch.", "runs again", false, d.batchRetryPreview,
		},
	} {
		d.verb(verb{
			name: string(v.verb), title: v.title, role: operatorRole, destroys: v.destroys, objects: []string{"batch"},
			effect: v.effect, preview: v.preview,
			do: func(ctx context.Context, in form, by invalidation.By) (string, error) {
				id, err := in.ID("batch")
				if err != nil {
					return "", err
				}
				return d.do(ctx, v.verb, id, by, time.Time{}, fmt.Sprintf("Batch %d %s.", id, v.done))
			},
		})
	}
	d.verb(verb{
		name: string(operator.CancelOperation), title: "Cancel operation", role: operatorRole, destroys: true,
		objects: []string{"operation"},
		effect:  "Ends the operation. Changes that it has made stay.",
		preview: d.operationPreview,
		do: func(ctx context.Context, in form, by invalidation.By) (string, error) {
			id, err := in.ID("operation")
			if err != nil {
				return "", err
			}
			done := fmt.Sprintf("Operation %d is cancelled.", id)
			return d.do(ctx, operator.CancelOperation, id, by, time.Time{}, done)
		},
	})
}

func (d *Dashboard) batchPreview(ctx context.Context, in form) (preview, error) {
	return d.previewBatch(ctx, in, func(b operator.Batch) string {
		return format.Count(b.Parts-b.Done-b.Bad) + " of " + format.Count(b.Parts) + " parts, those that have not ended"
	})
}

func (d *Dashboard) batchRetryPreview(ctx context.Context, in form) (preview, error) {
	return d.previewBatch(ctx, in, func(b operator.Batch) string {
		if b.Bad == 0 {
			return "no part of " + format.Count(b.Parts) + ": the completion alone runs again"
		}
		return format.Count(b.Bad) + " of " + format.Count(b.Parts) +
			" parts, those that failed, expired or were cancelled"
	})
}

// previewBatch describes a batch; count returns which of its parts a change touches.
func (d *Dashboard) previewBatch(
	ctx context.Context, in form, count func(operator.Batch) string,
) (preview, error) {
	id, err := in.ID("batch")
	if err != nil {
		return preview{}, err
	}
	b, err := d.db.Batch(ctx, id)
	if err != nil {
		return preview{}, err
	}
	return preview{Count: count(b), Facts: []fact{{"name", b.Name}, {"queue", b.Queue}, {"state", b.State}}}, nil
}

func (d *Dashboard) operationPreview(ctx context.Context, in form) (preview, error) {
	id, err := in.ID("operation")
	if err != nil {
		return preview{}, err
	}
	o, err := d.db.Operation(ctx, id)
	if err != nil {
		return preview{}, err
	}
	left := "what is left of it: " + format.Count(o.Changed) + " of " + format.Count(o.Matched) + " are changed"
	if o.AtLeast() {
		left = "what is left of it, which is not known: " + format.Count(o.Changed) + " are changed so far"
	}
	return preview{
		Count: left,
		Facts: []fact{{"verb", o.Verb}, {"queue", o.Queue}, {"status", o.Status}},
	}, nil
}

func (d *Dashboard) batches(ctx context.Context, q query) (any, error) {
	v := batchesView{Queue: q.Get("queue")}
	batchesBefore, operationsBefore := q.Int("before"), q.Int("operations_before")
	batches, err := cached(ctx, d, keyOf("batches", v.Queue, batchesBefore), 2*time.Second,
		func(ctx context.Context) ([]operator.Batch, error) {
			return d.db.Batches(ctx, operator.BatchFilter{Queue: v.Queue, Before: batchesBefore, Limit: batchRows})
		})
	if err != nil {
		return nil, err
	}
	operations, err := cached(ctx, d, keyOf("operations", v.Queue, operationsBefore), beat,
		func(ctx context.Context) ([]operator.Operation, error) {
			return d.db.Operations(ctx, operator.OperationFilter{
				Queue: v.Queue, Before: operationsBefore,
				Limit: batchRows,
			})
		})
	if err != nil {
		return nil, err
	}
	for _, b := range batches {
		v.Batches = append(v.Batches, batchRowOf(b))
	}
	for _, o := range operations {
		v.Operations = append(v.Operations, operationRowOf(o))
	}
	if len(batches) == batchRows {
		v.BeforeBatch = batches[len(batches)-1].ID
	}
	if len(operations) == batchRows {
		v.BeforeOperate = operations[len(operations)-1].ID
	}
	return v, nil
}

func batchRowOf(b operator.Batch) batchRow {
	return batchRow{
		Batch: b,
		Open:  !slices.Contains([]string{"done", "failed", "cancelled"}, b.State),
		// A batch that was never split has no parts to run: the database refuses it.
		Again: (b.State == "failed" || b.State == "cancelled") && !strings.HasPrefix(b.Problem, "split: "),
		Bar: picture.Progress{
			Title: fmt.Sprintf("Parts of batch %d", b.ID), Total: b.Parts, Done: b.Done, Bad: b.Bad, Going: b.Queued,
		}.HTML(),
	}
}

func operationRowOf(o operator.Operation) operationRow {
	filter, _ := json.Marshal(o.Filter) // it was read from JSON
	total := o.Matched
	if o.AtLeast() {
		total = -1
	}
	return operationRow{
		Operation: o, Filtered: string(filter),
		Bar: picture.Progress{
			Title: fmt.Sprintf("Matches of operation %d", o.ID), Total: total, Done: o.Changed,
		}.HTML(),
	}
}
