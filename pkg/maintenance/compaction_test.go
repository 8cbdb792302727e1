package maintenance_test

import (
	"context"
	"log/slog"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/maintenance"
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
	duty := maintenance.NewCompaction(f.pool, &term{db: f.pool}, maintenance.Config{
		CompactPause: 20 * time.Millisecond, Log: slog.New(slog.NewTextHandler(t.Output(), nil)),
	})
	run(t, duty)
	eventually(t, "one entry of each key is left", func() bool {
		return f.count(`SELECT count(*) FROM penstock.entry_work`) == 3
	})
	if n := f.count(`SELECT count(*) FROM penstock.entry_plain`); n != 150 {
		t.Errorf("%d entries are left of a queue that is not mergeable", n)
	}
	if n := f.count(`SELECT count(*) FROM penstock.result WHERE outcome = 'done'`); n != 147 {
		t.Errorf("%d entries ended done", n)
	}
}

// refusing is a database that refuses to list the queues that fall behind, some times.
type refusing struct {
	*pgxpool.Pool
	times atomic.Int32
}

func (r *refusing) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	if strings.Contains(sql, "q.mergeable") && r.times.Add(-1) >= 0 {
		return nil, &pgconn.PgError{Severity: "ERROR", Code: "57014"}
	}
	return r.Pool.Query(ctx, sql, args...)
}

// A queue that takes too long to count ended the term of its leader, and of the next one.
func TestCompactionThatIsRefusedDoesNotEndTheTerm(t *testing.T) {
	f := newFleet(t, pgtest.New(t), invalidation.Config{Mergeable: true})
	f.push(150, "a")
	db := &refusing{Pool: f.pool}
	db.times.Store(5)
	run(t, maintenance.NewCompaction(db, &term{db: f.pool}, maintenance.Config{
		CompactPause: 20 * time.Millisecond, GiveUp: time.Millisecond,
	}))
	eventually(t, "one entry is left", func() bool { return f.count(`SELECT count(*) FROM penstock.entry_work`) == 1 })
}
