package openaibatch

import (
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"

	"github.com/jackc/pgx/v5"
)

// flawsMax is how many errors of a file are reported.
const flawsMax = 50

// linesAtOnce is how many lines are inserted, pushed or given up in one statement.
const linesAtOnce = 500

// validation reads an input file line by line.
type validation struct {
	service *Batches
	batch   *batchRow
	seen    map[[sha256.Size]byte]bool // hashes of the custom ids
	flaws   []*flaw
	lines   [][]any // to be inserted
	total   int
	over    bool // there are too many lines
	queue   string
}

// validate reads the whole input of a batch: either all lines are fit to run, or the batch has failed and none
// of them runs.
func (s *Batches) validate(ctx context.Context, tx pgx.Tx, b *batchRow) error {
	v := &validation{service: s, batch: b, seen: map[[sha256.Size]byte]bool{}}
	size, err := fileSize(ctx, tx, b.Input)
	if errors.Is(err, errNoFile) {
		v.flaws = append(v.flaws, fileGone())
		return v.fail(ctx, tx)
	}
	if err != nil {
		return err
	}
	source := newLineReader(openFile(ctx, tx, b.Input, size), lineMax)
	for len(v.flaws) < flawsMax && !v.over {
		line, err := source.read()
		if errors.Is(err, io.EOF) {
			break
		}
		if errors.Is(err, errLongLine) {
			v.flawed(source.number, flawOf("line_too_long", "", "the line has more than %d bytes", lineMax))
			break
		}
		if errors.Is(err, errNoFile) {
			v.flaws = append(v.flaws, fileGone())
			break
		}
		if err != nil {
			return err
		}
		if err := v.line(ctx, tx, source, line); err != nil {
			return err
		}
	}
	if v.total == 0 && len(v.flaws) == 0 {
		v.flaws = append(v.flaws, flawOf("empty_file", "input_file_id", "the file has no lines"))
	}
	if len(v.flaws) > 0 {
		return v.fail(ctx, tx)
	}
	if err := v.flush(ctx, tx); err != nil {
		return err
	}
	return v.begin(ctx, tx)
}

func fileGone() *flaw {
	return flawOf("file_not_found", "input_file_id", "the file is not there any more")
}

func (v *validation) flawed(number int, f *flaw) {
	f.Line = &number
	v.flaws = append(v.flaws, f)
}

// line takes one line in.
func (v *validation) line(ctx context.Context, tx pgx.Tx, source *lineReader, line []byte) error {
	if v.total++; v.total > linesMax {
		v.flawed(source.number, flawOf("too_many_requests", "input_file_id", "the file has more than %d lines",
			linesMax))
		v.over = true
		return nil
	}
	r, model, bad := parse(line, v.batch.Endpoint)
	if bad == nil {
		bad = v.fits(r, model)
	}
	if bad != nil {
		v.flawed(source.number, bad)
		return nil
	}
	if len(v.flaws) > 0 {
		return nil // it will not run
	}
	v.lines = append(v.lines, []any{v.batch.ID, v.total, source.at, source.next - source.at, *r.CustomID})
	if len(v.lines) < linesAtOnce {
		return nil
	}
	return v.flush(ctx, tx)
}

// fits checks a line against those before it and the models that the client may use.
func (v *validation) fits(r request, model string) *flaw {
	hash := sha256.Sum256([]byte(*r.CustomID))
	if v.seen[hash] {
		return flawOf("duplicate_custom_id", "custom_id", "the custom_id %s is that of another line",
			quoted(*r.CustomID))
	}
	v.seen[hash] = true
	if v.batch.Model != nil {
		if *v.batch.Model != model {
			return flawOf("mismatched_model", "body.model", "the model is %s, that of the first line %q",
				quoted(model), *v.batch.Model)
		}
		return nil
	}
	offer, ok := v.service.gateway.OfferedTo(v.batch.Owner, model)
	if !ok {
		return flawOf("model_not_found", "body.model",
			"the model %s does not exist or you do not have access to it", quoted(model))
	}
	v.batch.Model, v.queue = &model, offer.Queue
	return nil
}

func (v *validation) flush(ctx context.Context, tx pgx.Tx) error {
	_, err := tx.CopyFrom(ctx, pgx.Identifier{"penstock", "gateway_batch_line"},
		[]string{"batch_id", "line", "at", "bytes", "custom_id"}, pgx.CopyFromRows(v.lines))
	if err != nil {
		return fmt.Errorf("insert lines of batch %s: %w", v.batch.ID, err)
	}
	v.lines = v.lines[:0]
	return nil
}

const failSQL = `
WITH gone AS (DELETE FROM penstock.gateway_batch_line WHERE batch_id = $1)
UPDATE penstock.gateway_batch SET status = 'failed', failed_at = clock_timestamp(), errors = $2 WHERE id = $1`

// fail ends the batch with the flaws of its file.
func (v *validation) fail(ctx context.Context, tx pgx.Tx) error {
	text, err := json.Marshal(flaws{Object: "list", Data: v.flaws})
	if err != nil {
		return fmt.Errorf("write errors of batch %s: %w", v.batch.ID, err)
	}
	if _, err := tx.Exec(ctx, failSQL, v.batch.ID, text); err != nil {
		return fmt.Errorf("end batch %s: %w", v.batch.ID, err)
	}
	return v.service.dropOutputs(ctx, tx, v.batch)
}

const beginSQL = `
UPDATE penstock.gateway_batch b
   SET status = 'in_progress', in_progress_at = clock_timestamp(), total = $2, model = $3, queue_id = q.id
  FROM penstock.queue q
 WHERE b.id = $1 AND q.name = $4`

func (v *validation) begin(ctx context.Context, tx pgx.Tx) error {
	tag, err := tx.Exec(ctx, beginSQL, v.batch.ID, v.total, v.batch.Model, v.queue)
	if err == nil && tag.RowsAffected() == 0 {
		err = fmt.Errorf("there is no queue %q", v.queue)
	}
	if err != nil {
		return fmt.Errorf("begin batch %s: %w", v.batch.ID, err)
	}
	return nil
}
