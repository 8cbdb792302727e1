package web

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"html/template"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
	"github.com/penstock/penstock/web/format"
	"github.com/penstock/penstock/web/picture"
)

// entryView is the page of one entry, before or after its end.
type entryView struct {
	operator.EntryDetail
	Failure   *operator.FailureDetail
	Waterfall template.HTML
	Data      template.HTML
	Checks    []check
	Blocked   int // checks that do not hold
	Attempts  []attemptRow
	Payload   body
	Result    body
	Measured  []fact
	Node      string
	TraceID   string
	TraceURL  string // of the trace in another system; empty: none is configured
	Callbacks []callbackRow
	Progress  *progress
}

// Title is that of the page.
func (v entryView) Title() string { return fmt.Sprintf("Entry %d", v.ID) }

// Waits reports whether the page explains why the entry does not run.
func (v entryView) Waits() bool { return v.Entry != nil && v.Entry.State != "computing" }

// attemptRow is an attempt that ended in an error.
type attemptRow struct {
	Number  int       `json:"attempt"`
	At      time.Time `json:"at"` // of its end
	Error   string    `json:"error"`
	Class   string    `json:"class"`
	Node    int64     `json:"node"`
	RunMS   float64   `json:"run_ms"`
	Seconds float64   `json:"-"`
	Where   string    `json:"-"`
}

// progress is the last report of a run.
type progress struct {
	Done      float64   `json:"done"`
	Message   string    `json:"message"`
	UpdatedAt time.Time `json:"updated_at"`
}

func (d *Dashboard) showEntry(ctx context.Context, q query) (any, error) {
	id := q.Int("id")
	if id <= 0 {
		return nil, fmt.Errorf("%q is not the id of an entry: %w", q.Get("id"), invalidation.ErrEntryNotFound)
	}
	detail, err := cached(ctx, d, keyOf("entry", id), beat,
		func(ctx context.Context) (operator.EntryDetail, error) { return d.db.Entry(ctx, id) })
	if err != nil {
		return nil, err
	}
	v := entryView{EntryDetail: detail, TraceID: traceID(detail.Trace)}
	history, payload := detail.History, detail.Payload
	if detail.State == "failed" {
		failure, err := cached(ctx, d, keyOf("failure", id), 5*time.Second,
			func(ctx context.Context) (operator.FailureDetail, error) { return d.db.Failure(ctx, id) })
		if err != nil && !errors.Is(err, invalidation.ErrEntryNotFound) {
			return nil, err
		}
		if err == nil {
			v.Failure, v.TraceID = &failure, traceID(failure.Trace)
			history, payload = failure.History, failure.Payload
		}
	}
	names, err := d.nodeNames(ctx)
	if err != nil {
		return nil, err
	}
	v.Attempts = attemptsOf(history, names)
	v.Payload = bodyFor(payload, q.role)
	if err := json.Unmarshal(detail.Progress, &v.Progress); err != nil {
		v.Progress = nil // there is none
	}
	meta := json.RawMessage(nil)
	if e := detail.Ended; e != nil {
		v.Result = bodyFor(e.Result, q.role)
		v.Node = names[e.NodeID]
		meta, err = cached(ctx, d, keyOf("meta", id), 5*time.Second,
			func(ctx context.Context) (json.RawMessage, error) { return d.db.RunMeta(ctx, detail.Queue, id) })
		if err != nil {
			return nil, err
		}
	}
	v.Measured = measured(meta)
	if e := detail.Entry; e != nil {
		if e.NodeID != nil {
			v.Node = names[*e.NodeID]
		}
		if v.Checks, v.Blocked, err = d.checks(ctx, *e); err != nil {
			return nil, err
		}
	}
	if v.TraceID != "" && d.cfg.TraceURL != "" {
		v.TraceURL = strings.ReplaceAll(d.cfg.TraceURL, "{trace}", v.TraceID)
	}
	if v.Ended != nil || v.Failure != nil {
		if v.Callbacks, err = d.callbacks(ctx, id); err != nil {
			return nil, err
		}
	}
	fall := waterfall(v, meta, time.Now())
	v.Waterfall, v.Data = fall.HTML(), picture.Data(fall.Table())
	return v, nil
}

func (d *Dashboard) nodeNames(ctx context.Context) (map[operator.NodeID]string, error) {
	nodes, err := d.nodes(ctx)
	if err != nil {
		return nil, err
	}
	names := make(map[operator.NodeID]string, len(nodes))
	for _, n := range nodes {
		names[n.ID] = n.Name
	}
	return names, nil
}

func attemptsOf(history json.RawMessage, names map[operator.NodeID]string) []attemptRow {
	var rows []attemptRow
	if err := json.Unmarshal(history, &rows); err != nil {
		return nil // there is none
	}
	for i := range rows {
		rows[i].Seconds = rows[i].RunMS / 1000
		rows[i].Where = names[operator.NodeID(rows[i].Node)]
		if rows[i].Where == "" && rows[i].Node != 0 {
			rows[i].Where = strconv.FormatInt(rows[i].Node, 10)
		}
	}
	return rows
}

// traceID returns the trace of a traceparent (W3C Trace Context).
func traceID(parent string) string {
	parts := strings.Split(parent, "-")
	if len(parts) < 3 || len(parts[1]) != 32 {
		return ""
	}
	return parts[1]
}

// runMeta are the measurements of a call to a worker.
type runMeta struct {
	Model     string  `json:"model"`
	Instance  string  `json:"instance"`
	Slot      *int    `json:"slot"`
	RunMS     float64 `json:"run_ms"`
	FirstMS   float64 `json:"first_byte_ms"`
	GPUMS     float64 `json:"gpu_ms"`
	Status    int     `json:"status"`
	Members   int     `json:"batch"`
	TokensIn  int64   `json:"tokens_in"`
	TokensOut int64   `json:"tokens_out"`
}

func readMeta(meta json.RawMessage) runMeta {
	var m runMeta
	_ = json.Unmarshal(meta, &m) // a handler may keep what it likes: what is not ours is not displayed
	return m
}

// measured lists the measurements of the last run that there are.
func measured(meta json.RawMessage) []fact {
	m := readMeta(meta)
	var facts []fact
	add := func(label, text string, given bool) {
		if given {
			facts = append(facts, fact{label, text})
		}
	}
	add("model", m.Model, m.Model != "")
	add("instance", m.Instance, m.Instance != "")
	if m.Slot != nil {
		add("slot", strconv.Itoa(*m.Slot), m.Instance != "")
	}
	add("first byte after", milliseconds(m.FirstMS), m.FirstMS > 0)
	add("GPU time", milliseconds(m.GPUMS), m.GPUMS > 0)
	add("entries in the call", strconv.Itoa(m.Members), m.Members > 1)
	add("tokens in, out", format.Count(m.TokensIn)+", "+format.Count(m.TokensOut), m.TokensIn+m.TokensOut > 0)
	add("status of the worker", strconv.Itoa(m.Status), m.Status > 0)
	return facts
}

// waterfall is the way of an entry from push to outcome. Of earlier attempts the ends and durations
// are known.
func waterfall(v entryView, meta json.RawMessage, now time.Time) picture.Waterfall {
	w := picture.Waterfall{Now: now}
	add := func(name, detail string, kind picture.PhaseKind, start, end time.Time, attempt int) {
		w.Phases = append(w.Phases, picture.Phase{
			Name: name, Detail: detail, Kind: kind, Start: start, End: end,
			Open: end.IsZero() && kind != picture.PhasePush, Attempt: attempt,
		})
	}
	at := time.Time{}
	switch {
	case v.Entry != nil:
		at = v.Entry.CreatedAt
	case v.Ended != nil:
		at = v.Ended.Accepted
	}
	if at.IsZero() {
		return w
	}
	add("accepted", "", picture.PhasePush, at, time.Time{}, 0)
	for i, a := range v.Attempts {
		number := i + 1
		start := a.At.Add(-time.Duration(a.RunMS * float64(time.Millisecond)))
		if start.After(at) {
			add("waits", "", picture.PhaseWait, at, start, number)
		}
		add("runs", a.Where+" "+a.Class, picture.PhaseFailed, start, a.At, number)
		at = a.At
	}
	if e := v.Ended; e != nil {
		endedWaterfall(&w, v, readMeta(meta), at)
		return w
	}
	e := v.Entry
	number := len(v.Attempts) + 1
	if e.DueAt != nil && e.DueAt.After(at) {
		due := *e.DueAt
		if due.After(now) {
			add("not due", "", picture.PhaseWait, at, time.Time{}, number)
			return w
		}
		add("not due", "", picture.PhaseWait, at, due, number)
		at = due
	}
	if e.ClaimedAt == nil {
		add("waits", "", picture.PhaseWait, at, time.Time{}, number)
		return w
	}
	add("waits", "", picture.PhaseWait, at, *e.ClaimedAt, number)
	add("runs", v.Node, picture.PhaseCall, *e.ClaimedAt, time.Time{}, number)
	return w
}

// endedWaterfall adds the last wait, the last run and the outcome.
func endedWaterfall(w *picture.Waterfall, v entryView, m runMeta, at time.Time) {
	e := v.Ended
	number := len(v.Attempts) + 1
	start := e.At.Add(-time.Duration(e.RunSeconds * float64(time.Second)))
	if e.Outcome != "failed" || len(v.Attempts) == 0 {
		if start.After(at) {
			w.Phases = append(w.Phases, picture.Phase{
				Name: "waits", Kind: picture.PhaseWait, Start: at,
				End: start, Attempt: number,
			})
		}
		if e.RunSeconds > 0 {
			called := e.At.Add(-time.Duration(m.RunMS * float64(time.Millisecond)))
			if m.Instance != "" && called.After(start) {
				w.Phases = append(w.Phases, picture.Phase{
					Name: "slot", Detail: m.Instance, Kind: picture.PhaseSlot, Start: start, End: called,
					Attempt: number,
				})
				start = called
			}
			addRun(w, strings.TrimSpace(v.Node+" "+m.Instance), start, e.At, m, number)
		}
	}
	w.Phases = append(w.Phases, picture.Phase{
		Name: e.Outcome, Detail: e.Class, Kind: endKind(e.Outcome, picture.PhaseFinish),
		Start: e.At,
	})
	for _, c := range v.Callbacks {
		w.Phases = append(w.Phases, picture.Phase{
			Name: "callback", Detail: c.State, Kind: endKind(c.State, picture.PhaseCallback), Start: c.At, End: c.Ended,
			Open: c.Ended.IsZero(),
		})
	}
}

// endKind is the kind of an end: of one that failed or expired that of a failed run, else good.
func endKind(outcome string, good picture.PhaseKind) picture.PhaseKind {
	if outcome == "failed" || outcome == "expired" {
		return picture.PhaseFailed
	}
	return good
}

// addRun adds the last run: to its end, or, where the begin of an answer was measured, to that and from there
// to the end.
func addRun(w *picture.Waterfall, detail string, start, end time.Time, m runMeta, attempt int) {
	add := func(name, detail string, kind picture.PhaseKind, start, end time.Time) {
		w.Phases = append(w.Phases, picture.Phase{
			Name: name, Detail: detail, Kind: kind, Start: start, End: end, Attempt: attempt,
		})
	}
	first := start.Add(time.Duration(m.FirstMS * float64(time.Millisecond)))
	if m.FirstMS <= 0 || !first.Before(end) {
		add("runs", detail, picture.PhaseCall, start, end)
		return
	}
	add("to first byte", detail, picture.PhaseCall, start, first)
	add("answer", "", picture.PhaseStream, first, end)
}

// callbackRow is a callback that reports an end of the entry.
type callbackRow struct {
	operator.SentCallback
	State string
	Ended time.Time // zero: it has not ended
}

// callbacks returns the callbacks of an entry, oldest first.
func (d *Dashboard) callbacks(ctx context.Context, id int64) ([]callbackRow, error) {
	sent, err := cached(ctx, d, keyOf("callbacks", id), 2*time.Second,
		func(ctx context.Context) ([]operator.SentCallback, error) { return d.db.Callbacks(ctx, id, 3) })
	if err != nil {
		return nil, err
	}
	rows := make([]callbackRow, 0, len(sent))
	for _, s := range slices.Backward(sent) {
		found, err := cached(ctx, d, keyOf("entry", s.ID), beat,
			func(ctx context.Context) (operator.EntryDetail, error) { return d.db.Entry(ctx, s.ID) })
		if errors.Is(err, invalidation.ErrEntryNotFound) {
			continue // its outcome is kept no longer
		}
		if err != nil {
			return nil, err
		}
		row := callbackRow{SentCallback: s, State: found.State}
		if found.Ended != nil {
			row.Ended = found.Ended.At
		}
		rows = append(rows, row)
	}
	return rows, nil
}

func milliseconds(ms float64) string { return orDash(ms/1000, secondsText) }
