package worker

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"time"
)

// BatchCodec is an adapter whose protocol can carry several entries in one call:
// dispatcher, Open Inference Protocol, and OpenAI embeddings. Everything that
// belongs to an entry (result, error, retry, deadline) stays its own.
type BatchCodec interface {
	// Measure returns with which other calls a call may be joined, and its weight.
	Measure(call Call, at time.Time) (Member, error)

	// Join makes one call of several of the same shape.
	Join(calls []Call) (Call, error)

	// Split gives each of the joined calls its own outcome, in their order.
	Split(calls []Call, whole Outcome) []Outcome
}

// BatchLimits say how entries of a model are put together into one call. A
// limit of 0 does not apply; Items of 0 or 1 means no batches.
type BatchLimits struct {
	Items  int     `json:"items,omitempty"`
	Tokens int64   `json:"tokens,omitempty"`
	Bytes  int64   `json:"bytes,omitempty"`
	Wait   Seconds `json:"wait,omitempty"` // longest wait of the oldest member for others, while a slot idles; 50 ms

	// Fields of the payload, by dotted path: members whose ShapeField differs do
	// not share a call; TokensField says how many tokens a member has, which is
	// otherwise estimated (rows, for tensors).
	ShapeField  string `json:"shape_field,omitempty"`
	TokensField string `json:"tokens_field,omitempty"`
}

// WithDefaults sets the default of each zero limit.
func (l BatchLimits) WithDefaults() BatchLimits {
	if l.Items > 1 {
		l.Wait = cmp.Or(l.Wait, Seconds(50*time.Millisecond))
	}
	return l
}

func (l BatchLimits) validate() error {
	switch {
	case l.Items < 0:
		return fieldError("batch.items", "must not be negative")
	case l.Tokens < 0:
		return fieldError("batch.tokens", "must not be negative")
	case l.Bytes < 0:
		return fieldError("batch.bytes", "must not be negative")
	case l.Wait < 0:
		return fieldError("batch.wait", "must not be negative")
	}
	return nil
}

// Member is an entry waiting to be put into a batch.
type Member struct {
	Entry  string
	Shape  string // only members of one shape may share a call
	Tokens int64
	Bytes  int64
	At     time.Time // when it began to wait here
	Alone  bool      // it has a shape of its own, and waits for no others
}

// joined describes the batch as a whole. Its id depends on its members and
// their tokens, so that a repeated batch is the same to the worker and another
// composition is not. The latest deadline counts: no member is cut short by
// another, and the finish of one that is late is refused anyway.
func joined(calls []Call, payload json.RawMessage) Call {
	sum := sha256.New()
	whole := Call{
		Payload: payload, Operation: calls[0].Operation, TraceParent: calls[0].TraceParent,
	}
	endless := false
	for _, c := range calls {
		fmt.Fprintf(sum, "%d:%s:%d\n", len(c.Entry), c.Entry, c.Token)
		whole.Token, whole.Attempt = max(whole.Token, c.Token), max(whole.Attempt, c.Attempt)
		endless = endless || c.FinishBy.IsZero()
		if c.FinishBy.After(whole.FinishBy) {
			whole.FinishBy = c.FinishBy
		}
	}
	if endless {
		whole.FinishBy = time.Time{}
	}
	whole.Entry = "batch-" + hex.EncodeToString(sum.Sum(nil)[:16])
	return whole
}

// SameForAll gives every member the outcome of the whole. Where the whole was refused or failed in
// a way that one member may have caused, each is to be tried alone, free of charge: the innocent
// must not pay for the guilty.
func SameForAll(calls []Call, whole Outcome) []Outcome {
	suspect := whole.Kind == Rejected || whole.Kind == Failed || whole.Misrouted
	if suspect && len(calls) > 1 {
		whole = Outcome{
			Kind: Busy, Alone: true, StatusCode: whole.StatusCode, SentAt: whole.SentAt, Err: whole.Err,
			Reason: Clip("batch of " + strconv.Itoa(len(calls)) + " did not succeed, each is tried alone: " +
				whole.Reason),
		}
	}
	return slices.Repeat([]Outcome{whole}, len(calls))
}

// misfit is the outcome of a batch whose answer cannot be divided.
func misfit(calls []Call, whole Outcome, reason string) []Outcome {
	o := failed(ClassTransient, reason)
	o.StatusCode, o.SentAt = whole.StatusCode, whole.SentAt
	return SameForAll(calls, o)
}

// measure fills in what is the same for all protocols. shape and tokens are
// taken from the payload where the model names fields for them.
func (w *wire) measure(call Call, at time.Time, shape string, tokens int64) Member {
	m := Member{Entry: call.Entry, Shape: shape, Tokens: tokens, Bytes: int64(len(call.Payload)), At: at}
	if field, ok := lookup(call.Payload, w.model.Batch.ShapeField); ok && w.model.Batch.ShapeField != "" {
		m.Shape += "|" + string(field)
	}
	if field, ok := lookup(call.Payload, w.model.Batch.TokensField); ok {
		var n int64
		if json.Unmarshal(field, &n) == nil && n >= 0 {
			m.Tokens = n
		}
	}
	if call.Operation != "" {
		m.Shape += "|" + call.Operation
	}
	return m
}
