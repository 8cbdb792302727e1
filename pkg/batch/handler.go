package batch

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// Part is one part of a batch, as Map receives it.
type Part struct {
	Batch  int64
	No     int // from 1
	Items  []json.RawMessage
	Detail json.RawMessage // the payload of its entry, with the batch's detail in it
	Run    *invalidation.Run
}

// ErrNotFound is returned for a batch that does not exist.
var ErrNotFound = errors.New("batch not found")

// Work holds the functions that process the batches of a queue.
type Work struct {
	// Map processes a part and returns its result, nil for none. Its error decides how the entry
	// ends, as for any handler.
	Map func(ctx context.Context, p Part) (json.RawMessage, error)
	// Reduce makes the batch's result from the results of its parts, in the order of the parts. It
	// runs when all parts are done, in batches whose CompletionQueue has this Work. Nil: the batch
	// has no result.
	Reduce func(ctx context.Context, results iter.Seq2[json.RawMessage, error]) (json.RawMessage, error)
}

// Handler runs the entries of a queue of batches.
func Handler(db postgres.DB, w Work) invalidation.Handler { return &handler{db: db, work: w} }

// StatementHandler runs the entries of batch queues by the queues' statements "map" and "reduce".
// The changes that map makes and the part's result commit together.
func StatementHandler(db postgres.DB) invalidation.Handler { return &handler{db: db, declared: true} }

type handler struct {
	db       postgres.DB
	work     Work
	declared bool // by statements of the queue: the node counts interruptions of all steps

	splits invalidation.Interruptions // of Go handlers
}

// task is the payload of an entry of a batch.
type task struct {
	Batch  int64  `json:"batch"`
	Step   string `json:"step"`
	Part   int    `json:"part"`
	Status string `json:"status"`
}

// Handle runs one step of a batch.
func (h *handler) Handle(ctx context.Context, r *invalidation.Run) (json.RawMessage, error) {
	var t task
	if err := json.Unmarshal(r.Entry.Payload, &t); err != nil {
		return nil, invalidation.Permanent(fmt.Errorf("read step of a batch: %w", err))
	}
	switch t.Step {
	case "split":
		split := invalidation.HandlerFunc(func(ctx context.Context, r *invalidation.Run) (json.RawMessage, error) {
			return nil, h.split(ctx, t, r)
		})
		if h.declared {
			return split(ctx, r)
		}
		return h.splits.Wrap(split).Handle(ctx, r)
	case "part":
		return nil, h.part(ctx, t, r)
	case "end":
		if t.Status != "done" || (h.work.Reduce == nil && r.Queue.Statements["reduce"] == "") {
			return nil, nil
		}
		return nil, h.reduce(ctx, t, r)
	}
	return nil, invalidation.Permanent(fmt.Errorf("batch %d has no step %q", t.Batch, t.Step))
}

// ownsSQL reads whether entry $3 of queue $2 splits or completes batch $1. Any client that can push
// to the queue can choose a payload, so the ids in a payload prove nothing.
const ownsSQL = `
SELECT EXISTS (SELECT FROM penstock.batch WHERE id = $1 AND queue_id = $2 AND split_entry_id = $3),
       EXISTS (SELECT FROM penstock.batch WHERE id = $1 AND completion_queue_id = $2 AND completion_entry_id = $3),
       coalesce((SELECT b.status FROM penstock.batch b WHERE b.id = $1 AND b.ended_at IS NOT NULL), ''),
       coalesce((SELECT b.problem FROM penstock.batch b WHERE b.id = $1), '')`

// owns returns an error that wraps ErrNotFound, and fails the entry for good, unless the batch's
// row names this entry. A failure that was retried after the batch had ended fails again: the step cannot be made up
// for, and would end as done without having run.
func (h *handler) owns(ctx context.Context, t task, r *invalidation.Run) error {
	var splits, completes bool
	var ended, problem string
	bounded, cancel := postgres.Bounded(ctx)
	defer cancel()
	err := h.db.QueryRow(bounded, ownsSQL, t.Batch, r.Queue.ID, r.Entry.ID).Scan(&splits, &completes, &ended, &problem)
	switch {
	case err != nil:
		return h.unread(ctx, fmt.Errorf("find batch %d: %w", t.Batch, err))
	case t.Step == "split" && splits && ended != "" && strings.HasPrefix(problem, "split: "):
		return invalidation.Permanent(fmt.Errorf("batch %d has ended as %s (%s): create it anew", t.Batch, ended,
			problem))
	case t.Step == "end" && completes && ended != "":
		return invalidation.Permanent(fmt.Errorf("batch %d has ended as %s (%s): penstock batch retry %[1]d runs its "+
			"completion again", t.Batch, ended, problem))
	case t.Step == "split" && splits, t.Step == "end" && completes:
		return nil
	}
	return invalidation.Permanent(fmt.Errorf("%s of batch %d by entry %d: %w", t.Step, t.Batch, r.Entry.ID,
		ErrNotFound))
}

func (h *handler) split(ctx context.Context, t task, r *invalidation.Run) error {
	if err := h.owns(ctx, t, r); err != nil {
		return err
	}
	err := postgres.InTx(ctx, h.db, func(tx pgx.Tx) error {
		pid, err := postgres.Backend(ctx, tx)
		if err != nil {
			return err
		}
		// The query of the batch is the user's, and takes any time.
		return postgres.Attend(ctx, tx, pid, func(ctx context.Context) error {
			_, err := tx.Exec(ctx, `SELECT penstock.split_batch($1)`, t.Batch)
			return translate(err)
		})
	})
	if err != nil {
		return fmt.Errorf("split batch %d: %w", t.Batch, err)
	}
	return nil
}

// partSQL reads part $2 of batch $1 if it is the part of entry $4 of queue $3.
const partSQL = `
SELECT p.items, p.ended_at IS NOT NULL, coalesce(p.outcome::text, ''), coalesce(p.error, '')
  FROM penstock.batch_part p
  JOIN penstock.batch b ON b.id = p.batch_id
 WHERE p.batch_id = $1 AND p.no = $2 AND b.queue_id = $3 AND p.entry_id = $4`

// part runs Map unless an earlier run has recorded its result already. A part that has ended otherwise fails again: its
// failure was retried by itself, and only a retry of the batch counts the part anew.
func (h *handler) part(ctx context.Context, t task, r *invalidation.Run) error {
	p := Part{Batch: t.Batch, No: t.Part, Detail: r.Entry.Payload, Run: r}
	var ended bool
	var outcome, problem string
	read := func() error {
		return postgres.InTx(ctx, h.db, func(tx pgx.Tx) error {
			ctx, cancel := postgres.Bounded(ctx)
			defer cancel()
			row := tx.QueryRow(ctx, partSQL, t.Batch, t.Part, r.Queue.ID, r.Entry.ID)
			return row.Scan(&p.Items, &ended, &outcome, &problem)
		})
	}
	switch err := read(); {
	case errors.Is(err, pgx.ErrNoRows):
		return invalidation.Permanent(fmt.Errorf("read part %d of batch %d: %w", t.Part, t.Batch, ErrNotFound))
	case err != nil:
		return h.unread(ctx, fmt.Errorf("read part %d of batch %d: %w", t.Part, t.Batch, err))
	case ended && outcome != "done":
		return invalidation.Permanent(fmt.Errorf("part %d of batch %d has ended as %s (%s): penstock batch retry "+
			"%[2]d runs it again", t.Part, t.Batch, outcome, problem))
	case ended:
		return nil
	}
	const sql = `SELECT penstock.finish_batch_part($1, $2, $3, $4, $5, $6)`
	keep := func(db postgres.DB, result json.RawMessage) error {
		return h.record(ctx, db, t, r, sql, result, t.Batch, t.Part, r.Queue.ID, r.Lock.Key, r.Lock.Token)
	}
	if h.declared {
		items, err := json.Marshal(p.Items)
		if err != nil {
			return fmt.Errorf("write items of part %d of batch %d: %w", t.Part, t.Batch, err)
		}
		return h.statement(ctx, r, keep, "map", items, r.Entry.Payload)
	}
	result, err := h.work.Map(ctx, p)
	if err != nil {
		return err
	}
	tries := 0
	return untilAnswered(ctx, unbounded, func() error {
		err := keep(h.db, result)
		tries++
		if tries > 1 && errors.Is(err, invalidation.ErrLockLost) && read() == nil && ended && outcome == "done" {
			return nil // by a try whose answer was lost
		}
		return err
	})
}

// statement runs a statement of the run's queue and records the returned value as the result, in
// one transaction.
func (h *handler) statement(ctx context.Context, r *invalidation.Run, keep func(postgres.DB, json.RawMessage) error,
	name string, args ...json.RawMessage,
) error {
	return postgres.InTx(ctx, h.db, func(tx pgx.Tx) error {
		values, err := invalidation.Statement(ctx, tx, name, []*invalidation.Run{r}, args...)
		if err != nil {
			return err
		}
		return keep(tx, append(values, nil)[0])
	})
}

// resultSQL records the result of Reduce if the lock record still carries the run's token.
const resultSQL = `
WITH mine AS MATERIALIZED (
    SELECT FROM penstock.lock WHERE queue_id = $3 AND lock_key = $4 AND token = $5 FOR KEY SHARE
), kept AS (
    UPDATE penstock.batch SET result = $6
     WHERE id = $1 AND status = 'ending' AND completion_queue_id = $3 AND completion_entry_id = $2
       AND EXISTS (SELECT FROM mine)
    RETURNING id
)
SELECT EXISTS (SELECT FROM kept)`

func (h *handler) reduce(ctx context.Context, t task, r *invalidation.Run) error {
	if err := h.owns(ctx, t, r); err != nil {
		return err
	}
	keep := func(db postgres.DB, result json.RawMessage) error {
		return h.record(ctx, db, t, r, resultSQL, result, t.Batch, r.Entry.ID, r.Queue.ID, r.Lock.Key, r.Lock.Token)
	}
	if h.declared {
		return h.statement(ctx, r, keep, "reduce", r.Entry.Payload)
	}
	read := func(last int) (page []partResult, err error) {
		err = untilAnswered(ctx, overdueMax, func() error {
			page, err = resultsBehind(ctx, h.db, t.Batch, last)
			return err
		})
		return page, err
	}
	result, err := h.work.Reduce(ctx, results(t.Batch, read))
	if err != nil {
		return err
	}
	return untilAnswered(ctx, unbounded, func() error { return keep(h.db, result) })
}

// unread is the error of a step that could not read its batch. Where the database is away, nothing has been done: the
// entry waits without an attempt.
func (h *handler) unread(ctx context.Context, err error) error {
	if !h.declared && ctx.Err() == nil && invalidation.Interrupted(err) {
		return invalidation.ThrottleQueue(time.Second, err)
	}
	return err
}

const (
	// overdueMax is how many reads of a page of results may in a row end at the deadline of a statement: the page
	// may be too large for it.
	overdueMax = 5
	unbounded  = 0
)

// untilAnswered calls a try again while the database is away and ctx lives: the work of a function of the user is done,
// or under way, and would be lost. Unless most is unbounded, it gives up after so many tries in a row that ended at the
// deadline of a statement.
func untilAnswered(ctx context.Context, most int, try func() error) error {
	overdue := 0
	for wait := 100 * time.Millisecond; ; wait = min(2*wait, time.Second) {
		err := try()
		if !invalidation.Interrupted(err) {
			return err
		}
		var unconnected *pgconn.ConnectError
		if !errors.Is(err, context.DeadlineExceeded) || errors.As(err, &unconnected) {
			overdue = 0
		} else if overdue++; overdue == most {
			return err
		}
		select {
		case <-ctx.Done():
			return err
		case <-time.After(wait):
		}
	}
}

// record writes the result of a run, the last parameter of the statement. If the run no longer holds the
// entry's lock, nothing is written and the error says so.
func (h *handler) record(ctx context.Context, db postgres.DB, t task, r *invalidation.Run, sql string,
	result json.RawMessage, args ...any,
) error {
	if result != nil {
		if err := invalidation.CheckJSON(result); err != nil {
			return invalidation.Permanent(invalidation.WithClass("result",
				fmt.Errorf("result of %s of batch %d cannot be recorded: %w", t.Step, t.Batch, err)))
		}
	}
	args = append(args, result)
	ctx, cancel := postgres.Bounded(ctx)
	defer cancel()
	var ours bool
	if err := db.QueryRow(ctx, sql, args...).Scan(&ours); err != nil {
		return fmt.Errorf("record result of %s of batch %d: %w", t.Step, t.Batch, err)
	}
	if !ours {
		return fmt.Errorf("record result of %s of batch %d, entry %d: %w", t.Step, t.Batch, r.Entry.ID,
			invalidation.ErrLockLost)
	}
	return nil
}

// resultsSQL reads a page of results behind part $2.
const resultsSQL = `
SELECT no, result
  FROM penstock.batch_part
 WHERE batch_id = $1 AND no > $2 AND outcome = 'done'
 ORDER BY no
 LIMIT 500`

// Results returns the results of the parts that are done, in the order of the parts, read a page at a time.
func Results(ctx context.Context, db postgres.DB, batch int64) iter.Seq2[json.RawMessage, error] {
	return results(batch, func(last int) ([]partResult, error) { return resultsBehind(ctx, db, batch, last) })
}

type partResult struct {
	No     int
	Result json.RawMessage
}

func resultsBehind(ctx context.Context, db postgres.DB, batch int64, last int) ([]partResult, error) {
	ctx, cancel := postgres.Bounded(ctx)
	defer cancel()
	return pgx.CollectRows(postgres.Query(ctx, db, resultsSQL, batch, last), pgx.RowToStructByPos[partResult])
}

func results(batch int64, read func(last int) ([]partResult, error)) iter.Seq2[json.RawMessage, error] {
	return func(yield func(json.RawMessage, error) bool) {
		last := 0
		for {
			page, err := read(last)
			if err != nil {
				yield(nil, fmt.Errorf("read results of batch %d: %w", batch, err))
				return
			}
			for _, p := range page {
				if !yield(p.Result, nil) {
					return
				}
				last = p.No
			}
			if len(page) == 0 {
				return
			}
		}
	}
}

// translate is invalidation.Translate, with an error of this package for a batch that does not exist.
func translate(err error) error {
	return invalidation.Translate(postgres.Named(err, map[string]error{"PS012": ErrNotFound}))
}
