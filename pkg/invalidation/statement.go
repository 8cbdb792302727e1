package invalidation

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/penstock/penstock/internal/postgres"
)

// SetStatements declares what task nodes run for the entries of a queue, by names that go with its kind: "run" for task
// and cron, "impact" for change_log, "map" and "reduce" for batch. An empty map takes it away.
func SetStatements(ctx context.Context, db postgres.DB, queue string, statements map[string]string, by By) error {
	if statements == nil {
		statements = map[string]string{}
	}
	const sql = `SELECT penstock.set_statements($1, $2, $3, coalesce($4, current_user::text))`
	return control(ctx, db, fmt.Sprintf("set statements of queue %q", queue), sql, queue, statements, given(by.Reason),
		given(by.Actor))
}

// beginStatementSQL says for what the transaction works, and gives the planner the choices back that sessions of ours
// may lack: the statement is not one of ours.
const beginStatementSQL = `
SELECT penstock.work_for($1, $2), set_config('enable_seqscan', 'on', true), set_config('enable_hashjoin', 'on', true),
       set_config('enable_mergejoin', 'on', true)`

// Statement runs a statement of the queue of these runs in tx, and returns the first column of its rows (for
// "impact" each whole row) as JSON: a value that is none becomes a text, a null becomes nil. What it pushes
// is one deeper than what runs. ErrInvalid: the queue does not declare it.
func Statement(ctx context.Context, tx pgx.Tx, name string, runs []*Run,
	args ...json.RawMessage,
) ([]json.RawMessage, error) {
	q := runs[0].Queue
	text, declared := q.Config.Statements[name]
	if !declared {
		return nil, fmt.Errorf("queue %q has no statement %q: %w", q.Name, name, ErrInvalid)
	}
	ids := make([]EntryID, len(runs))
	for i, r := range runs {
		ids[i] = r.Entry.ID
	}
	if _, err := tx.Exec(ctx, beginStatementSQL, q.ID, ids); err != nil {
		return nil, q.errorf("run statement of", err)
	}
	// The types go with the arguments: `$1 -> 'field'` alone does not say what $1 is.
	values, types := make([][]byte, len(args)), make([]uint32, len(args))
	for i, a := range args {
		values[i], types[i] = a, pgtype.JSONBOID
	}
	result := tx.Conn().PgConn().ExecParams(ctx, text, values, types, nil, nil).Read()
	if result.Err != nil {
		return nil, fmt.Errorf("run statement %q: %w", name, result.Err)
	}
	column := make([]json.RawMessage, len(result.Rows))
	for i, row := range result.Rows {
		if len(row) == 0 || row[0] == nil {
			continue
		}
		column[i] = row[0]
		if !json.Valid(row[0]) {
			column[i], _ = json.Marshal(string(row[0])) // a text has JSON
		}
	}
	return column, nil
}

// StatementHandler runs the entries of q by its statement "run". What that changes and the end of the entry
// commit together. In a mergeable queue it runs once for all entries of a lock, with their payloads merged by
// the queue's rule.
func StatementHandler(db postgres.DB, q *Queue) Handler {
	if q.Config.Mergeable {
		return mergedStatement{db}
	}
	return HandlerFunc(func(ctx context.Context, r *Run) (json.RawMessage, error) {
		return nil, runStatement(ctx, db, []*Run{r})
	})
}

type mergedStatement struct{ db postgres.DB }

// Handle implements Handler.
func (m mergedStatement) Handle(ctx context.Context, r *Run) (json.RawMessage, error) {
	return nil, runStatement(ctx, m.db, []*Run{r})
}

// HandleBatch implements BatchHandler.
func (m mergedStatement) HandleBatch(ctx context.Context, runs []*Run) []BatchAnswer {
	answers := make([]BatchAnswer, len(runs))
	err := runStatement(ctx, m.db, runs)
	for i := range answers {
		answers[i].Err = err
	}
	return answers
}

func runStatement(ctx context.Context, db postgres.DB, runs []*Run) error {
	return postgres.InTx(ctx, db, func(tx pgx.Tx) error {
		payload := runs[0].Entry.Payload
		if len(runs) > 1 {
			payloads := make([]json.RawMessage, len(runs))
			for i, r := range runs {
				payloads[i] = r.Entry.Payload
			}
			const sql = `SELECT penstock.merge_payloads($1, $2)`
			if err := tx.QueryRow(ctx, sql, runs[0].Queue.Config.Merge, payloads).Scan(&payload); err != nil {
				return fmt.Errorf("merge %d entries: %w", len(runs), err)
			}
		}
		rows, err := Statement(ctx, tx, "run", runs, payload)
		if err != nil {
			return err
		}
		var result json.RawMessage
		if len(rows) > 0 {
			result = rows[0]
		}
		for _, r := range runs {
			if err := r.FinishTx(ctx, tx, result); err != nil {
				return err
			}
		}
		return nil
	})
}
