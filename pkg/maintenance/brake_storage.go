package maintenance

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	"github.com/penstock/penstock/internal/duty"
)

const (
	// sizeEvery is how often the database is measured, for which the server reads the size of each of its files.
	sizeEvery = 15 * time.Second
	// measureMax bounds how long the database may measure itself.
	measureMax = 15 * time.Second
	// waitMax bounds the wait of a pass for a measurement.
	waitMax = time.Second
)

// storageUse is the use of the storage.
type storageUse struct {
	bytes           int64   // of the database
	disk            float64 // share of its disk
	noBytes, noDisk bool    // it is not known, and zero
}

const databaseBytesSQL = `SELECT pg_catalog.pg_database_size(pg_catalog.current_database())`

// measure reads the share of the disk, and the size of the database unless that was done a moment ago. The size of a
// moment ago serves while the database takes its time to answer.
func (b *Brake) measure(ctx context.Context) (m storageUse) {
	if b.cfg.Brake.DatabaseBytesMax > 0 {
		if time.Now().After(b.sizeAfter) {
			b.measureDatabase(ctx)
		}
		m.bytes, m.noBytes = value(b.bytes), b.bytes == nil
	}
	if b.cfg.Brake.Disk != nil {
		disk, err := b.disk.ask(ctx, b.cfg.Log, b.cfg.Brake.Disk)
		b.report(ctx, "use of the disk", err)
		m.disk, m.noDisk = disk, err != nil
	}
	return m
}

func (b *Brake) measureDatabase(ctx context.Context) {
	bytes, err := b.database.ask(ctx, b.cfg.Log, func() (bytes int64, err error) {
		ctx, cancel := context.WithTimeout(ctx, measureMax)
		defer cancel()
		return bytes, b.db.QueryRow(ctx, databaseBytesSQL).Scan(&bytes)
	})
	if b.database.answered() {
		b.sizeAfter = time.Now().Add(sizeEvery)
	}
	switch {
	case err == nil:
		b.bytes, b.sized = &bytes, time.Now()
	case time.Since(b.sized) < sizeEvery+measureMax:
		return // a moment ago
	default:
		b.bytes = nil
	}
	b.report(ctx, "size of the database", err)
}

// question is a measurement that may take long, or hang, as a file system can. The passes go on beside it: it is not
// asked again until it has answered.
type question[T any] struct{ answer chan answer[T] }

type answer[T any] struct {
	value T
	err   error
}

func (q *question[T]) answered() bool { return q.answer == nil }

// ask asks, or waits for the answer to what was asked before, for waitMax. The value is zero with an error. read may
// outlive the pass, and uses a context of the term.
func (q *question[T]) ask(ctx context.Context, log *slog.Logger, read func() (T, error)) (none T, err error) {
	if q.answer == nil {
		answered := make(chan answer[T], 1)
		q.answer = answered
		go func() {
			var a answer[T]
			a.err = duty.Protect(ctx, log, func() (err error) {
				a.value, err = read()
				return err
			})
			answered <- a
		}()
	}
	select {
	case a := <-q.answer:
		q.answer = nil
		if a.err != nil {
			return none, a.err
		}
		return a.value, nil
	case <-time.After(waitMax):
		return none, fmt.Errorf("no answer within %v", waitMax)
	case <-ctx.Done():
		return none, ctx.Err()
	}
}

// report takes note of the outcome of a measurement of the room for pushes. Those that it refuses stay refused while it
// fails; no push is refused by it meanwhile, and an alert goes by the count of the errors.
func (b *Brake) report(ctx context.Context, measurement string, err error) {
	b.cfg.failing.Note(ctx, b.cfg.Log, slog.LevelError, "measure the room for pushes", measurement, err,
		"measurement", measurement)
}
