package changelog

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// Impact returns the entries that a change implies. It may be called more than once for a change:
// entries run at least once.
type Impact func(ctx context.Context, c Change) ([]Push, error)

// Push is an entry to push, and its queue.
type Push struct {
	Queue string
	invalidation.Push
}

// ErrLoop is returned for a push that is deeper than penstock.depth_max; the message names two
// queues of the loop.
var ErrLoop = errors.New("entries push one another without end")

// Handler runs the entries of a change_log queue. It takes all entries of a lock at once: their pushes are one
// statement for each target queue.
func Handler(db postgres.DB, impact Impact) invalidation.Handler {
	return newHandler(db, func(ctx context.Context, r *invalidation.Run) ([]Push, error) {
		var c Change
		if err := json.Unmarshal(r.Entry.Payload, &c); err != nil {
			return nil, invalidation.Permanent(fmt.Errorf("read change: %w", err))
		}
		return impact(ctx, c)
	})
}

// StatementHandler is a Handler for queues whose statement "impact" returns the entries that a
// change implies.
func StatementHandler(db postgres.DB) invalidation.Handler {
	return newHandler(db, func(ctx context.Context, r *invalidation.Run) (pushes []Push, err error) {
		err = postgres.InTx(ctx, db, func(tx pgx.Tx) error {
			rows, err := invalidation.Statement(ctx, tx, "impact", []*invalidation.Run{r}, r.Entry.Payload)
			pushes = make([]Push, len(rows))
			for i := range rows {
				err = errors.Join(err, pushes[i].read(rows[i]))
			}
			return err
		})
		return pushes, err
	})
}

// read reads a push from the columns of a row. One that is none of a push fails the entry for good: to leave it out
// would push something else than the statement says.
func (p *Push) read(row json.RawMessage) error {
	var columns struct {
		Queue      string
		Payload    json.RawMessage
		LockKey    string `json:"lock_key"`
		Flow, Name string
		Priority   *int16
	}
	in := json.NewDecoder(bytes.NewReader(row))
	in.DisallowUnknownFields()
	if err := in.Decode(&columns); err != nil {
		return invalidation.Permanent(fmt.Errorf("read the entries that a change implies, with columns queue, "+
			"payload, lock_key, flow, name and priority: %w", err))
	}
	c := columns
	*p = Push{c.Queue, invalidation.Push{
		Payload: c.Payload, LockKey: c.LockKey, Flow: c.Flow, Name: c.Name,
		Priority: c.Priority,
	}}
	return nil
}

func newHandler(db postgres.DB, implied func(context.Context, *invalidation.Run) ([]Push, error)) *handler {
	return &handler{db: db, implied: implied, queues: invalidation.NewHandles(db, nil)}
}

type handler struct {
	db      postgres.DB
	implied func(context.Context, *invalidation.Run) ([]Push, error)
	queues  *invalidation.Handles
}

// change is a run, and the entries that its change implies.
type change struct {
	run    *invalidation.Run
	pushes []Push
	at     int // in the batch
}

// Handle runs one entry.
func (h *handler) Handle(ctx context.Context, r *invalidation.Run) (json.RawMessage, error) {
	return nil, h.HandleBatch(ctx, []*invalidation.Run{r})[0].Err
}

// HandleBatch pushes what the changes of runs imply, all in one transaction. An error of the impact is that of its
// change. After an error of the push that may be of one of them each is pushed by itself, so that only those fail that
// are the reason. Any other error is that of all: each change by itself would meet it as well.
func (h *handler) HandleBatch(ctx context.Context, runs []*invalidation.Run) []invalidation.BatchAnswer {
	answers := make([]invalidation.BatchAnswer, len(runs))
	changes := make([]change, 0, len(runs))
	for i, r := range runs {
		pushes, err := h.implied(ctx, r)
		answers[i].Err = err
		switch {
		case err == nil:
			changes = append(changes, change{r, pushes, i})
		case ctx.Err() != nil || errors.Is(err, postgres.ErrNotBegun):
			for j := range answers {
				answers[j].Err = cmp.Or(answers[j].Err, err)
			}
			return answers
		}
	}
	err := h.push(ctx, changes)
	alone := err != nil && len(changes) > 1 && ofOne(ctx, err)
	for i, c := range changes {
		if alone {
			err = h.push(ctx, changes[i:i+1])
			alone = err == nil || !away(ctx, err)
		}
		answers[c.at].Err = err
	}
	return answers
}

// ofOne reports whether an error of the push of many changes may be of one of them: not of the end of the run, of the
// connection to the database, of its state, or of other transactions. A statement that takes too long for many changes
// may not for one.
func ofOne(ctx context.Context, err error) bool {
	return !away(ctx, err) && (postgres.Code(err) == "" || postgres.Code(err) == postgres.QueryCanceled ||
		!postgres.Passes(err))
}

// away reports whether an error is that of the run's end, or of a database that is unavailable: the push of any other
// change would meet it as well. A conflict with another transaction is none, since it may be about the keys of one.
func away(ctx context.Context, err error) bool {
	if ctx.Err() != nil || errors.Is(err, postgres.ErrNotBegun) {
		return true
	}
	return postgres.Disconnected(err) || postgres.Code(err) != "" && postgres.Unavailable(err)
}

// push pushes what changes imply, all or nothing.
func (h *handler) push(ctx context.Context, changes []change) error {
	var order []string
	pushes := map[string][]invalidation.Push{}
	runs := make([]*invalidation.Run, len(changes))
	for i, c := range changes {
		runs[i] = c.run
		for _, p := range c.pushes {
			if pushes[p.Queue] == nil {
				order = append(order, p.Queue)
			}
			pushes[p.Queue] = append(pushes[p.Queue], p.Push)
		}
	}
	if len(order) == 0 {
		return nil
	}
	// In one order for all, as push_many sorts the entries of a push: two transactions that wait for each other's keys
	// in two queues would otherwise deadlock.
	slices.Sort(order)
	queues := make([]*invalidation.Queue, len(order))
	for i, name := range order {
		q, err := h.open(ctx, name)
		if err != nil {
			return err
		}
		queues[i] = q
	}
	return postgres.InTx(ctx, h.db, func(tx pgx.Tx) error {
		pid, err := begin(ctx, tx, runs)
		if err != nil {
			return err
		}
		for _, q := range queues {
			// A change may imply any number of entries: the push takes as long as the server works on it.
			err := postgres.Attend(ctx, tx, pid, func(ctx context.Context) error {
				_, err := q.WithTx(tx).Push(ctx, pushes[q.Name]...)
				return err
			})
			if err != nil {
				return loop(err)
			}
		}
		return nil
	})
}

// begin prepares a transaction for the pushes of runs, and returns the server's process.
func begin(ctx context.Context, tx pgx.Tx, runs []*invalidation.Run) (pid int32, err error) {
	ctx, cancel := postgres.Bounded(ctx)
	defer cancel()
	if err := Descend(ctx, tx, runs...); err != nil {
		return 0, err
	}
	return postgres.Backend(ctx, tx)
}

func (h *handler) open(ctx context.Context, name string) (*invalidation.Queue, error) {
	ctx, cancel := postgres.Bounded(ctx)
	defer cancel()
	return h.queues.Get(ctx, name)
}

// Descend sets the depth of later pushes of tx, direct ones and those by triggers of watched
// tables: one more than the greatest depth of these runs, which are of one queue. Handlers that
// write to watched tables call it first. Without runs it does nothing.
func Descend(ctx context.Context, tx pgx.Tx, runs ...*invalidation.Run) error {
	if len(runs) == 0 {
		return nil
	}
	ids := make([]invalidation.EntryID, len(runs))
	for i, r := range runs {
		ids[i] = r.Entry.ID
	}
	if _, err := tx.Exec(ctx, `SELECT penstock.work_for($1, $2)`, runs[0].Queue.ID, ids); err != nil {
		return fmt.Errorf("work for entry %d of queue %q: %w", ids[0], runs[0].Queue.Name, err)
	}
	return nil
}

// loop wraps the refusal of a push that is too deep in ErrLoop, which fails the entry for good.
func loop(err error) error {
	if postgres.Code(err) == "PS011" {
		return fmt.Errorf("%w: %w", err, ErrLoop)
	}
	return err
}
