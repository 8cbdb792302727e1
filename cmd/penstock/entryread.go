package main

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/penstock/penstock/pkg/client"
	"github.com/penstock/penstock/pkg/operator"
)

// entryAnswer is the API's answer about an entry: its state and the reasons why it does not run, or its outcome.
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

// awaited is an entry, with the key and the flow of its push where they are known: with them scope push may read it.
type awaited struct {
	id        int64
	key, flow string
}

// readEntry reads an entry. With a wait that is not zero the API answers when the entry has ended, at the latest after
// that time.
func readEntry(ctx context.Context, api conn, entry awaited, wait time.Duration) (entryAnswer, error) {
	var e entryAnswer
	path := at("/v1/entries/%v", entry.id) + query("wait", wait, "flow", entry.flow)
	err := api.do(ctx, client.RawRequest{Method: "GET", Path: path, Key: entry.key}, &e)
	if err == nil && !e.EndedAt.IsZero() {
		e.Ended = &operator.EntryOutcome{
			Outcome: e.State, At: e.EndedAt, Accepted: e.AcceptedAt, Attempt: e.Attempt,
			NodeID: e.Node, Token: e.Token, RunSeconds: e.RanMS / 1000,
			Class: e.Class, Reason: e.Error + e.Reason, Result: e.Result, // one of the two reasons is empty
		}
	}
	return e, err
}

func entryDetail(ctx context.Context, api conn, id int64) (operator.EntryDetail, error) {
	e, err := readEntry(ctx, api, awaited{id: id}, 0)
	return e.EntryDetail, err
}

// entryThere returns the error of reading an entry, living or ended.
func entryThere(api conn) func(context.Context, int64) error {
	return func(ctx context.Context, id int64) error {
		_, err := readEntry(ctx, api, awaited{id: id}, 0)
		return err
	}
}

// explain returns the reasons why an entry does not run; one that has ended has its end as the only reason.
func explain(ctx context.Context, api conn, id int64) (operator.Explanation, error) {
	e, err := readEntry(ctx, api, awaited{id: id}, 0)
	if end := e.Ended; end != nil {
		ago := age(time.Since(end.At).Seconds())
		e.Reasons = []operator.Reason{{
			Code:    "ended",
			Text:    fmt.Sprintf("it ended %s ago: %s%s", ago, end.Outcome, after(", ", end.Reason)),
			Numbers: map[string]any{"outcome": end.Outcome, "ended_at": end.At, "attempt": end.Attempt},
		}}
	}
	return operator.Explanation{ID: id, Queue: e.Queue, State: e.State, Reasons: e.Reasons}, err
}
