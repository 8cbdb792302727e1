package main

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"time"

	"github.com/penstock/penstock/pkg/client"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
)

// sentEntry is an entry in the body of a push.
type sentEntry struct {
	Payload        json.RawMessage           `json:"payload"`
	LockKey        string                    `json:"lock_key,omitempty"`
	Flow           string                    `json:"flow,omitempty"`
	Priority       *int16                    `json:"priority,omitempty"`
	DueAt          time.Time                 `json:"due_at,omitzero"`
	StartBy        time.Time                 `json:"start_by,omitzero"`
	FinishBy       time.Time                 `json:"finish_by,omitzero"`
	Cost           float64                   `json:"cost,omitempty"`
	Name           string                    `json:"name,omitempty"`
	IdempotencyKey string                    `json:"idempotency_key,omitempty"`
	UniqueKey      string                    `json:"unique_key,omitempty"`
	UniquePolicy   invalidation.UniquePolicy `json:"unique_policy,omitempty"`
	Trace          string                    `json:"trace,omitempty"`
	Callback       json.RawMessage           `json:"callback,omitempty"`
}

// Push sends one entry as an object and several as an array. A key of the request lets it be sent again; entries with
// keys of their own cannot have one beside.
func (r remote) Push(ctx context.Context, queue string, pushes ...invalidation.Push) ([]invalidation.Pushed, error) {
	entries := make([]sentEntry, len(pushes))
	for i, p := range pushes {
		entries[i] = sentEntry(p)
	}
	call := client.Call{Method: "POST", Path: address("/v1/queues/%v/entries", queue), In: entries}
	if !slices.ContainsFunc(pushes, func(p invalidation.Push) bool { return p.IdempotencyKey != "" }) {
		call.Key = rand.Text()
	}
	if len(pushes) == 1 {
		var one invalidation.Pushed
		call.In = entries[0]
		err := r.do(ctx, call, &one)
		return []invalidation.Pushed{one}, err
	}
	var answer struct {
		Entries []invalidation.Pushed `json:"entries"`
	}
	err := r.do(ctx, call, &answer)
	return answer.Entries, err
}

func (r remote) Entries(ctx context.Context, f operator.EntryFilter) ([]operator.Entry, error) {
	return list[operator.Entry](ctx, r, "/v1/entries", f.Limit, behind(f.After),
		"queue", f.Queue, "state", f.State, "flow", f.Flow, "lock_key", f.LockKey, "name", f.Name)
}

// entryAnswer is what the API knows of an entry: where it stands and why, or how it ended.
type entryAnswer struct {
	operator.EntryDetail
	Reasons    []operator.Reason `json:"reasons"`
	AcceptedAt time.Time         `json:"accepted_at"`
	EndedAt    time.Time         `json:"ended_at"`
	Attempt    int               `json:"attempt"`
	Node       operator.NodeID   `json:"node"`
	Token      int64             `json:"token"`
	RanMS      float64           `json:"ran_ms"`
	Error      string            `json:"error"`
	Class      string            `json:"class"`
	Reason     string            `json:"reason"`
	Result     json.RawMessage   `json:"result"`
}

func (r remote) entry(ctx context.Context, id int64) (entryAnswer, error) {
	e, err := read[entryAnswer](ctx, r, address("/v1/entries/%v", id))
	if err == nil && !e.EndedAt.IsZero() {
		e.Ended = &operator.Ended{
			Outcome: e.State, At: e.EndedAt, Accepted: e.AcceptedAt, Attempt: e.Attempt, NodeID: e.Node, Token: e.Token,
			RunSeconds: e.RanMS / 1000, Class: e.Class, Reason: e.Error + e.Reason, Result: e.Result, // one of the two is empty
		}
	}
	return e, err
}

func (r remote) Entry(ctx context.Context, id int64) (operator.EntryDetail, error) {
	e, err := r.entry(ctx, id)
	return e.EntryDetail, err
}

func (r remote) Outcome(ctx context.Context, id int64) (string, operator.Ended, error) {
	e, err := r.entry(ctx, id)
	if err != nil {
		return "", operator.Ended{}, err
	}
	if e.Ended == nil {
		return "", operator.Ended{}, fmt.Errorf("read outcome of entry %d: it has not ended: %w", id, invalidation.ErrState)
	}
	return e.Queue, *e.Ended, nil
}

// Explain gives an entry that has ended the one reason that the database would.
func (r remote) Explain(ctx context.Context, id int64) (operator.Explanation, error) {
	e, err := r.entry(ctx, id)
	if end := e.Ended; end != nil {
		e.Reasons = []operator.Reason{{
			Code: "ended", Text: fmt.Sprintf("it ended %s ago: %s%s", age(time.Since(end.At).Seconds()), end.Outcome, after(", ", end.Reason)),
			Numbers: map[string]any{"outcome": end.Outcome, "ended_at": end.At, "attempt": end.Attempt},
		}}
	}
	return operator.Explanation{ID: id, Queue: e.Queue, State: e.State, Reasons: e.Reasons}, err
}

func (r remote) CancelEntry(ctx context.Context, id int64, by invalidation.By) (operator.Cancelled, error) {
	var answer struct {
		Verdict operator.Cancelled `json:"verdict"`
	}
	err := r.post(ctx, address("/v1/entries/%v/cancel", id), because(by), &answer)
	return answer.Verdict, err
}

// begun is an operation on many that the leader carries out, or how many it would change.
type begun struct {
	ID       int64 `json:"operation_id"`
	Matching int64 `json:"matching"`
}

func (r remote) begin(ctx context.Context, path string, body map[string]any) (begun, error) {
	var answer begun
	err := r.post(ctx, path, body, &answer)
	return answer, err
}

func (r remote) SwitchEntries(ctx context.Context, v operator.Verb, queue string, scope operator.Scope, value string, by invalidation.By) (int64, error) {
	path := address("/v1/queues/%v/entries/%v", queue, strings.TrimSuffix(string(v), "_entry"))
	answer, err := r.begin(ctx, path, because(by, "scope", scope, "value", value))
	return int64(answer.ID), err
}

// CountMatching needs a reason as all that may change something does; nothing is written of a count.
func (r remote) CountMatching(ctx context.Context, o operator.OperationRequest) (int64, error) {
	o.Reason = "to count what matches"
	answer, err := r.operate(ctx, o, true)
	return answer.Matching, err
}

func (r remote) StartOperation(ctx context.Context, o operator.OperationRequest) (int64, error) {
	answer, err := r.operate(ctx, o, false)
	return answer.ID, err
}

func (r remote) operate(ctx context.Context, o operator.OperationRequest, dry bool) (begun, error) {
	filter := map[string]any{"older_than_seconds": o.Filter.OlderThan.Seconds()}
	o.Filter.OlderThan = 0
	text, err := json.Marshal(o.Filter)
	if err != nil {
		return begun{}, err
	}
	if err := json.Unmarshal(text, &filter); err != nil {
		return begun{}, err
	}
	body := because(o.By, "verb", o.Verb, "filter", filter, "dry_run", dry)
	if o.PerSecond != 0 {
		body["per_second"] = o.PerSecond
	}
	return r.begin(ctx, address("/v1/queues/%v/operations", o.Queue), body)
}

// stepWait is how often an operation is looked at that the leader carries out.
const stepWait = 250 * time.Millisecond

// Step only waits: behind the API it is the elected leader who carries operations out.
func (r remote) Step(context.Context, int64) (time.Duration, error) { return stepWait, nil }
