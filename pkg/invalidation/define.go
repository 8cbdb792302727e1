package invalidation

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/penstock/penstock/internal/postgres"
)

// Definition is a queue as a program knows it: its name, the type of its payloads, and its settings. Define it once,
// sync it at the start, push and handle through it.
//
//	var thumbnails = invalidation.Definition[Thumbnail]{
//		Name:   "thumbnail",
//		Config: invalidation.Config{Grouping: "image_id", MaxConcurrent: 20},
//	}
type Definition[P any] struct {
	Name string
	// Config is the initial settings of a new queue. In an existing queue kind, grouping, mergeable
	// and merge must agree with it, because handlers depend on them; the other settings belong to
	// operators and are not changed.
	Config Config
	// Merge joins the payloads that one lock covers, oldest first, into one, which is handled once and answers for
	// all of them, also where the handler ends it by Run.FinishTx; nil handles each by itself. It is for queues with a
	// grouping.
	Merge func([]P) P
}

// Definer is a Definition of any payload.
type Definer interface {
	define() (name string, c Config)
}

func (d Definition[P]) define() (string, Config) { return d.Name, d.Config }

// Sync makes the queues that are missing and compares the others with the registry. A difference is
// an ErrDefinitionConflict that names queue, field and both values; all conflicts, and queues that cannot be made, are
// reported at once.
func Sync(ctx context.Context, db postgres.DB, definitions ...Definer) error {
	var errs []error
	for _, d := range definitions {
		name, config := d.define()
		q, err := openOrCreate(ctx, db, name, config)
		switch {
		case err == nil:
			errs = append(errs, compare(q, config)...)
		case Interrupted(err) || ctx.Err() != nil: // the others would meet it as well
			return errors.Join(append(errs, err)...)
		default:
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

func openOrCreate(ctx context.Context, db postgres.DB, name string, config Config) (*Queue, error) {
	q, err := Open(ctx, db, name)
	if !errors.Is(err, ErrQueueNotFound) {
		return q, err
	}
	q, err = Create(ctx, db, name, config)
	if errors.Is(err, ErrState) || postgres.Code(err) == postgres.UniqueViolation { // another process was faster
		return Open(ctx, db, name)
	}
	return q, err
}

// compare lists the differences from the registry in kind, grouping, mergeable and merge. An empty
// setting means the default.
func compare(q *Queue, code Config) (conflicts []error) {
	registry := q.Config
	differ := func(field string, inCode, inRegistry any) {
		if inCode != inRegistry {
			conflicts = append(conflicts, fmt.Errorf("queue %q: %s is %v in the code and %v in the registry; change "+
				"one, or use another name: %w",
				q.Name, field, show(inCode), show(inRegistry), ErrDefinitionConflict))
		}
	}
	or := func(value, fallback string) string {
		if value == "" {
			return fallback
		}
		return value
	}
	differ("kind", or(string(code.Kind), string(KindTask)), string(registry.Kind))
	differ("grouping", code.Grouping, registry.Grouping)
	differ("mergeable", code.Mergeable, registry.Mergeable)
	if code.Mergeable {
		differ("merge", or(code.Merge, "last"), registry.Merge)
	}
	return conflicts
}

func show(value any) string {
	if s, ok := value.(string); ok {
		return fmt.Sprintf("%q", s)
	}
	return fmt.Sprint(value)
}

// Open returns a handle on the queue, which must exist. Its pushes send hints once it is Hinting.
func (d Definition[P]) Open(ctx context.Context, db postgres.DB) (*Queue, error) {
	return Open(ctx, db, d.Name)
}

// NewPush makes a push of a payload, with the other fields from options.
func (d Definition[P]) NewPush(payload P, options Push) (Push, error) {
	text, err := json.Marshal(payload)
	if err != nil {
		return Push{}, fmt.Errorf("write payload for queue %q: %w: %w", d.Name, err, ErrInvalid)
	}
	options.Payload = text
	return options, nil
}

// Push accepts payloads, all or none, on a pool or inside the caller's transaction. It knows no more of the queue than
// its name: it sends no hint, so that nodes find the entries with their next poll, is not committed as a group with
// other pushes, and does not use the short statement for payloads without options. Queue.Push does: push what NewPush
// makes to what Open or Queue.Hinting returns.
//
// A handler whose pushes may lead to entries of its own queue again calls changelog.Descend first in its transaction:
// the bound on loops counts no other pushes of handlers in Go.
func (d Definition[P]) Push(ctx context.Context, db postgres.DB, payloads ...P) ([]Pushed, error) {
	pushes := make([]Push, len(payloads))
	for i, p := range payloads {
		var err error
		if pushes[i], err = d.NewPush(p, Push{}); err != nil {
			return nil, err
		}
	}
	return pushOn(ctx, db, d.Name, pushes)
}

// Compact replaces the entries of a key that do not run by the one that Merge makes of them, or the queue's own merge
// where there is no Merge, and returns how many went. Only queues whose settings say mergeable can be compacted.
func (d Definition[P]) Compact(ctx context.Context, db postgres.DB, key string) (int, error) {
	q, err := d.Open(ctx, db)
	if err != nil {
		return 0, err
	}
	if d.Merge == nil {
		return q.Compact(ctx, key)
	}
	return q.CompactWith(ctx, key, func(entries []Entry) (json.RawMessage, error) {
		payloads := make([]P, len(entries))
		for i, e := range entries {
			if err := json.Unmarshal(e.Payload, &payloads[i]); err != nil {
				return nil, fmt.Errorf("read payload of entry %d: %w", e.ID, err)
			}
		}
		return json.Marshal(d.Merge(payloads))
	})
}

// Handle handles one payload of a queue. Its result is stored as JSON, nil for none. The error
// decides how the entry ends, see Handler.
type Handle[P any] func(ctx context.Context, r *Run, payload P) (result any, err error)

// Handler makes a Handler of a function. A payload that does not fit P is a failure of class "payload".
func (d Definition[P]) Handler(fn Handle[P]) Handler {
	if d.Merge != nil {
		return merging[P]{typed[P](fn), d.Merge}
	}
	return typed[P](fn)
}

type typed[P any] Handle[P]

// Handle runs one entry.
func (fn typed[P]) Handle(ctx context.Context, r *Run) (json.RawMessage, error) {
	var payload P
	if err := r.Decode(&payload); err != nil {
		return nil, err
	}
	return fn.run(ctx, r, payload)
}

func (fn typed[P]) run(ctx context.Context, r *Run, payload P) (json.RawMessage, error) {
	result, err := fn(ctx, r, payload)
	if err != nil || result == nil {
		return nil, err
	}
	text, err := json.Marshal(result)
	if err != nil {
		return nil, Permanent(WithClass("result", fmt.Errorf("write result: %w", err)))
	}
	return text, nil
}

// merging handles the entries of a lock as one.
type merging[P any] struct {
	typed[P]
	merge func([]P) P
}

// HandleBatch merges the payloads that fit the type and gives their entries one common answer. Each
// other entry fails.
func (m merging[P]) HandleBatch(ctx context.Context, runs []*Run) []BatchAnswer {
	answers := make([]BatchAnswer, len(runs))
	var payloads []P
	var merged []*Run
	for i, r := range runs {
		var p P
		if answers[i].Err = r.Decode(&p); answers[i].Err == nil {
			payloads, merged = append(payloads, p), append(merged, r)
		}
	}
	if len(merged) == 0 {
		return answers
	}
	newest := merged[len(merged)-1]
	newest.merged = merged
	result, err := m.run(ctx, newest, m.merge(payloads))
	for i := range answers {
		if answers[i].Err == nil {
			answers[i] = BatchAnswer{Result: result, Err: err}
		}
	}
	return answers
}
