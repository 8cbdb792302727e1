package openaibatch

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/gateway"
)

// status is where a batch is.
type status string

const (
	validating status = "validating"
	failed     status = "failed"
	inProgress status = "in_progress"
	finalizing status = "finalizing"
	completed  status = "completed"
	expired    status = "expired"
	cancelling status = "cancelling"
	cancelled  status = "cancelled"
)

// batchRow is a batch as the table has it.
type batchRow struct {
	ID, Owner, Flow, Endpoint string
	Model                     *string
	QueueID                   *int32
	Input, Output, Errors     string // ids of files
	Status                    status
	Window                    string
	OutputKept                *time.Duration
	Metadata, Flaws           json.RawMessage
	Total, Fed, Done, Failed  int
	In, Cached, Out           int64
	ExpiredLines              int
	Created                   time.Time
	InProgressAt              *time.Time
	ExpiresAt                 time.Time
	FinalizingAt              *time.Time
	CompletedAt               *time.Time
	FailedAt                  *time.Time
	ExpiredAt                 *time.Time
	CancellingAt              *time.Time
	CancelledAt               *time.Time
	OutputThere, ErrorsThere  bool // the files are complete
	Late                      bool // its completion window is over, by the clock of the database
	FailedTurns               int  // since the last one that did not fail, with the one that runs
	Revoked                   bool // its client had tokens, and has none with which it may call

	// Limited is for how long the batch rests after a turn in which the rate of its client's token let in some of its
	// lines alone; 0: it let in all.
	Limited time.Duration `db:"-"`
}

const batchColumns = `
       b.id, b.owner, b.flow, b.endpoint, b.model, b.queue_id, b.input_file_id, b.output_file_id, b.error_file_id,
       b.status, b.completion_window, b.output_kept, b.metadata, b.errors, b.total, b.fed, b.completed, b.failed,
       b.tokens_in, b.tokens_cached, b.tokens_out, b.expired_lines, b.created_at, b.in_progress_at, b.expires_at,
       b.finalizing_at,
       b.completed_at, b.failed_at, b.expired_at, b.cancelling_at, b.cancelled_at,
       EXISTS (SELECT FROM penstock.gateway_file f WHERE f.id = b.output_file_id AND f.completed_at IS NOT NULL),
       EXISTS (SELECT FROM penstock.gateway_file f WHERE f.id = b.error_file_id AND f.completed_at IS NOT NULL),
       b.expires_at <= clock_timestamp(), b.failed_turns,
       (SELECT coalesce(NOT bool_or(t.scopes && '{call,admin}' AND t.revoked_at IS NULL
                        AND coalesce(t.expires_at > clock_timestamp(), true)), false)
          FROM penstock.api_token t
         WHERE t.name = b.owner)`

// isOpen holds for a batch that has not ended, as in the index gateway_batch_work. Here none is finalizing, a status of
// the API of OpenAI: finishSQL writes that time together with the end.
const isOpen = `b.status IN ('validating', 'in_progress', 'finalizing', 'cancelling')`

const batchSQL = `SELECT` + batchColumns + `
  FROM penstock.gateway_batch b
 WHERE b.id = $1 AND b.owner = $2`

const batchesSQL = `SELECT` + batchColumns + `
  FROM penstock.gateway_batch b
  LEFT JOIN penstock.gateway_batch a ON a.id = $2 AND a.owner = $1
 WHERE b.owner = $1 AND ($2 = '' OR (b.created_at, b.id) < (a.created_at, a.id))
 ORDER BY b.created_at DESC, b.id DESC
 LIMIT $3`

// errNoBatch says that a batch does not exist, or belongs to another client.
var errNoBatch = errors.New("no such batch")

func oneBatch(rows pgx.Rows) (batchRow, error) {
	return postgres.One[batchRow](rows, "read batch", errNoBatch)
}

// order is what a client asks for.
type order struct {
	Owner, Flow, Input, Endpoint, Window string
	Lasts                                time.Duration
	Kept                                 *time.Duration
	Metadata                             json.RawMessage
}

// inputSQL finds an input file, and keeps it from being deleted until the batch that needs it is there.
const inputSQL = `
SELECT purpose
  FROM penstock.gateway_file
 WHERE id = $1 AND owner = $2 AND completed_at IS NOT NULL AND deleted_at IS NULL
   AND (expires_at IS NULL OR expires_at > clock_timestamp())
   FOR SHARE`

// lockInput checks the input file of a batch.
func lockInput(ctx context.Context, tx pgx.Tx, o order) error {
	var purpose string
	err := tx.QueryRow(ctx, inputSQL, o.Input, o.Owner).Scan(&purpose)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return gateway.BadRequest(http.StatusBadRequest, "invalid_value", "input_file_id",
			"there is no file %q", o.Input)
	case err != nil:
		return fmt.Errorf("lock input file %s: %w", o.Input, err)
	case purpose != purposeBatch:
		return gateway.BadRequest(http.StatusBadRequest, "invalid_value", "input_file_id",
			"the purpose of file %q is %s, not batch", o.Input, purpose)
	}
	return nil
}

const createBatchSQL = `
INSERT INTO penstock.gateway_batch AS b
       (id, owner, flow, endpoint, input_file_id, output_file_id, error_file_id, completion_window, output_kept,
        metadata, expires_at)
VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, clock_timestamp() + $11::interval)
RETURNING` + batchColumns

// createBatch makes a batch, with its two files, which are empty and not visible.
func createBatch(ctx context.Context, db postgres.DB, o order) (b batchRow, err error) {
	id := newID("batch_")
	err = postgres.InTx(ctx, db, func(tx pgx.Tx) error {
		if err := lockBatchQuota(ctx, tx, o.Owner); err != nil {
			return err
		}
		if err := lockInput(ctx, tx, o); err != nil {
			return err
		}
		output, err := createFile(ctx, tx, o.Owner, id+"_output.jsonl", purposeOutput)
		if err != nil {
			return err
		}
		errs, err := createFile(ctx, tx, o.Owner, id+"_error.jsonl", purposeOutput)
		if err != nil {
			return err
		}
		b, err = oneBatch(postgres.Query(ctx, tx, createBatchSQL, id, o.Owner, o.Flow, o.Endpoint, o.Input, output,
			errs, o.Window, o.Kept, o.Metadata, o.Lasts))
		return err
	})
	return b, err
}

// cancelSQL orders the end of a batch that has not ended. One that is validated is cancelled without a line run.
const cancelSQL = `
UPDATE penstock.gateway_batch b
   SET status = 'cancelling', cancelling_at = clock_timestamp(), next_at = clock_timestamp()
 WHERE b.id = $1 AND b.owner = $2 AND b.status IN ('validating', 'in_progress')
RETURNING` + batchColumns

// batchObject is a batch as clients see it.
type batchObject struct {
	ID               string          `json:"id"`
	Object           string          `json:"object"`
	Endpoint         string          `json:"endpoint"`
	Model            *string         `json:"model,omitempty"`
	Errors           json.RawMessage `json:"errors"`
	InputFileID      string          `json:"input_file_id"`
	CompletionWindow string          `json:"completion_window"`
	Status           status          `json:"status"`
	OutputFileID     *string         `json:"output_file_id"`
	ErrorFileID      *string         `json:"error_file_id"`
	CreatedAt        int64           `json:"created_at"`
	InProgressAt     *int64          `json:"in_progress_at"`
	ExpiresAt        int64           `json:"expires_at"`
	FinalizingAt     *int64          `json:"finalizing_at"`
	CompletedAt      *int64          `json:"completed_at"`
	FailedAt         *int64          `json:"failed_at"`
	ExpiredAt        *int64          `json:"expired_at"`
	CancellingAt     *int64          `json:"cancelling_at"`
	CancelledAt      *int64          `json:"cancelled_at"`
	RequestCounts    requestCounts   `json:"request_counts"`
	Usage            *usage          `json:"usage,omitempty"`
	Metadata         json.RawMessage `json:"metadata"`
}

type requestCounts struct {
	Total     int `json:"total"`
	Completed int `json:"completed"`
	Failed    int `json:"failed"`
}

type usage struct {
	InputTokens  int64           `json:"input_tokens"`
	InputDetails cachedTokens    `json:"input_tokens_details"`
	OutputTokens int64           `json:"output_tokens"`
	OutputDetail reasoningTokens `json:"output_tokens_details"`
	TotalTokens  int64           `json:"total_tokens"`
}

type cachedTokens struct {
	Cached int64 `json:"cached_tokens"`
}

// reasoningTokens are not counted. OpenAI's clients need the member.
type reasoningTokens struct {
	Reasoning int64 `json:"reasoning_tokens"`
}

func (b batchRow) object() batchObject {
	o := batchObject{
		ID: b.ID, Object: "batch", Endpoint: b.Endpoint, Model: b.Model, Errors: b.Flaws, InputFileID: b.Input,
		CompletionWindow: b.Window, Status: b.Status, CreatedAt: b.Created.Unix(), InProgressAt: unix(b.InProgressAt),
		ExpiresAt: b.ExpiresAt.Unix(), FinalizingAt: unix(b.FinalizingAt), CompletedAt: unix(b.CompletedAt),
		FailedAt: unix(b.FailedAt), ExpiredAt: unix(b.ExpiredAt), CancellingAt: unix(b.CancellingAt),
		CancelledAt: unix(b.CancelledAt), Metadata: b.Metadata,
		RequestCounts: requestCounts{Total: b.Total, Completed: b.Done, Failed: b.Failed},
	}
	if b.OutputThere {
		o.OutputFileID = &b.Output
	}
	if b.ErrorsThere {
		o.ErrorFileID = &b.Errors
	}
	if b.In+b.Out > 0 {
		o.Usage = &usage{
			InputTokens: b.In, InputDetails: cachedTokens{b.Cached}, OutputTokens: b.Out, TotalTokens: b.In + b.Out,
		}
	}
	return o
}

// batchesOf returns up to limit batches of an owner behind the one with the id after, the newest first. Where that one
// is gone, the error is for the client.
func batchesOf(ctx context.Context, db postgres.DB, owner, after string, limit int) ([]batchRow, error) {
	rows := postgres.Query(ctx, db, batchesSQL, owner, after, limit)
	batches, err := pgx.CollectRows(rows, pgx.RowToStructByPos[batchRow])
	if err != nil {
		return nil, fmt.Errorf("list batches: %w", err)
	}
	if len(batches) == 0 {
		return nil, checkAfter(ctx, db, batchThereSQL, owner, after)
	}
	return batches, nil
}

// batchThereSQL says whether owner $1 has batch $2.
const batchThereSQL = `SELECT EXISTS (SELECT FROM penstock.gateway_batch WHERE id = $2 AND owner = $1)`

// checkAfter refuses an empty page of a list behind an object that is gone: nothing tells what is behind it, and its
// client would take the page for the last.
func checkAfter(ctx context.Context, db postgres.DB, thereSQL, owner, after string) error {
	if after == "" {
		return nil
	}
	var there bool
	if err := db.QueryRow(ctx, thereSQL, owner, after).Scan(&there); err != nil {
		return fmt.Errorf("look up %s: %w", after, err)
	}
	if !there {
		return gateway.BadRequest(http.StatusBadRequest, "invalid_value", "after",
			"there is no %q any more: begin the list anew", after)
	}
	return nil
}
