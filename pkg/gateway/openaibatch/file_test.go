package openaibatch

import (
	"errors"
	"io"
	"strings"
	"testing"
	"time"

	"github.com/penstock/penstock/internal/duty"
	"github.com/penstock/penstock/pkg/gateway"
)

// A file that is removed while it is read ends with an error: a part of it is not taken for the whole.
func TestRemovedFileIsNotReadAsAShorterOne(t *testing.T) {
	t.Parallel()
	s := newShop(t, Config{})
	id := s.file("whole")
	if text, err := io.ReadAll(openFile(t.Context(), s.pool, id, 5)); err != nil || string(text) != "whole" {
		t.Errorf("got %q, %v", text, err)
	}
	b := s.create(id)
	s.exec(`DELETE FROM penstock.gateway_file_chunk WHERE file_id = $1`, id)
	if text, err := io.ReadAll(openFile(t.Context(), s.pool, id, 5)); !errors.Is(err, errNoFile) {
		t.Errorf("got %q, %v", text, err)
	}
	s.step1(b)
	if b = s.again(b); b.Status != failed {
		t.Errorf("the batch is %s", b.Status)
	}
}

// Files have small chunks, however much is added at once: a reader has one of them in memory.
func TestChunksOfFilesAreSmall(t *testing.T) {
	t.Parallel()
	s := newShop(t, Config{})
	id := s.file(strings.Repeat("x", 2*chunkBytes+1))
	var largest, chunks int
	err := s.pool.QueryRow(t.Context(),
		`SELECT max(octet_length(data)), count(*) FROM penstock.gateway_file_chunk WHERE file_id = $1`, id).Scan(&largest, &chunks)
	if err != nil || largest != chunkBytes || chunks != 3 {
		t.Errorf("got %d chunks of up to %d bytes, %v", chunks, largest, err)
	}
}

// A file cannot be deleted between the check of a batch that needs it and the batch, and stays as long as one needs it.
func TestInputOfABatchStays(t *testing.T) {
	t.Parallel()
	s := newShop(t, Config{})
	id := s.file("nonsense")
	b := s.create(id)
	tx, err := s.pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if err := lockInput(t.Context(), tx, order{Owner: "shop", Input: id}); err != nil {
		t.Fatal(err)
	}
	hidden := make(chan error, 1)
	go func() { hidden <- hideFile(t.Context(), s.pool, "shop", id) }()
	for waits := 0; waits == 0; time.Sleep(5 * time.Millisecond) {
		if err := s.pool.QueryRow(t.Context(),
			`SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'`).Scan(&waits); err != nil {
			t.Fatal(err)
		}
		select {
		case err := <-hidden:
			t.Fatalf("the file was deleted: %v", err)
		default:
		}
	}
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := <-hidden; err != nil {
		t.Fatal(err)
	}
	if _, err := createBatch(t.Context(), s.pool, order{Owner: "shop", Input: id}); err == nil {
		t.Error("a batch was created of a deleted file")
	}
	s.exec(`UPDATE penstock.gateway_file SET deleted_at = clock_timestamp() - interval '1 hour' WHERE id = $1`, id)
	for _, want := range []int64{1, 0} {
		if err := s.sweep(t.Context()); err != nil {
			t.Fatal(err)
		}
		var files int64
		if err := s.pool.QueryRow(t.Context(), `SELECT count(*) FROM penstock.gateway_file WHERE id = $1`, id).Scan(&files); err != nil {
			t.Fatal(err)
		}
		if files != want {
			t.Errorf("%d files are there, want %d: the batch is %s", files, want, s.again(b).Status)
		}
		if want == 1 {
			s.step1(b) // it fails, and has no outputs
		}
	}
}

// A clock that jumps ahead for a moment deletes no file of a client, and ends no batch.
func TestNothingIsDeletedOrEndedByAClockThatHasJumped(t *testing.T) {
	t.Parallel()
	s := newShop(t, Config{})
	old, b := s.file("old"), s.create(s.file("nonsense"))
	s.exec(`UPDATE penstock.gateway_file SET expires_at = clock_timestamp() - interval '1 hour' WHERE id = $1`, old)
	s.exec(`UPDATE penstock.gateway_batch SET expires_at = clock_timestamp() - interval '1 hour'`)
	files := func() (n int) {
		if err := s.pool.QueryRow(t.Context(), `SELECT count(*) FROM penstock.gateway_file WHERE id = $1`, old).Scan(&n); err != nil {
			t.Fatal(err)
		}
		return n
	}
	// The time that has passed is that of five hours ago: the database's clock is ahead.
	if err := s.clock.Check(time.Now().Add(-5 * time.Hour)); err != nil {
		t.Fatal(err)
	}
	if err := s.sweep(t.Context()); !errors.Is(err, duty.ErrClock) || files() != 1 {
		t.Errorf("the sweep ended with %v, and %d of 1 files are left", err, files())
	}
	if s.step1(b); s.again(b).Status != validating {
		t.Errorf("the batch is %s", s.again(b).Status)
	}
	right := New(Config{}, nil, s.pool)
	if err := right.sweep(t.Context()); err != nil || files() != 0 {
		t.Errorf("by a clock that is believed the sweep ended with %v, and %d files are left", err, files())
	}
	s.exec(`UPDATE penstock.gateway_batch SET next_at = clock_timestamp()`)
	if !right.turn(t.Context()) || s.again(b).Status != expired {
		t.Errorf("by a clock that is believed the batch is %s", s.again(b).Status)
	}
}

// What is behind an object that is gone is not known, and the list does not end there.
func TestAListBehindWhatIsGoneIsRefused(t *testing.T) {
	t.Parallel()
	s := newShop(t, Config{})
	file := s.file("nonsense")
	batch := s.create(file).ID
	batches := func(after string) (int, error) {
		list, err := batchesOf(t.Context(), s.pool, "shop", after, 1)
		return len(list), err
	}
	files := func(after string) (int, error) {
		list, err := listFiles(t.Context(), s.pool, "shop", "", after, true, 1)
		return len(list), err
	}
	for _, c := range []struct {
		list  func(after string) (int, error)
		last  string
		table string
	}{{batches, batch, "gateway_batch"}, {files, file, "gateway_file"}} {
		if n, err := c.list(""); n != 1 || err != nil {
			t.Errorf("%s: %d are listed (%v), want 1", c.table, n, err)
		}
		if n, err := c.list(c.last); n != 0 || err != nil {
			t.Errorf("%s: %d are listed behind the last (%v), want none", c.table, n, err)
		}
		s.exec(`DELETE FROM penstock.`+c.table+` WHERE id = $1`, c.last)
		if _, err := c.list(c.last); err == nil {
			t.Errorf("%s: a list behind what is gone is empty, want it refused", c.table)
		} else if status, text := gateway.ErrorOf(err); status != 400 || !strings.Contains(text, c.last) {
			t.Errorf("%s: a list behind what is gone: %d %s", c.table, status, text)
		}
		if n, err := c.list(""); n != 0 || err != nil {
			t.Errorf("%s: %d are listed (%v), want none", c.table, n, err)
		}
	}
}
