package inference

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"time"
)

// Batcher is an adapter whose protocol can carry several entries in one call:
// dispatcher, Open Inference Protocol, and OpenAI embeddings. Everything that
// belongs to an entry (result, error, retry, deadline) stays its own.
type Batcher interface {
	// Measure says with which others a call may travel, and what it weighs.
	Measure(call Call, at time.Time) (Member, error)

	// Join makes one call of several of the same shape.
	Join(calls []Call) (Call, error)

	// Split gives each of the joined calls its own outcome, in their order.
	Split(calls []Call, whole Outcome) []Outcome
}

// joined describes the batch as a whole. Its id depends on its members and
// their tokens, so that a repeated batch is the same to the worker and another
// composition is not. The latest deadline counts: no member is cut short by
// another, and the finish of one that is late is refused anyway.
func joined(calls []Call, payload json.RawMessage) Call {
	sum := sha256.New()
	whole := Call{Payload: payload, Operation: calls[0].Operation, TraceParent: calls[0].TraceParent, TraceState: calls[0].TraceState}
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

// shared gives every member what became of the whole. Where the whole was
// refused or failed in a way that one member may have caused, each is to be
// tried alone, free of charge: the innocent must not pay for the guilty.
func shared(calls []Call, whole Outcome) []Outcome {
	suspect := whole.Kind == Rejected || (whole.Kind == Failed && whole.Class != ClassContextLost)
	if suspect && len(calls) > 1 {
		whole = Outcome{
			Kind: Busy, Alone: true, StatusCode: whole.StatusCode, SentAt: whole.SentAt, Err: whole.Err,
			Reason: clip("batch of " + strconv.Itoa(len(calls)) + " did not succeed, each is tried alone: " + whole.Reason),
		}
	}
	return slices.Repeat([]Outcome{whole}, len(calls))
}

// misfit is the outcome of a batch whose answer cannot be divided.
func misfit(calls []Call, whole Outcome, reason string) []Outcome {
	o := failed(ClassTransient, reason)
	o.StatusCode, o.SentAt = whole.StatusCode, whole.SentAt
	return shared(calls, o)
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
