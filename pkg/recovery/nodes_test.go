package recovery

import (
	"context"
	"log/slog"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// open is a fence of a term that goes on.
type open struct{ postgres.DB }

func (o open) InTx(ctx context.Context, fn func(pgx.Tx) error) error {
	return postgres.InTx(ctx, o.DB, fn)
}

// A heartbeat since the reading shows that the node lives, whatever the database's clock does.
func TestTheLeaseOfANodeThatBeatsSinceTheReadingStays(t *testing.T) {
	pool, ctx := pgtest.New(t), t.Context()
	must := func(err error) {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
	}
	must(invalidation.Register(ctx, pool, invalidation.Node{ID: 1, Name: "node", Application: "default", Lease: time.Minute}))
	read := func() (beat int64, lives bool) {
		t.Helper()
		must(pool.QueryRow(ctx, `SELECT beat, penstock.node_lives(id) FROM penstock.node`).Scan(&beat, &lives))
		return beat, lives
	}
	l := NewLocks(pool, open{pool}, Config{Log: slog.New(slog.DiscardHandler)})
	before, _ := read()
	_, err := invalidation.Renew(ctx, pool, 1, invalidation.Beat{Tokens: []invalidation.Token{}})
	must(err)
	must(l.lapse(ctx, []Overdue{{ID: 1, Beat: before, Unheard: time.Hour}}))
	beat, lives := read()
	if beat == before || !lives {
		t.Errorf("the lease of a node that beats has lapsed: heartbeat %d, read as %d", beat, before)
	}
	must(l.lapse(ctx, []Overdue{{ID: 1, Beat: beat, Unheard: time.Hour}}))
	if _, lives := read(); lives {
		t.Error("the lease of a node that was not heard for an hour goes on")
	}
}
