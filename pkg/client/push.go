package client

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"iter"
	"net/url"
	"slices"
	"time"
)

// Push is an entry to be. Only Payload is needed, which is anything that JSON can hold.
type Push struct {
	Payload  any       `json:"payload"`
	LockKey  string    `json:"lock_key,omitempty"`
	Flow     string    `json:"flow,omitempty"`
	Priority *int      `json:"priority,omitempty"` // 0 to 9, higher first; nil for the queue's default
	DueAt    time.Time `json:"due_at,omitzero"`
	StartBy  time.Time `json:"start_by,omitzero"`
	FinishBy time.Time `json:"finish_by,omitzero"`
	Cost     float64   `json:"cost,omitempty"`
	Weight   int       `json:"weight,omitempty"` // times the units of each limit of the queue; 0 for 1
	Name     string    `json:"name,omitempty"`
	// IdempotencyKey names the push within its queue and flow, so that a caller that does not know whether an earlier
	// push was accepted can repeat it: the same key with the same payload, lock key and name has the first push's entry
	// as its answer (verdict replayed), with others IdempotencyConflict. At most 480 printable ASCII characters. Empty:
	// a key is made for each call, under which the client itself repeats what it sends.
	IdempotencyKey string `json:"idempotency_key,omitempty"`
	// UniqueKey and UniquePolicy (while_queued, while_active, one_running_one_queued) keep an entry from
	// being queued twice.
	UniqueKey    string    `json:"unique_key,omitempty"`
	UniquePolicy string    `json:"unique_policy,omitempty"`
	Trace        string    `json:"trace,omitempty"` // W3C traceparent
	Callback     *Callback `json:"callback,omitempty"`
}

// Callback is where the outcome is sent.
type Callback struct {
	URL     string `json:"url"`
	Context any    `json:"context,omitempty"` // sent along
}

// Pushed is the entry that does the work. Verdict is inserted, replayed (the server had it already) or duplicate
// (another entry holds the unique key).
type Pushed struct {
	ID      int64  `json:"id"`
	Verdict string `json:"verdict"`
	// Key is the idempotency key that it was pushed under, and Flow its flow: with them WaitOwn needs no more
	// than scope push.
	Key  string `json:"-"`
	Flow string `json:"-"`
}

func entriesOf(queue string) string { return "/v1/queues/" + url.PathEscape(queue) + "/entries" }

// Push accepts one entry.
func (c *Client) Push(ctx context.Context, queue string, e Push) (Pushed, error) {
	var pushed Pushed
	pushed.Key, pushed.Flow = cmp.Or(e.IdempotencyKey, rand.Text()), e.Flow
	e.IdempotencyKey = "" // it goes with the request
	err := c.Do(ctx, RawRequest{Method: "POST", Path: entriesOf(queue), In: e, Key: pushed.Key}, &pushed)
	return pushed, err
}

// PushMany accepts entries, all or none. Answers are in the order of entries. Without entries it sends nothing.
func (c *Client) PushMany(ctx context.Context, queue string, entries []Push) ([]Pushed, error) {
	if len(entries) == 0 {
		return nil, nil
	}
	var answer struct{ Entries []Pushed }
	key := rand.Text()
	keyOf := func(i int) string { return cmp.Or(entries[i].IdempotencyKey, fmt.Sprintf("%s/%d", key, i+1)) }
	r := request{method: "POST", path: entriesOf(queue), key: key, again: true}
	if slices.ContainsFunc(entries, func(e Push) bool { return e.IdempotencyKey != "" }) {
		r.key = "" // a request has a key, or its entries have
		entries = slices.Clone(entries)
		for i := range entries {
			entries[i].IdempotencyKey = keyOf(i)
		}
	}
	var err error
	if r.body, err = json.Marshal(entries); err != nil {
		return nil, wrap(r, fmt.Errorf("write body: %w", err))
	}
	err = c.do(ctx, r, &answer)
	for i := range answer.Entries[:min(len(entries), len(answer.Entries))] {
		answer.Entries[i].Key, answer.Entries[i].Flow = keyOf(i), entries[i].Flow
	}
	return answer.Entries, err
}

// Summary is the result of a stream.
type Summary struct {
	Lines      int64 `json:"lines"`
	Inserted   int64 `json:"inserted"`
	Replayed   int64 `json:"replayed"`
	Duplicates int64 `json:"duplicates"`
	Refused    int64 `json:"refused"`
	// Errors are the first 100 entries that were refused. Line is the place in the stream, from 1.
	Errors []Refusal `json:"errors"`
}

// Refusal says why an entry of a stream was refused.
type Refusal struct {
	Line   int64  `json:"line"`
	Code   Code   `json:"code"`
	Detail string `json:"detail"`
}

// A stream goes out in parts, each of which can be sent again as it is.
const (
	partEntries = 10_000
	partBytes   = 4 << 20
	errorsMax   = 100
)

// PushStream accepts as many entries as there are, each by itself, in memory that does not grow
// with their number. A part that broke off is sent again, and its accepted entries are found; so for as
// long as it gets further, where a queue or the rate of the token has room for a part of it each time. With
// an error, the summary covers the parts before; that of the last part is in the Error.
func (c *Client) PushStream(ctx context.Context, queue string, entries iter.Seq[Push]) (Summary, error) {
	var total Summary
	var part bytes.Buffer
	lines := json.NewEncoder(&part)
	n := 0
	own := false // entries have keys, and not requests: an entry of the caller had one
	flush := func() error {
		var answer struct{ Summary Summary }
		r := request{
			method: "POST", path: entriesOf(queue), media: "application/x-ndjson", body: part.Bytes(), again: true,
		}
		if !own {
			r.key = rand.Text()
		}
		err := c.do(ctx, r, &answer)
		if err == nil {
			total.add(answer.Summary)
		}
		part = bytes.Buffer{} // a transport may still read the body of a try that was answered early
		n = 0
		return err
	}
	for e := range entries {
		if e.IdempotencyKey != "" && !own {
			if n > 0 {
				if err := flush(); err != nil {
					return total, err
				}
			}
			own = true
		}
		if own && e.IdempotencyKey == "" {
			e.IdempotencyKey = rand.Text()
		}
		if err := lines.Encode(e); err != nil {
			return total, fmt.Errorf("write entry %d: %w", total.Lines+int64(n)+1, err)
		}
		if n++; n >= partEntries || part.Len() >= partBytes {
			if err := flush(); err != nil {
				return total, err
			}
		}
	}
	if n == 0 {
		return total, nil
	}
	return total, flush()
}

func (s *Summary) add(part Summary) {
	for _, e := range part.Errors {
		if len(s.Errors) < errorsMax {
			e.Line += s.Lines
			s.Errors = append(s.Errors, e)
		}
	}
	s.Lines += part.Lines
	s.Inserted += part.Inserted
	s.Replayed += part.Replayed
	s.Duplicates += part.Duplicates
	s.Refused += part.Refused
}
