package prediction

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// Bounds of the reading of output for streams.
const (
	beatEvery   = 100 * time.Millisecond
	beatStreams = 100      // read by one statement
	piecesMax   = 16       // of one stream in a statement
	piecesBytes = 1 << 20  // of them, but for the first
	groupBytes  = 8 << 20  // of all streams in a statement, but for the first piece; the others come with the next one
	heldBytes   = 64 << 20 // that streams have not sent to their clients yet: beyond, each reads a piece at a time
)

// beat reads output for all streams of the gateway: every 100 ms one statement for up to a hundred of them, which
// returns what has come since for each. A stream whose client has not taken its last pieces is left out. The streams
// that have waited longest come first.
type beat struct {
	bell  bell // rung when a stream begins to wait for news
	mu    sync.Mutex
	open  map[*tap]bool
	turns uint64 // counts calls of want
	held  int    // bytes that were handed to streams which have not asked for more since
}

// tap is one stream at the beat.
type tap struct {
	queue int32
	entry int64
	since time.Time // from when on it may have output
	news  chan news // holds one

	// The beat reads them while wants is set, and the stream sets them while it is not; guarded by beat.mu.
	wants bool
	turn  uint64 // of the call of want
	token int64
	seq   int
	held  int // bytes of the pieces that it has
}

// news is what has come of one prediction.
type news struct {
	pieces []piece
	ended  bool // the entry has ended, and there is no piece behind these
}

// join adds a stream.
func (b *beat) join(p row) *tap {
	since := invalidation.OutputFrom(p.Created)
	t := &tap{queue: p.Queue, entry: p.Entry, since: since, news: make(chan news, 1)}
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.open == nil {
		b.open = map[*tap]bool{}
	}
	b.open[t] = true
	return t
}

func (b *beat) leave(t *tap) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.open, t)
	b.held -= t.held
	t.held = 0
}

// want has the beat read what is behind a piece, once.
func (b *beat) want(t *tap, token int64, seq int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.held -= t.held
	b.turns++
	t.wants, t.turn, t.token, t.seq, t.held = true, b.turns, token, seq, 0
	b.bell.ring()
}

// wanting lists the streams that wait for news, the longest first.
func (b *beat) wanting() (list []*tap) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for t := range b.open {
		if t.wants {
			list = append(list, t)
		}
	}
	slices.SortFunc(list, func(a, c *tap) int { return cmp.Compare(a.turn, c.turn) })
	return list
}

// tell hands news to a stream that waits for them.
func (b *beat) tell(t *tap, n news) {
	b.mu.Lock()
	defer b.mu.Unlock()
	t.wants = false
	if !b.open[t] {
		return // its client has gone meanwhile
	}
	for _, p := range n.pieces {
		t.held += len(p.data)
	}
	b.held += t.held
	t.news <- n // it is empty: the stream has taken the last one before it wanted more
}

// outputSQL reads what has come of each stream: pieces of its newest run behind the one that it knows, and whether its
// entry has ended, which is so in the moment of the last pieces: a run adds none once it does not hold the lock. The
// first piece of a statement comes whatever its size; the bounds are those of a stream and of the statement. A stream
// whose pieces are beyond the second is not in the answer. $8 are the times from which on streams may have output: no
// hour before is read.
const outputSQL = `
SELECT x.n, x.ended, x.token, x.seq, x.data
  FROM (SELECT k.n, e.id IS NULL AS ended, coalesce(r.token, 0) AS token, coalesce(o.seq, 0) AS seq,
               coalesce(o.data, '') AS data,
               coalesce(sum(octet_length(o.data)) OVER (ORDER BY k.n, o.seq, o.at) - octet_length(o.data), 0) AS before
          FROM unnest($1::int[], $2::bigint[], $3::bigint[], $4::int[], $8::timestamptz[])
               WITH ORDINALITY k(queue_id, entry_id, token, seq, since, n)
          LEFT JOIN penstock.entry e ON e.queue_id = k.queue_id AND e.id = k.entry_id
         CROSS JOIN LATERAL (
               SELECT max(p.token) AS token
                 FROM penstock.output p
                WHERE p.queue_id = k.queue_id AND p.entry_id = k.entry_id AND p.at >= k.since) r
          LEFT JOIN LATERAL (
               SELECT p.seq, p.at, p.data,
                      sum(octet_length(p.data)) OVER (ORDER BY p.seq, p.at) - octet_length(p.data) AS before
                 FROM penstock.output p
                WHERE p.queue_id = k.queue_id AND p.entry_id = k.entry_id AND p.token = r.token
                  AND p.at >= k.since AND p.seq > CASE WHEN r.token = k.token THEN k.seq ELSE 0 END
                ORDER BY p.seq, p.at
                LIMIT $5) o ON o.before < $6
         WHERE o.seq IS NOT NULL OR e.id IS NULL) x
 WHERE x.before < $7
 ORDER BY x.n, x.seq`

// read makes one beat.
func (b *beat) read(ctx context.Context, db postgres.DB) error {
	for group := range slices.Chunk(b.wanting(), beatStreams) {
		if err := b.readGroup(ctx, db, group); err != nil {
			return err
		}
	}
	return nil
}

func (b *beat) readGroup(ctx context.Context, db postgres.DB, group []*tap) error {
	queues, entries := make([]int32, len(group)), make([]int64, len(group))
	tokens, seqs := make([]int64, len(group)), make([]int, len(group))
	since := make([]time.Time, len(group))
	b.mu.Lock()
	each := piecesBytes
	if b.held > heldBytes {
		each = 1 // the first alone
	}
	for i, t := range group {
		queues[i], entries[i], tokens[i], seqs[i] = t.queue, t.entry, t.token, t.seq
		since[i] = t.since
	}
	b.mu.Unlock()
	found := make([]news, len(group))
	var n int
	var ended bool
	var p piece
	var data []byte
	rows := postgres.Query(ctx, db, outputSQL, queues, entries, tokens, seqs, piecesMax, each, groupBytes,
		since)
	_, err := pgx.ForEachRow(rows, []any{&n, &ended, &p.token, &p.seq, &data}, func() error {
		one := &found[n-1]
		one.ended = ended
		if p.data = string(data); p.seq > 0 {
			one.pieces = append(one.pieces, p)
		}
		return nil
	})
	if err != nil {
		return fmt.Errorf("read output of %d streams: %w", len(group), err)
	}
	for i, one := range found {
		if len(one.pieces) > 0 {
			one.ended = false // there may be more: the next beat says so
		}
		if one.ended || len(one.pieces) > 0 {
			b.tell(group[i], one)
		}
	}
	return nil
}

// beats reads until ctx ends. While the database is away streams wait for it.
func (s *Predictions) beats(ctx context.Context) {
	s.whileWanted(ctx, repeated{
		name: "read output for streams", bell: &s.beat.bell, every: beatEvery,
		wanted: func() bool { return len(s.beat.wanting()) > 0 },
		do:     func() error { return s.beat.read(ctx, s.db) },
	})
}
