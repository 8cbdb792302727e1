package invalidation

import (
	"context"
	"encoding/json"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"

	"github.com/penstock/penstock/internal/postgres"
)

// SetStatements declares the SQL that task nodes run for the entries of a queue, by names that go
// with its kind: "run" for task and cron, "impact" for change_log, "map" and "reduce" for batch. An
// empty map takes it away.
func SetStatements(ctx context.Context, db postgres.DB, queue string, statements map[string]string, by By) error {
	if statements == nil {
		statements = map[string]string{}
	}
	const sql = `SELECT penstock.set_statements($1, $2, $3, coalesce($4, current_user::text))`
	return control(ctx, db, fmt.Sprintf("set statements of queue %q", queue), sql, queue, statements,
		postgres.Given(by.Reason), postgres.Given(by.Actor))
}

// beginStatementSQL says for what the transaction works, and gives the planner the choices back that sessions of ours
// may lack: the statement is not one of ours. It returns the server's process, which is watched meanwhile.
const beginStatementSQL = `
SELECT ` + postgres.UnboundedSQL + `, penstock.work_for($1, $2), pg_catalog.set_config('enable_seqscan', 'on', true),
       pg_catalog.set_config('enable_hashjoin', 'on', true), pg_catalog.set_config('enable_mergejoin', 'on', true)`

// Statement runs a statement of the queue of these runs in tx, and returns the first column of its
// rows (for "impact" each whole row) as JSON: a value that is none becomes a text, a null becomes
// nil. Entries that it pushes are one deeper than those of the runs. ErrInvalid: the queue does not
// declare it.
func Statement(ctx context.Context, tx pgx.Tx, name string, runs []*Run,
	args ...json.RawMessage,
) ([]json.RawMessage, error) {
	q := runs[0].Queue
	text, declared := q.Statements[name]
	if !declared {
		return nil, fmt.Errorf("queue %q has no statement %q: %w", q.Name, name, ErrInvalid)
	}
	ids := make([]EntryID, len(runs))
	for i, r := range runs {
		ids[i] = r.Entry.ID
	}
	pid, err := beginStatement(ctx, tx, q, ids)
	if err != nil {
		return nil, err
	}
	// The types go with the arguments: `$1 -> 'field'` alone does not say what $1 is.
	values, types := make([][]byte, len(args)), make([]uint32, len(args))
	for i, a := range args {
		values[i], types[i] = a, pgtype.JSONBOID
	}
	var result *pgconn.Result
	err = postgres.Attend(ctx, tx, pid, func(ctx context.Context) error {
		result = tx.Conn().PgConn().ExecParams(ctx, text, values, types, nil, nil).Read()
		return result.Err
	})
	if err != nil {
		return nil, fmt.Errorf("run statement %q: %w", name, err)
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

// beginStatement prepares the session for a statement of queue q that works for these entries.
func beginStatement(ctx context.Context, tx pgx.Tx, q *Queue, ids []EntryID) (pid int32, err error) {
	ctx, cancel := postgres.Bounded(ctx)
	defer cancel()
	row := tx.QueryRow(ctx, beginStatementSQL, q.ID, ids)
	if err := row.Scan(&pid, nil, nil, nil, nil, nil, nil, nil, nil); err != nil {
		return 0, q.errorf("run statement of", err)
	}
	return pid, nil
}

// StatementHandler runs the entries of q by its statement "run". Its changes and the end of the
// entry commit together. In a mergeable queue it runs once for all entries of a lock, with their
// payloads merged by the queue's rule.
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

// HandleBatch implements BatchHandler. After an error that is of the payloads or the statement, each entry runs by
// itself, so that only those fail that are the reason.
func (m mergedStatement) HandleBatch(ctx context.Context, runs []*Run) []BatchAnswer {
	answers := make([]BatchAnswer, len(runs))
	err := runStatement(ctx, m.db, runs)
	alone := err != nil && len(runs) > 1
	for i, r := range runs {
		if alone = alone && ofPayload(ctx, err); alone {
			err = runStatement(ctx, m.db, []*Run{r})
		}
		answers[i].Err = err
	}
	return answers
}

// ofPayload says that the error of a statement, nil included, may be of the payload of one entry: not of the database,
// of the statement itself (class 42), or of the end of the run.
func ofPayload(ctx context.Context, err error) bool {
	return ctx.Err() == nil && !postgres.Passes(err) && !strings.HasPrefix(postgres.Code(err), "42")
}

func runStatement(ctx context.Context, db postgres.DB, runs []*Run) error {
	return postgres.InTx(ctx, db, func(tx pgx.Tx) (err error) {
		payload := runs[0].Entry.Payload
		if len(runs) > 1 {
			payloads := make([]json.RawMessage, len(runs))
			for i, r := range runs {
				payloads[i] = r.Entry.Payload
			}
			if payload, err = mergePayloads(ctx, tx, runs[0].Queue, payloads); err != nil {
				return err
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
		ctx, cancel := postgres.Bounded(ctx)
		defer cancel()
		for _, r := range runs {
			if err := r.FinishTx(ctx, tx, result); err != nil {
				return err
			}
		}
		return nil
	})
}

// mergePayloads merges payloads by the rule of queue q.
func mergePayloads(ctx context.Context, tx pgx.Tx, q *Queue, payloads []json.RawMessage) (json.RawMessage, error) {
	ctx, cancel := postgres.Bounded(ctx)
	defer cancel()
	const sql = `SELECT penstock.merge_payloads($1, $2)`
	var merged json.RawMessage
	if err := tx.QueryRow(ctx, sql, q.Config.Merge, payloads).Scan(&merged); err != nil {
		return nil, fmt.Errorf("merge %d entries: %w", len(payloads), err)
	}
	return merged, nil
}
