package api

import (
	"context"
	"encoding/json"
	"errors"
	"net/http"
	"slices"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
)

// entryRead is the known state of an entry: its place in the queue, or its outcome.
type entryRead struct {
	ID    invalidation.EntryID `json:"id"`
	Queue string               `json:"queue"`
	State string               `json:"state" doc:"initial, pending, disabled, computing, done, failed, expired or cancelled."`

	// While it lives: why it is not running, or what it runs on, and what was pushed.
	Reasons  []operator.Reason     `json:"reasons,omitempty" nullable:"false"`
	Entry    *operator.EntryStatus `json:"entry,omitempty"`
	Payload  json.RawMessage       `json:"payload,omitempty"`
	History  json.RawMessage       `json:"history,omitempty" doc:"Errors of earlier attempts, oldest first."`
	Trace    string                `json:"trace,omitempty" doc:"The W3C trace context that it was pushed with."`
	Progress json.RawMessage       `json:"progress,omitempty" doc:"The last word of a run: done (0 to 1), message, updated_at."`

	// Once it has ended.
	AcceptedAt *time.Time         `json:"accepted_at,omitempty"`
	EndedAt    *time.Time         `json:"ended_at,omitempty"`
	Attempt    *int               `json:"attempt,omitempty"` // attempts that ended in an error
	Node       operator.NodeID    `json:"node,omitempty"`
	Token      invalidation.Token `json:"token,omitempty"`
	RanMS      *int64             `json:"ran_ms,omitempty"`
	Error      string             `json:"error,omitempty"`  // of a failure
	Class      string             `json:"class,omitempty"`  // of a failure
	Reason     string             `json:"reason,omitempty"` // of an expiry or a cancel
	Result     json.RawMessage    `json:"result,omitempty"`
}

type InID struct {
	ID int64 `path:"id"`
}

func (a *API) entryRoutes() {
	const one = "/v1/entries/{id}"
	add(a, route{
		method: "GET", path: "/v1/entries", id: "list-entries", summary: "Entries of a queue, oldest first",
		scope: read, of: ofQueue,
	}, a.listEntries)
	add(a, route{
		method: "GET", path: one, id: "show-entry", summary: "One entry, whether it waits, runs or has ended",
		scope: read, own: true, of: ofEntry, timeout: waitMax + a.cfg.Timeout,
	}, a.entry)
	a.raw(route{
		method: "GET", path: one + "/events", id: "follow-entry",
		summary: "Events of an entry, as a stream of server-sent events",
		scope:   read, of: ofEntry, timeout: -1,
	}, describeEvents, a.events)
	add(a, route{
		method: "POST", path: one + "/cancel", id: "cancel-entry",
		summary: "Cancel an entry; if it runs, its node is asked to end it",
		scope:   operate, of: ofEntry,
	}, a.cancelEntry)
	verb[idVerb](a, operator.DisableEntry, route{
		path: one + "/disable", id: "disable-entry", summary: "Disable an entry: it is not claimed until it is enabled",
		scope: operate, of: ofEntry,
	})
	verb[idVerb](a, operator.EnableEntry, route{
		path: one + "/enable", id: "enable-entry", summary: "Enable a disabled entry at its old position",
		scope: operate, of: ofEntry,
	})
	const some = "/v1/queues/{queue}/entries"
	change := func(v operator.Verb, r route) {
		r.method, r.scope, r.of, r.status = "POST", operate, ofQueue, http.StatusAccepted
		add(a, r, func(ctx context.Context, in *entriesVerb) (*answer[started], error) {
			id, err := a.operator.SwitchEntries(ctx, v, in.Queue, in.Body.Scope, in.Body.Value, in.Body.by(ctx))
			return answered(started{int64(id)}, err)
		})
	}
	change(operator.DisableEntry, route{
		path: some + "/disable", id: "disable-entries",
		summary: "Disable all entries of a name or lock key, later ones too",
	})
	change(operator.EnableEntry, route{
		path: some + "/enable", id: "enable-entries",
		summary: "Enable the entries of a name or lock key again",
	})
}

type entriesVerb struct {
	InQueue
	Body struct {
		ReasonBody
		Scope operator.Scope `json:"scope" enum:"name,lock_key"`
		Value string         `json:"value" minLength:"1"`
	}
}

// started names a bulk operation that goes on.
type started struct {
	ID int64 `json:"operation_id"`
}

type entryFilter struct {
	Paging
	Queue   string `query:"queue" required:"true" maxLength:"48"`
	State   string `query:"state" enum:"initial,pending,computing,disabled"`
	Flow    string `query:"flow"`
	LockKey string `query:"lock_key"`
	Name    string `query:"name"`
}

func (a *API) listEntries(ctx context.Context, in *entryFilter) (*answer[list[operator.EntryStatus]], error) {
	return paged(in.Paging, func(after int64, limit int) ([]operator.EntryStatus, error) {
		return a.operator.Entries(ctx, operator.EntryFilter{
			Queue: in.Queue, State: in.State, Flow: in.Flow, LockKey: in.LockKey, Name: in.Name, After: after,
			Limit: limit,
		})
	}, func(e operator.EntryStatus) int64 { return e.ID })
}

type inEntry struct {
	InID
	Wait string `query:"wait" maxLength:"20" doc:"How long to wait for the end of the entry, such as 30s; a minute at most."`
	Key  string `header:"Idempotency-Key" doc:"Of the push of this entry, for a token of scope push."`
	Flow string `query:"flow" doc:"Of that push, if it had one."`
}

// entry answers with the state of an entry, if requested as soon as it has ended.
func (a *API) entry(ctx context.Context, in *inEntry) (*answer[entryRead], error) {
	wait, err := waitOf(in.Wait)
	if err != nil {
		return nil, err
	}
	if wait > 0 {
		if err := a.await(ctx, invalidation.EntryID(in.ID), wait); err != nil {
			return nil, err
		}
		if err := a.stillValid(ctx); err != nil {
			return nil, err
		}
	}
	return answered(a.readEntry(ctx, in.ID))
}

// readEntry tells the state of a living entry, or the outcome of one that has ended for as long as that is kept.
func (a *API) readEntry(ctx context.Context, number int64) (entryRead, error) {
	id := invalidation.EntryID(number)
	ended, err := invalidation.Outcome(ctx, a.db, id)
	switch {
	case err == nil:
		return endedEntry(id, ended), nil
	case !errors.Is(err, invalidation.ErrState):
		return entryRead{}, err
	}
	detail, err := a.operator.Entry(ctx, number)
	if err != nil {
		return entryRead{}, err
	}
	if detail.Entry == nil { // it has ended since
		return a.readEntry(ctx, number)
	}
	living, err := a.operator.Explain(ctx, number)
	if err != nil {
		return entryRead{}, err
	}
	if !slices.Contains(operator.States(), living.State) { // likewise
		return a.readEntry(ctx, number)
	}
	if !callerOf(ctx).may(read) {
		withholdAnswers(living.Reasons, number)
	}
	return entryRead{
		ID: id, Queue: living.Queue, State: living.State, Reasons: living.Reasons, Entry: detail.Entry,
		Payload: detail.Payload, History: detail.History, Trace: detail.Trace, Progress: detail.Progress,
	}, nil
}

// withholdAnswers takes from the reasons of an entry why another one was handed back or failed: the answer of a worker
// may repeat parts of a call of another client.
func withholdAnswers(reasons []operator.Reason, entry int64) {
	for i := range reasons {
		r := &reasons[i]
		if of, known := r.Numbers["entry_id"].(float64); known && int64(of) == entry {
			continue
		}
		switch r.Code {
		case "handed_back":
			r.Text = "a node handed another entry of the queue back"
			r.Numbers = map[string]any{"node": r.Numbers["node"], "seconds": r.Numbers["seconds"]}
		case "key_blocked":
			r.Text = "the lock key is blocked since another entry of it failed"
			r.Numbers = map[string]any{"lock_key": r.Numbers["lock_key"], "since": r.Numbers["since"]}
		}
	}
}

// cancelled is the verdict on a cancel: cancelled, or requested from the node that runs the entry.
type cancelled struct {
	Verdict string `json:"verdict" doc:"cancelled, or requested where a node runs it."`
}

func (a *API) cancelEntry(ctx context.Context, in *idVerb) (*answer[cancelled], error) {
	verdict, err := a.operator.CancelEntry(ctx, in.ID, in.Body.by(ctx))
	return answered(cancelled{string(verdict)}, err)
}

func endedEntry(id invalidation.EntryID, e invalidation.Ended) entryRead {
	read := entryRead{
		ID: id, Queue: e.Queue, State: e.Outcome, AcceptedAt: &e.Accepted, EndedAt: &e.At, Attempt: &e.Attempt,
		Node: operator.NodeID(e.Node), Token: e.Token, Class: e.Class, Result: e.Result,
	}
	if e.Token != 0 {
		ms := e.Ran.Milliseconds()
		read.RanMS = &ms
	}
	if e.Outcome == "failed" {
		read.Error = e.Reason
	} else {
		read.Reason = e.Reason
	}
	return read
}
