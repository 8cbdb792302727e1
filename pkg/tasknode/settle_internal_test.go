package tasknode

import (
	"context"
	"encoding/json"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"
	"github.com/jackc/pgx/v5/pgtype"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/pkg/invalidation"
)

// Endings go together as long as a message holds them: one of 1 GB would be refused, and sent again for ever.
func TestEndingsOfATransactionFitIntoAMessage(t *testing.T) {
	large := json.RawMessage(`"` + strings.Repeat("a", 10<<20) + `"`)
	done := func(result json.RawMessage) invalidation.Ending {
		return invalidation.Done(&invalidation.Lock{}, 1, result, 0)
	}
	var small, mixed []invalidation.Ending
	for range 2 * settleMax {
		small = append(small, done(nil))
	}
	for range 10 {
		mixed = append(mixed, done(large))
	}
	for _, c := range []struct {
		name    string
		endings []invalidation.Ending
		want    int
	}{
		{"none", nil, 0},
		{"few", small[:7], 7},
		{"many", small, settleMax},
		{"large", mixed, 3},
		{"one that is larger alone", []invalidation.Ending{done(json.RawMessage(strings.Repeat("a", settleBytesMax+1))), done(nil)}, 1},
	} {
		if got := fitting(c.endings); got != c.want {
			t.Errorf("%s: %d of %d go together, want %d", c.name, got, len(c.endings), c.want)
		}
	}
}

// limited is a database that ends statements which settle more than max entries.
type limited struct {
	*pgxpool.Pool
	max  int
	code string
	// statements that settle, and those that were ended
	settled, ended int
}

func (l *limited) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	if strings.Contains(sql, "unnest($2::bigint[], $3::bigint[], $4::jsonb[]") {
		l.settled++
		if ids, ok := args[1].(pgtype.ArrayGetter); ok && int(ids.Dimensions()[0].Length) > l.max {
			l.ended++
			return nil, &pgconn.PgError{Severity: "ERROR", Code: l.code}
		}
	}
	return l.Pool.Query(ctx, sql, args...)
}

// A batch that cannot be recorded in time was sent again for ever, while heartbeats listed its locks. One with a row that
// is refused was sent row by row.
func TestABatchThatCannotBeRecordedIsDivided(t *testing.T) {
	for code, most := range map[string]int{
		"57014": 2*(1+2+4+8) + 16, // each size twice, up to the one that is recorded
		"22P02": 1 + 2 + 4 + 8 + 16,
	} {
		t.Run(code, func(t *testing.T) {
			const entries, fit = 64, 4
			db := &limited{Pool: pgtest.New(t), max: fit, code: code}
			q, err := invalidation.Create(t.Context(), db.Pool, "work", invalidation.Config{})
			if err != nil {
				t.Fatal(err)
			}
			pushes := make([]invalidation.Push, entries)
			for i := range pushes {
				pushes[i].Payload = json.RawMessage(`1`)
			}
			if _, err := q.Push(t.Context(), pushes...); err != nil {
				t.Fatal(err)
			}
			n := New(Config{Log: slog.New(slog.DiscardHandler)}, db, db)
			if err := n.register(t.Context()); err != nil {
				t.Fatal(err)
			}
			claimed, err := q.Claim(t.Context(), invalidation.ClaimRequest{
				Node: n.id(), ClaimID: 1, Lane: invalidation.Lane{Priority: 1}, Limit: entries,
			})
			if err != nil || len(claimed.Locks) != entries {
				t.Fatalf("claimed %d locks: %v", len(claimed.Locks), err)
			}
			p := pile{queue: q.WithTx(db)}
			for _, l := range claimed.Locks {
				j := assigned()
				j.lock, j.reserved.node, j.reserved.queue = l, n, j.served
				n.jobs.add(j)
				p.endings = append(p.endings, last(invalidation.Done(l, l.Entries[0].ID, nil, 0)))
				p.jobs = append(p.jobs, j)
			}
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			n.record(ctx, p)
			var left int
			err = db.QueryRow(t.Context(), `SELECT count(*) FROM penstock.lock`).Scan(&left)
			if err != nil || left > 0 || n.stats.Unrecorded.Load() > 0 {
				t.Errorf("%d locks are left, %d endings unrecorded (%v)", left, n.stats.Unrecorded.Load(), err)
			}
			if db.settled > most {
				t.Errorf("%d statements, %d of them ended, want at most %d", db.settled, db.ended, most)
			}
		})
	}
}
