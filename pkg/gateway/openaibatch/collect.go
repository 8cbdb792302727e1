package openaibatch

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"strconv"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
)

// Codes of lines that did not run to their end.
const (
	codeExpired    = "batch_expired"
	expiredMessage = "the completion window was over before the request began"
)

// answered is a line of an output or error file.
type answered struct {
	ID       string    `json:"id"`
	CustomID string    `json:"custom_id"`
	Response *response `json:"response"`
	Error    *failure  `json:"error"`
}

type response struct {
	StatusCode int             `json:"status_code"`
	RequestID  string          `json:"request_id"`
	Body       json.RawMessage `json:"body"`
}

type failure struct {
	Code    string `json:"code"`
	Message string `json:"message"`
}

// results are lines that have ended, as they go into the files.
type results struct {
	lines           []int
	output, errs    bytes.Buffer
	done, failed    int
	expired         int // of the failed ones
	in, cached, out int64
}

func (r *results) write(to *bytes.Buffer, line int, a answered) {
	text, err := json.Marshal(a)
	if err != nil { // a body that is not JSON, which the queue does not keep
		text, _ = json.Marshal(answered{ID: a.ID, CustomID: a.CustomID, Error: &failure{"unreadable", err.Error()}})
	}
	to.Write(text)
	to.WriteByte('\n')
	r.lines = append(r.lines, line)
}

func requestID(entry int64, line int) string {
	if entry == 0 {
		return "batch_req_line_" + strconv.Itoa(line)
	}
	return "batch_req_" + strconv.FormatInt(entry, 10)
}

func (r *results) fail(line int, customID string, entry int64, code, message string) {
	r.failed++
	if code == codeExpired {
		r.expired++
	}
	r.write(&r.errs, line, answered{ID: requestID(entry, line), CustomID: customID, Error: &failure{code, message}})
}

func (r *results) succeed(line int, customID string, entry int64, body json.RawMessage) {
	r.done++
	r.count(body)
	r.write(&r.output, line, answered{
		ID: requestID(entry, line), CustomID: customID,
		Response: &response{StatusCode: 200, RequestID: "req_" + strconv.FormatInt(entry, 10), Body: body},
	})
}

// count adds the token counts of an answer.
func (r *results) count(body json.RawMessage) {
	var answer struct {
		Usage struct {
			Prompt     int64 `json:"prompt_tokens"`
			Completion int64 `json:"completion_tokens"`
			Input      int64 `json:"input_tokens"`
			Output     int64 `json:"output_tokens"`
			Details    struct {
				Cached int64 `json:"cached_tokens"`
			} `json:"prompt_tokens_details"`
		} `json:"usage"`
	}
	if json.Unmarshal(body, &answer) != nil {
		return // an answer of another form has no counts
	}
	u := answer.Usage
	r.in += min(max(u.Prompt, u.Input, 0), tokensMost)
	r.out += min(max(u.Completion, u.Output, 0), tokensMost)
	r.cached += min(max(u.Details.Cached, 0), tokensMost)
}

// tokensMost bounds what a worker may say that one call took: sums of more would overflow.
const tokensMost = 1 << 32

// endedSQL reads what became of the first entries of a batch, of those that have ended. One of which neither an
// outcome nor the entry is there any more has outlived the retention of its queue.
const endedSQL = `
SELECT l.line, l.custom_id, l.entry_id, o.outcome, o.class, o.error, o.result
  FROM (SELECT x.line, x.custom_id, x.entry_id FROM penstock.gateway_batch_line x
         WHERE x.batch_id = $1 AND x.entry_id IS NOT NULL ORDER BY x.line LIMIT $3) l
 CROSS JOIN LATERAL (
       SELECT r.outcome::text AS outcome, '' AS class, coalesce(r.reason, '') AS error, r.result
         FROM penstock.result r WHERE r.queue_id = $2 AND r.entry_id = l.entry_id
       UNION ALL
       SELECT 'failed', f.class, f.error, NULL
         FROM penstock.failure f WHERE f.queue_id = $2 AND f.entry_id = l.entry_id
       UNION ALL
       SELECT 'lost', '', '', NULL
        WHERE NOT EXISTS (SELECT FROM penstock.entry e WHERE e.queue_id = $2 AND e.id = l.entry_id)
       LIMIT 1) o
 ORDER BY l.line`

// collectBytesMax is how many bytes of answers are taken in one turn, but for the last of them.
const collectBytesMax = 8 << 20

// collect moves the answers of entries that have ended into the files, and returns how many.
func (s *Batches) collect(ctx context.Context, tx pgx.Tx, b *batchRow) (int, error) {
	if b.QueueID == nil {
		return 0, nil // cancelled before it was validated
	}
	ended, err := readEnded(ctx, tx, b)
	if err != nil {
		return 0, err
	}
	return len(ended.lines), s.record(ctx, tx, b, ended)
}

func readEnded(ctx context.Context, tx pgx.Tx, b *batchRow) (*results, error) {
	var ended results
	rows := postgres.Query(ctx, tx, endedSQL, b.ID, *b.QueueID, windowLines)
	defer rows.Close()
	for rows.Next() && ended.output.Len()+ended.errs.Len() < collectBytesMax {
		var line int
		var entry int64
		var customID, outcome, class, problem string
		var body json.RawMessage
		if err := rows.Scan(&line, &customID, &entry, &outcome, &class, &problem, &body); err != nil {
			return nil, fmt.Errorf("read answer of batch %s: %w", b.ID, err)
		}
		switch outcome {
		case "done":
			ended.succeed(line, customID, entry, body)
		case "failed":
			ended.fail(line, customID, entry, class, problem)
		case "expired":
			ended.fail(line, customID, entry, codeExpired, expiredMessage)
		case "cancelled":
			ended.fail(line, customID, entry, "batch_cancelled", "the request was cancelled")
		default:
			ended.fail(line, customID, entry, "result_lost", "the outcome of the request is not kept any more")
		}
	}
	rows.Close()
	if err := rows.Err(); err != nil {
		return nil, fmt.Errorf("read answers of batch %s: %w", b.ID, err)
	}
	return &ended, nil
}

const recordSQL = `
WITH gone AS (DELETE FROM penstock.gateway_batch_line WHERE batch_id = $1 AND line = ANY($2::int[]))
UPDATE penstock.gateway_batch
   SET completed = completed + $3, failed = failed + $4, tokens_in = tokens_in + $5, tokens_cached = tokens_cached + $6,
       tokens_out = tokens_out + $7, expired_lines = expired_lines + $8
 WHERE id = $1`

// record writes lines that have ended into the files of their batch, and takes them off its list.
func (s *Batches) record(ctx context.Context, tx pgx.Tx, b *batchRow, r *results) error {
	if len(r.lines) == 0 {
		return nil
	}
	if err := appendFile(ctx, tx, b.Output, r.output.Bytes()); err != nil {
		return err
	}
	if err := appendFile(ctx, tx, b.Errors, r.errs.Bytes()); err != nil {
		return err
	}
	_, err := tx.Exec(ctx, recordSQL, b.ID, r.lines, r.done, r.failed, r.in, r.cached, r.out, r.expired)
	if err != nil {
		return fmt.Errorf("record answers of batch %s: %w", b.ID, err)
	}
	return nil
}
