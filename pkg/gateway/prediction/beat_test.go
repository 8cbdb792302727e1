package prediction

import (
	"context"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/internal/postgres"
)

// counted is a database that counts statements and the bytes of the pieces that they return.
type counted struct {
	postgres.DB
	statements int
}

func (c *counted) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	c.statements++
	return c.DB.Query(ctx, sql, args...)
}

// All streams of a gateway cost one statement for each hundred of them, which reads only what is new.
func TestBeatReadsAllStreamsWithOneStatement(t *testing.T) {
	t.Parallel()
	db := &counted{DB: pgtest.New(t)}
	const streams = 250
	var b beat
	var taps []*tap
	for i := range streams {
		tap := b.join(row{Queue: 1, Entry: int64(i)})
		b.want(tap, 0, 0)
		taps = append(taps, tap)
	}
	exec := func(sql string) {
		t.Helper()
		if _, err := db.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	read := func() {
		t.Helper()
		db.statements = 0
		if err := b.read(t.Context(), db); err != nil {
			t.Fatal(err)
		}
	}
	exec(`INSERT INTO penstock.output (queue_id, entry_id, token, attempt, seq, data)
	      SELECT 1, e, 7, 1, s, convert_to('data: ' || s, 'UTF8') FROM generate_series(0, 249) e, generate_series(1, 2) s`)
	read()
	if db.statements != 3 {
		t.Errorf("%d statements for %d streams", db.statements, streams)
	}
	for i, tap := range taps {
		n := <-tap.news
		if len(n.pieces) != 2 || n.pieces[1] != (piece{7, 2, "data: 2"}) || n.ended {
			t.Fatalf("stream %d: got %+v", i, n)
		}
		if i < 2 {
			b.want(tap, 7, 2)
		}
	}
	exec(`INSERT INTO penstock.output (queue_id, entry_id, token, attempt, seq, data) VALUES (1, 0, 7, 1, 3, 'data: 3')`)
	read()
	if db.statements != 1 {
		t.Errorf("%d statements for two streams that want more", db.statements)
	}
	if n := <-taps[0].news; len(n.pieces) != 1 || n.pieces[0].seq != 3 {
		t.Errorf("got %+v, want the new piece alone", n)
	}
	if n := <-taps[1].news; !n.ended { // there is no such entry
		t.Errorf("got %+v", n)
	}
	for _, tap := range taps {
		b.leave(tap)
	}
	if read(); db.statements != 0 {
		t.Errorf("%d statements without a stream", db.statements)
	}
}

// A stream gets no more at once than it may, and the rest with the next beats.
func TestBeatIsBoundedInBytes(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	if _, err := db.Exec(t.Context(), `INSERT INTO penstock.output (queue_id, entry_id, token, attempt, seq, data)
	      SELECT 1, 1, 7, 1, s, decode(repeat('61', 400000), 'hex') FROM generate_series(1, 7) s`); err != nil {
		t.Fatal(err)
	}
	var b beat
	tap := b.join(row{Queue: 1, Entry: 1})
	var got []int
	seq := 0
	for range 3 {
		b.want(tap, 7, seq)
		if err := b.read(t.Context(), db); err != nil {
			t.Fatal(err)
		}
		n := <-tap.news
		got = append(got, len(n.pieces))
		seq = n.pieces[len(n.pieces)-1].seq
	}
	if seq != 7 || got[0] != 3 || got[1] != 3 || got[2] != 1 {
		t.Errorf("pieces came %v", got)
	}
}

// Streams together get no more from a statement than it may hold; those that got nothing come first in the next.
// None of them is taken for ended meanwhile, though the entries are.
func TestBeatBoundsTheBytesOfAllStreams(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	const streams, size = 30, 1 << 20
	if _, err := db.Exec(t.Context(), `INSERT INTO penstock.output (queue_id, entry_id, token, attempt, seq, data)
	      SELECT 1, e, 7, 1, 1, decode(repeat('61', 1048576), 'hex') FROM generate_series(1, 30) e`); err != nil {
		t.Fatal(err)
	}
	var b beat
	var taps []*tap
	for i := range streams {
		tap := b.join(row{Queue: 1, Entry: int64(i) + 1})
		b.want(tap, 0, 0)
		taps = append(taps, tap)
	}
	served, ended := 0, 0
	for beats := 1; ended < streams; beats++ {
		if beats > 20 {
			t.Fatalf("%d of %d streams have their piece and %d their end after %d beats", served, streams, ended, beats)
		}
		if err := b.read(t.Context(), db); err != nil {
			t.Fatal(err)
		}
		if b.held > groupBytes+size {
			t.Fatalf("a beat holds %d bytes", b.held)
		}
		for _, tap := range taps {
			select {
			case n := <-tap.news:
				switch {
				case len(n.pieces) == 1 && !n.ended:
					served++
					b.want(tap, 7, 1)
				case n.ended && tap.seq == 1:
					ended++
					b.leave(tap)
				default:
					t.Fatalf("got %d pieces, ended %t, behind piece %d", len(n.pieces), n.ended, tap.seq)
				}
			default:
			}
		}
	}
	if served != streams || b.held != 0 {
		t.Errorf("%d of %d streams got their piece, %d bytes are held", served, streams, b.held)
	}
}

// While clients do not read, what is held for them stays bounded: each stream gets a piece at a time.
func TestBeatHandsOutLessWhileClientsDoNotRead(t *testing.T) {
	t.Parallel()
	db := pgtest.New(t)
	if _, err := db.Exec(t.Context(), `INSERT INTO penstock.output (queue_id, entry_id, token, attempt, seq, data)
	      SELECT 1, 1, 7, 1, s, 'data: x' FROM generate_series(1, 5) s`); err != nil {
		t.Fatal(err)
	}
	b := beat{held: heldBytes + 1}
	tap := b.join(row{Queue: 1, Entry: 1})
	b.want(tap, 0, 0)
	if err := b.read(t.Context(), db); err != nil {
		t.Fatal(err)
	}
	if n := <-tap.news; len(n.pieces) != 1 {
		t.Errorf("got %d pieces", len(n.pieces))
	}
}
