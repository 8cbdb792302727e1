package invalidation

import (
	"errors"
	"strings"
	"testing"
	"time"
)

func TestOutputIsFencedAndReadFromWhereAReaderStands(t *testing.T) {
	b := newBed(t, Config{})
	b.push("")
	run := func() *Run {
		l := b.claimOne()
		return &Run{Queue: b.q, Entry: l.Entries[0], Lock: l, Node: here}
	}
	first := run()
	for seq, data := range []string{"a", "b", "b"} { // the last one again, as after a lost answer
		if err := first.AppendOutput(b.ctx, min(seq+1, 2), []byte(data)); err != nil {
			t.Fatal(err)
		}
	}
	b.settle(last(Release(first.Lock, first.Entry.ID, 0)))
	if err := first.AppendOutput(b.ctx, 3, make([]byte, OutputBytesMax+1)); !errors.Is(err, ErrPayloadTooLarge) || !strings.Contains(err.Error(), "data of piece 3") {
		t.Errorf("a piece that is too large: %v", err)
	}
	if err := first.AppendOutput(b.ctx, 3, []byte("late")); !errors.Is(err, ErrLockLost) {
		t.Errorf("output after the lock was lost: %v, want ErrLockLost", err)
	}
	second := run()
	if err := second.AppendOutput(b.ctx, 1, []byte("anew")); err != nil {
		t.Fatal(err)
	}
	pieces, err := b.q.Output(b.ctx, first.Entry.ID, b.outputSince(first.Entry.ID), first.Lock.Token, 1, 10)
	if err != nil || len(pieces) != 2 || string(pieces[0].Data) != "b" || string(pieces[1].Data) != "anew" || pieces[1].Token != second.Lock.Token {
		t.Errorf("behind the first piece stand %+v (%v)", pieces, err)
	}
	if n := b.count(`SELECT penstock.sweep_output(100)`); n != 0 {
		t.Errorf("%d pieces of an entry that is still there were swept", n)
	}
}

func (b *bed) outputSince(id EntryID) time.Time {
	since, err := b.q.OutputSince(b.ctx, id)
	b.must(err)
	return since
}

// Output that is kept for weeks is hundreds of tables: what a statement locks does not grow with them.
func TestStatementsAboutOutputLockTheHoursOfTheirEntryAlone(t *testing.T) {
	b := newBed(t, Config{})
	b.push("")
	b.exec(b.pool, `DO $$ DECLARE h timestamptz; BEGIN FOR h IN SELECT date_trunc('hour', now()) - n * interval '1 hour' FROM generate_series(0, 50) n LOOP
		EXECUTE format('CREATE TABLE penstock.%I PARTITION OF penstock.output FOR VALUES FROM (%L) TO (%L)',
		               'output_' || to_char(h AT TIME ZONE 'UTC', 'YYYYMMDDHH24'), h, h + interval '1 hour'); END LOOP; END $$`)
	lock := b.claimOne()
	id := lock.Entries[0].ID
	watch := &EntryWatch{}
	for what, do := range map[string]func(q *Queue) error{
		"append": func(q *Queue) error {
			return (&Run{Queue: q, Entry: lock.Entries[0], Lock: lock, Node: here}).AppendOutput(b.ctx, 1, []byte("x"))
		},
		"read": func(q *Queue) error {
			_, err := q.Output(b.ctx, id, b.outputSince(id), 0, 0, 10)
			return err
		},
		"watch": func(q *Queue) error {
			watch.db = q.db
			since := b.outputSince(id)
			return watch.pollSome([]watched{{queue: q.ID, id: id, since: &since}})
		},
		"wait": func(q *Queue) error {
			watch.db = q.db
			return watch.pollSome([]watched{{queue: q.ID, id: id}})
		},
	} {
		tx := b.begin()
		b.must(do(b.q.WithTx(tx)))
		var hours int
		b.must(tx.QueryRow(b.ctx, `SELECT count(*) FROM pg_locks l JOIN pg_class c ON c.oid = l.relation
			WHERE l.pid = pg_backend_pid() AND c.relkind = 'r' AND c.relname ~ '^output_[0-9]'`).Scan(&hours))
		if hours > 3 {
			t.Errorf("%s locks %d hours of output, want at most the three since the entry was accepted", what, hours)
		}
		b.commit(tx)
	}
}

// A piece that met the making of its hour's partition is in that partition.
func TestOutputOutlivesTheMakingOfItsPartition(t *testing.T) {
	b := newBed(t, Config{})
	b.push("")
	lock := b.claimOne()
	run := &Run{Queue: b.q, Entry: lock.Entries[0], Lock: lock, Node: here}
	maker := b.begin()
	b.exec(maker, `SELECT penstock.make_output_partitions()`)
	appended := make(chan error, 1)
	go func() { appended <- run.AppendOutput(b.ctx, 1, []byte("x")) }()
	b.awaitBlocked(maker)
	b.must(maker.Commit(b.ctx))
	b.must(<-appended)
	if n := b.count(`SELECT count(*) FROM penstock.output`); n != 1 {
		t.Errorf("%d pieces are kept, want 1", n)
	}
}
