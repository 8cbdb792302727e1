package openaibatch

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"strconv"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/gateway"
	"github.com/penstock/penstock/pkg/worker"
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

// refuse adds a line that the server has answered with an error.
func (r *results) refuse(l endedLine, status int) {
	r.failed++
	r.write(&r.errs, l.Line, answered{
		ID: requestID(l.Entry, l.Line), CustomID: l.CustomID,
		Response: &response{
			StatusCode: status, RequestID: "req_" + strconv.FormatInt(l.Entry, 10),
			Body: gateway.ErrorBody(status, l.Class, l.Problem),
		},
	})
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
		Usage json.RawMessage `json:"usage"`
	}
	if json.Unmarshal(body, &answer) != nil {
		return // an answer of another form has no counts
	}
	t := worker.TokensOf(answer.Usage)
	r.in, r.cached, r.out = r.in+t.In, r.cached+t.Cached, r.out+t.Out
}

// endedLine is a line whose entry has ended, without its answer.
type endedLine struct {
	Line     int
	CustomID string
	Entry    int64
	Outcome  string
	Class    string // of a failure
	Problem  string
	Status   string // of the answer that the last run of a failure had; empty: it had none
	Stored   int    // bytes that the answer takes in the database
}

// refused returns the status of the server's answer to a line that failed; 0: the failure is of another kind.
func (l endedLine) refused() int {
	status, err := strconv.Atoi(l.Status)
	if err != nil || status < 400 || status > 999 {
		return 0
	}
	return status
}

// endedSQL reads what became of the first entries of a batch, of those that have ended. One of which neither an
// outcome nor the entry is there any more has outlived the retention of its queue. The entry is looked up first: an
// outcome is looked for in each day of results and failures, and most entries of an open batch have none yet.
//
// It does not call penstock.outcome_of. An outcome that has passed its retention and is not deleted yet goes into the
// file, where outcome_of has none: a gateway that comes late loses no answer that is there. And the status of a failure
// comes from its history, which outcome_of does not return: to read that row again took three times as long for 2,000
// failures beside 100,000 outcomes (31 days). For results the plan was the same, with a quarter more buffers.
const endedSQL = `
SELECT l.line, l.custom_id, l.entry_id, o.outcome, o.class, o.error, o.status, o.stored
  FROM (SELECT x.line, x.custom_id, x.entry_id FROM penstock.gateway_batch_line x
         WHERE x.batch_id = $1 AND x.entry_id IS NOT NULL ORDER BY x.line LIMIT $3) l
 CROSS JOIN LATERAL (
       SELECT WHERE NOT EXISTS (SELECT FROM penstock.entry e WHERE e.queue_id = $2 AND e.id = l.entry_id) OFFSET 0) gone
 CROSS JOIN LATERAL (
       SELECT r.outcome::text AS outcome, '' AS class, coalesce(r.reason, '') AS error, '' AS status,
              coalesce(pg_column_size(r.result), 0) AS stored
         FROM penstock.result r WHERE r.queue_id = $2 AND r.entry_id = l.entry_id
       UNION ALL
       SELECT 'failed', f.class, f.error, coalesce(f.history -> -1 -> 'meta' ->> 'status', ''), 0
         FROM penstock.failure f WHERE f.queue_id = $2 AND f.entry_id = l.entry_id
       UNION ALL
       SELECT 'lost', '', '', '', 0
       LIMIT 1) o
 ORDER BY l.line`

// resultsSQL reads the answers of entries.
const resultsSQL = `SELECT r.entry_id, r.result FROM penstock.result r WHERE r.queue_id = $1 AND r.entry_id = ANY($2)`

const (
	// collectBytesMax is how many bytes of answers are taken in one turn, but for those read last.
	collectBytesMax = 8 << 20
	// storedBytesMax is how many bytes, as they are stored, the answers have that are read in one statement, but for
	// the last of them: a statement is read to its end, also where the turn has enough.
	storedBytesMax = 256 << 10
)

// atOnce returns how many of the lines have their answers read in one statement.
func atOnce(lines []endedLine) int {
	stored := 0
	for i, l := range lines {
		if stored += l.Stored; stored >= storedBytesMax {
			return i + 1
		}
	}
	return len(lines)
}

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
	rows := postgres.Query(ctx, tx, endedSQL, b.ID, *b.QueueID, windowLines)
	lines, err := pgx.CollectRows(rows, pgx.RowToStructByPos[endedLine])
	if err != nil {
		return nil, fmt.Errorf("read outcomes of batch %s: %w", b.ID, err)
	}
	var ended results
	for len(lines) > 0 && ended.output.Len()+ended.errs.Len() < collectBytesMax {
		n := atOnce(lines)
		answers, err := readAnswers(ctx, tx, b, lines[:n])
		if err != nil {
			return nil, err
		}
		for _, l := range lines[:n] {
			ended.take(l, answers)
		}
		lines = lines[n:]
	}
	return &ended, nil
}

func readAnswers(ctx context.Context, tx pgx.Tx, b *batchRow, lines []endedLine) (map[int64]json.RawMessage, error) {
	var done []int64
	for _, l := range lines {
		if l.Outcome == "done" {
			done = append(done, l.Entry)
		}
	}
	answers := make(map[int64]json.RawMessage, len(done))
	if len(done) == 0 {
		return answers, nil
	}
	var entry int64
	var body json.RawMessage
	rows := postgres.Query(ctx, tx, resultsSQL, *b.QueueID, done)
	_, err := pgx.ForEachRow(rows, []any{&entry, &body}, func() error {
		answers[entry], body = body, nil
		return nil
	})
	if err != nil {
		return nil, fmt.Errorf("read answers of batch %s: %w", b.ID, err)
	}
	return answers, nil
}

// take adds a line. An answer that has gone since its outcome was read has outlived the retention, too.
func (r *results) take(l endedLine, answers map[int64]json.RawMessage) {
	body, kept := answers[l.Entry]
	switch {
	case l.Outcome == "done" && kept:
		r.succeed(l.Line, l.CustomID, l.Entry, body)
	case l.Outcome == "failed" && l.refused() > 0:
		r.refuse(l, l.refused())
	case l.Outcome == "failed":
		r.fail(l.Line, l.CustomID, l.Entry, l.Class, l.Problem)
	case l.Outcome == "expired":
		r.fail(l.Line, l.CustomID, l.Entry, codeExpired, expiredMessage)
	case l.Outcome == "cancelled":
		r.fail(l.Line, l.CustomID, l.Entry, "batch_cancelled", "the request was cancelled")
	default:
		r.fail(l.Line, l.CustomID, l.Entry, "result_lost", "the outcome of the request is not kept any more")
	}
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
