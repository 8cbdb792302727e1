package recovery_test

import (
	"log/slog"
	"slices"
	"testing"
	"time"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/recovery"
)

func TestMergeableQueuesThatFallBehindAreCompacted(t *testing.T) {
	f := newFleet(t, pgtest.New(t), invalidation.Config{Mergeable: true})
	for _, key := range []string{"a", "b", "c"} {
		f.push(50, key)
	}
	other, err := invalidation.Create(t.Context(), f.pool, "plain", invalidation.Config{})
	if err != nil {
		t.Fatal(err)
	}
	pushes := slices.Repeat([]invalidation.Push{{Payload: []byte(`{}`), LockKey: "a"}}, 150)
	if _, err := other.Push(t.Context(), pushes...); err != nil {
		t.Fatal(err)
	}
	duty := recovery.NewCompaction(f.pool, &term{db: f.pool}, recovery.Config{
		CompactPause: 20 * time.Millisecond, Log: slog.New(slog.NewTextHandler(t.Output(), nil)),
	})
	run(t, duty)
	eventually(t, "one entry of each key is left", func() bool {
		return f.count(`SELECT count(*) FROM penstock.entry_work`) == 3
	})
	eventually(t, "they are counted", func() bool { return duty.Replaced() == 147 })
	if n := f.count(`SELECT count(*) FROM penstock.entry_plain`); n != 150 {
		t.Errorf("%d entries are left of a queue that is not mergeable", n)
	}
	if n := f.count(`SELECT count(*) FROM penstock.result WHERE outcome = 'done'`); n != 147 {
		t.Errorf("%d entries ended done", n)
	}
}
