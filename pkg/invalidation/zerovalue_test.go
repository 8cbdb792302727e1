package invalidation

import (
	"database/sql"
	"encoding/json"
	"errors"
	"math"
	"strings"
	"testing"
)

func TestZeroValuesOfAnEmbeddingProgram(t *testing.T) {
	b := newBed(t, Config{})
	t.Run("a push without payload in database/sql", func(t *testing.T) {
		db, err := sql.Open("pgx", b.pool.Config().ConnString())
		b.must(err)
		defer db.Close()
		tx, err := db.BeginTx(b.ctx, nil)
		b.must(err)
		defer tx.Rollback()
		pushed, err := PushSQLTx(b.ctx, tx, "work", Push{Payload: json.RawMessage(`1`)}, Push{})
		if !errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), "payload of entry 2 is missing") {
			t.Errorf("PushSQLTx: %v, %v; want the missing payload refused, as by Push", pushed, err)
		}
	})
	b.push("")
	lock := b.claimOne()
	r := &Run{Queue: b.q, Entry: lock.Entries[0], Lock: lock, Node: here}
	if err := r.Progress(b.ctx, math.NaN(), ""); err != nil {
		t.Errorf("Progress of 0/0: %v", err)
	}
	if err := r.AppendOutput(b.ctx, 1, nil); err != nil {
		t.Errorf("AppendOutput of nothing: %v", err)
	}
	b.settle(doneAll(lock)...)
	NewEntryWatch(b.pool, 0, nil).log.Debug("a watch without a logger has one")
}
