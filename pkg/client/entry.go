package client

import (
	"context"
	"encoding/json"
	"net/url"
	"strconv"
	"time"
)

// EntryState is the state of an entry, or how it ended.
type EntryState struct {
	ID    int64  `json:"id"`
	Queue string `json:"queue"`
	// State is initial, pending, disabled or computing, and at the end done, failed, expired or cancelled.
	State string `json:"state"`
	// Reasons say why it does not run.
	Reasons []struct {
		Code string `json:"code"`
		Text string `json:"text"`
	} `json:"reasons"`
	AcceptedAt time.Time       `json:"accepted_at"`
	EndedAt    time.Time       `json:"ended_at"`
	Attempt    int             `json:"attempt"` // attempts that ended in an error
	Error      string          `json:"error"`   // of a failure
	Class      string          `json:"class"`   // of a failure
	Reason     string          `json:"reason"`  // of an expiry or a cancel
	Result     json.RawMessage `json:"result"`
}

// Ended says whether the entry has ended.
func (s EntryState) Ended() bool {
	switch s.State {
	case "done", "failed", "expired", "cancelled":
		return true
	}
	return false
}

func entryPath(id int64) string { return "/v1/entries/" + strconv.FormatInt(id, 10) }

// Entry returns the state of an entry. EntryNotFound also means that its outcome is not kept any more.
func (c *Client) Entry(ctx context.Context, id int64) (EntryState, error) {
	var s EntryState
	err := c.Do(ctx, RawRequest{Method: "GET", Path: entryPath(id)}, &s)
	return s, err
}

// Wait returns how an entry ended, as soon as it has, or when ctx ends.
func (c *Client) Wait(ctx context.Context, id int64) (EntryState, error) {
	return c.wait(ctx, RawRequest{Method: "GET", Path: entryPath(id) + "?wait=" + c.waitMax()})
}

// WaitOwn is Wait for an answer of Push or PushMany, which scope push allows.
func (c *Client) WaitOwn(ctx context.Context, p Pushed) (EntryState, error) {
	query := url.Values{"wait": {c.waitMax()}, "flow": {p.Flow}}
	return c.wait(ctx, RawRequest{Method: "GET", Path: entryPath(p.ID) + "?" + query.Encode(), Key: p.Key})
}

// waitMax is how long a request asks the server to wait: so long that its answer comes within the time limit of HTTP.
func (c *Client) waitMax() string {
	most := 30 * time.Second
	if limit := c.cfg.HTTP.Timeout; limit > 0 {
		most = min(most, limit/2)
	}
	return most.String()
}

func (c *Client) wait(ctx context.Context, call RawRequest) (EntryState, error) {
	for {
		var s EntryState
		err := c.Do(ctx, call, &s)
		if err != nil || s.Ended() {
			return s, err
		}
		select { // a server that is about to end answers at once
		case <-time.After(backoffMin):
		case <-ctx.Done():
			return s, context.Cause(ctx)
		}
	}
}

// because is the body of what needs a reason.
func because(reason string) map[string]any { return map[string]any{"reason": reason} }

// Cancel ends an entry, or asks the node that runs it to; the verdict says which.
func (c *Client) Cancel(ctx context.Context, id int64, reason string) (verdict string, err error) {
	var answer struct{ Verdict string }
	err = c.Do(ctx, RawRequest{Method: "POST", Path: entryPath(id) + "/cancel", In: because(reason)}, &answer)
	return answer.Verdict, err
}

// page is a page of a list.
type page[T any] struct {
	Items      []T    `json:"items"`
	NextCursor string `json:"next_cursor"`
}

// all reads every page of a list.
func all[T any](ctx context.Context, c *Client, path string, query url.Values) ([]T, error) {
	var items []T
	query.Set("limit", "1000")
	for {
		var p page[T]
		if err := c.Do(ctx, RawRequest{Method: "GET", Path: path + "?" + query.Encode()}, &p); err != nil {
			return items, err
		}
		items = append(items, p.Items...)
		if p.NextCursor == "" {
			return items, nil
		}
		query.Set("cursor", p.NextCursor)
	}
}

// Queue is a queue, with all that the API says of it in Raw.
type Queue struct {
	Name        string          `json:"name"`
	Kind        string          `json:"kind"`
	Application string          `json:"application"`
	Raw         json.RawMessage `json:"-"`
}

// UnmarshalJSON keeps the whole beside the fields.
func (q *Queue) UnmarshalJSON(text []byte) error {
	type fields Queue
	q.Raw = append([]byte(nil), text...)
	return json.Unmarshal(text, (*fields)(q))
}

// Queues returns the queues that the token may see, by name.
func (c *Client) Queues(ctx context.Context) ([]Queue, error) {
	return all[Queue](ctx, c, "/v1/queues", url.Values{})
}

// Pause stops claims of the queue, until it is resumed or until is reached (zero: never).
func (c *Client) Pause(ctx context.Context, queue, reason string, until time.Time) error {
	body := because(reason)
	if !until.IsZero() {
		body["until"] = until
	}
	return c.Do(ctx, RawRequest{Method: "POST", Path: "/v1/queues/" + url.PathEscape(queue) + "/pause", In: body}, nil)
}

// Resume ends a pause.
func (c *Client) Resume(ctx context.Context, queue, reason string) error {
	request := RawRequest{Method: "POST", Path: "/v1/queues/" + url.PathEscape(queue) + "/resume", In: because(reason)}
	return c.Do(ctx, request, nil)
}

// Failure is an entry that ended in error.
type Failure struct {
	ID       int64     `json:"id"`
	Queue    string    `json:"queue"`
	FailedAt time.Time `json:"failed_at"`
	Class    string    `json:"class"`
	Error    string    `json:"error"`
	Attempt  int       `json:"attempt"`
}

// Failures returns the failures of a queue, those with the largest ids first.
func (c *Client) Failures(ctx context.Context, queue string) ([]Failure, error) {
	return all[Failure](ctx, c, "/v1/failures", url.Values{"queue": {queue}})
}

// Retry puts a failed entry back into its queue.
func (c *Client) Retry(ctx context.Context, id int64, reason string) error {
	return c.Do(ctx, RawRequest{
		Method: "POST", Path: "/v1/failures/" + strconv.FormatInt(id, 10) + "/retry",
		In: because(reason),
	}, nil)
}

// Discard forgets a failure.
func (c *Client) Discard(ctx context.Context, id int64, reason string) error {
	return c.Do(ctx, RawRequest{
		Method: "POST", Path: "/v1/failures/" + strconv.FormatInt(id, 10) + "/discard",
		In: because(reason),
	}, nil)
}
