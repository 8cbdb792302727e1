package openaibatch

import (
	"bytes"
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/gateway"
	"github.com/penstock/penstock/pkg/invalidation"
)

const (
	// windowLines is how many lines of a batch are entries at a time: enough to keep a fleet busy, and few
	// enough that a batch does not fill its queue.
	windowLines = 2000
	// feedBytesMax bounds the part of a file that is read in one turn, in bytes. A longer line is read by itself.
	feedBytesMax = 8 << 20
	// batchPriority is below the one that a queue has by default, which requests that made no batch have: their
	// clients wait for them.
	batchPriority int16 = 0
)

// fedLine is a line that is to become an entry.
type fedLine struct {
	Line     int
	At       int64
	Bytes    int
	CustomID string
}

// nextLinesSQL reads the next lines to be pushed: no more than fit into the window and, after the first, none that ends
// more than $5 bytes behind its beginning. Blank lines, which a file may have between others, count in the distance.
const nextLinesSQL = `
SELECT line, at, bytes, custom_id
  FROM (SELECT l.line, l.at, l.bytes, l.custom_id, first_value(l.at) OVER (ORDER BY l.line) AS begins
          FROM penstock.gateway_batch_line l
         WHERE l.batch_id = $1 AND l.line > $2
         ORDER BY l.line
         LIMIT least($3, greatest(0, $4 - (SELECT count(*) FROM penstock.gateway_batch_line x
                                            WHERE x.batch_id = $1 AND x.line <= $2)))) n
 WHERE at = begins OR at + bytes - begins <= $5
 ORDER BY line`

func nextLines(ctx context.Context, tx pgx.Tx, b *batchRow, window int) ([]fedLine, error) {
	rows := postgres.Query(ctx, tx, nextLinesSQL, b.ID, b.Fed, linesAtOnce, window, feedBytesMax)
	lines, err := pgx.CollectRows(rows, pgx.RowToStructByPos[fedLine])
	if err != nil {
		return nil, fmt.Errorf("read lines of batch %s: %w", b.ID, err)
	}
	return lines, nil
}

const fedSQL = `
WITH b AS (UPDATE penstock.gateway_batch SET fed = $2 WHERE id = $1)
UPDATE penstock.gateway_batch_line l SET entry_id = k.entry_id
  FROM unnest($3::int[], $4::bigint[]) k(line, entry_id)
 WHERE l.batch_id = $1 AND l.line = k.line`

// feed pushes the next lines as entries, no more than the rate of the client's token lets in now, and returns how many
// lines it dealt with.
func (s *Batches) feed(ctx context.Context, tx pgx.Tx, b *batchRow) (fed int, err error) {
	lines, err := nextLines(ctx, tx, b, windowLines)
	if err != nil || len(lines) == 0 {
		return 0, err
	}
	may, fill := s.gateway.MayPush(b.Owner, len(lines))
	if may < len(lines) {
		b.Limited = max(limitedLeast, min(fill, workEvery))
	}
	lines = lines[:may]
	defer func() { s.gateway.GiveBackPushes(b.Owner, len(lines)-fed) }()
	if len(lines) == 0 {
		return 0, nil
	}
	last := lines[len(lines)-1]
	text, err := readRange(ctx, tx, b.Input, lines[0].At, last.At+int64(last.Bytes))
	if err != nil {
		return 0, err
	}
	operation, _ := gateway.Operation(b.Endpoint)
	pushes := make([]invalidation.Push, len(lines))
	for i, l := range lines {
		from := l.At - lines[0].At
		r, _, flawed := parse(bytes.TrimSpace(text[from:from+int64(l.Bytes)]), b.Endpoint)
		if flawed != nil {
			return 0, fmt.Errorf("line %d of batch %s is not what was validated: %s", l.Line, b.ID, flawed.Message)
		}
		priority := batchPriority
		pushes[i] = invalidation.Push{
			Payload: gateway.DurablePayload(r.Body, operation), Flow: b.Flow, Priority: &priority, StartBy: b.ExpiresAt,
			Name: lineName(b.ID, l.Line),
		}
	}
	n, ids, refused, err := s.pushMax(ctx, tx, b, pushes)
	if err != nil || n == 0 {
		return 0, err
	}
	return n, s.fed(ctx, tx, b, lines[:n], ids, refused)
}

// lineName is the name of the entry of a line, by which penstock.ended_step keeps a failure that is in the error file
// from being retried. Lines have one each: a queue may bound how many entries of one name run at once.
func lineName(batch string, line int) string { return fmt.Sprintf("%s/%d", batch, line) }

// pushMax makes entries of the first n lines: of all, or, where the queue has no room for so many, of a half, a
// quarter and so on. 0: it has room for none, which is no error.
func (s *Batches) pushMax(ctx context.Context, tx pgx.Tx, b *batchRow, pushes []invalidation.Push) (
	n int, ids []int64, refused map[int]error, err error,
) {
	for n = len(pushes); n > 0; n /= 2 {
		err = pgx.BeginFunc(ctx, tx, func(inner pgx.Tx) (err error) {
			ids, refused, err = s.push(ctx, inner, b, pushes[:n])
			return err
		})
		if !errors.Is(err, invalidation.ErrQueueFull) {
			return n, ids, refused, err
		}
	}
	return 0, nil, nil, nil
}

// fed records what became of lines that were pushed: ids has 0 for those that were refused.
func (s *Batches) fed(ctx context.Context, tx pgx.Tx, b *batchRow, lines []fedLine, ids []int64,
	refused map[int]error,
) error {
	var numbers []int
	var entries []int64
	var ended results
	for i, l := range lines {
		if err := refused[i]; err != nil {
			ended.fail(l.Line, l.CustomID, 0, "invalid_request", err.Error())
			continue
		}
		numbers, entries = append(numbers, l.Line), append(entries, ids[i])
	}
	b.Fed = lines[len(lines)-1].Line
	if _, err := tx.Exec(ctx, fedSQL, b.ID, b.Fed, numbers, entries); err != nil {
		return fmt.Errorf("record entries of batch %s: %w", b.ID, err)
	}
	return s.record(ctx, tx, b, &ended)
}

// push makes entries of lines, all in one statement. Where the queue refuses one of them, each is pushed by itself, so
// that the error is that line's alone.
func (s *Batches) push(ctx context.Context, tx pgx.Tx, b *batchRow, pushes []invalidation.Push) (
	ids []int64, refused map[int]error, err error,
) {
	q, err := s.queueOf(ctx, tx, *b.QueueID)
	if err != nil {
		return nil, nil, err
	}
	all, err := pushInside(ctx, tx, q, pushes)
	if err == nil {
		for _, p := range all {
			ids = append(ids, int64(p.ID))
		}
		return ids, nil, nil
	}
	if !invalidation.RefusesPush(err) {
		return nil, nil, err
	}
	refused, ids = map[int]error{}, make([]int64, len(pushes))
	for i := range pushes {
		one, err := pushInside(ctx, tx, q, pushes[i:i+1])
		switch {
		case err == nil:
			ids[i] = int64(one[0].ID)
		case invalidation.RefusesPush(err):
			refused[i] = err
		default:
			return nil, nil, err
		}
	}
	return ids, refused, nil
}

// pushInside pushes within a savepoint, so that a refusal leaves the turn as it was.
func pushInside(ctx context.Context, tx pgx.Tx, q *invalidation.Queue, pushes []invalidation.Push) (
	pushed []invalidation.Pushed, err error,
) {
	err = pgx.BeginFunc(ctx, tx, func(inner pgx.Tx) error {
		pushed, err = q.WithTx(inner).Push(ctx, pushes...)
		return err
	})
	return pushed, err
}

const queueNameSQL = `SELECT q.name FROM penstock.queue q WHERE q.id = $1`

func (s *Batches) queueOf(ctx context.Context, tx pgx.Tx, id int32) (*invalidation.Queue, error) {
	var name string
	if err := tx.QueryRow(ctx, queueNameSQL, id).Scan(&name); err != nil {
		return nil, fmt.Errorf("find queue %d: %w", id, err)
	}
	return invalidation.Open(ctx, tx, name)
}
