package api

import (
	"context"
	"encoding/json"
	"errors"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
)

// entryRead is what can be known of an entry: where it stands, or how it ended.
type entryRead struct {
	ID    invalidation.EntryID `json:"id"`
	Queue string               `json:"queue"`
	State string               `json:"state"` // initial, pending, disabled, computing, done, failed, expired, cancelled

	// While it lives: why it is not running, or what it runs on.
	Reasons []invalidation.Reason `json:"reasons,omitempty"`

	// Once it has ended.
	AcceptedAt *time.Time          `json:"accepted_at,omitempty"`
	EndedAt    *time.Time          `json:"ended_at,omitempty"`
	Attempt    *int                `json:"attempt,omitempty"`     // attempts that ended in an error
	Node       invalidation.NodeID `json:"node,omitempty,string"` // random, and more than JavaScript's numbers can tell apart
	Token      invalidation.Token  `json:"token,omitempty"`
	RanMS      *int64              `json:"ran_ms,omitempty"`
	Error      string              `json:"error,omitempty"`  // of a failure
	Class      string              `json:"class,omitempty"`  // of a failure
	Reason     string              `json:"reason,omitempty"` // of an expiry or a cancel
	Result     json.RawMessage     `json:"result,omitempty"`
}

func (a *API) entryRoutes() {
	add(a, route{method: "GET", path: "/v1/entries/{id}", id: "show-entry", summary: "One entry, living or ended", scope: read, of: ofEntry}, a.entry)
}

type inID struct {
	ID int64 `path:"id"`
}

// entry tells the state of a living entry, or the outcome of one that has ended for as long as that is kept.
func (a *API) entry(ctx context.Context, in *inID) (*answer[entryRead], error) {
	id := invalidation.EntryID(in.ID)
	ended, err := invalidation.Outcome(ctx, a.db, id)
	switch {
	case err == nil:
		return &answer[entryRead]{endedEntry(id, ended)}, nil
	case !errors.Is(err, invalidation.ErrState):
		return nil, err
	}
	living, err := invalidation.Explain(ctx, a.db, id)
	if err != nil {
		return nil, err
	}
	return &answer[entryRead]{entryRead{ID: id, Queue: living.Queue, State: living.State, Reasons: living.Reasons}}, nil
}

func endedEntry(id invalidation.EntryID, e invalidation.Ended) entryRead {
	read := entryRead{
		ID: id, Queue: e.Queue, State: e.Outcome, AcceptedAt: &e.Accepted, EndedAt: &e.At, Attempt: &e.Attempt,
		Node: e.Node, Token: e.Token, Class: e.Class, Result: e.Result,
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
