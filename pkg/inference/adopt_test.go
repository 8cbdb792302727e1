package inference

import (
	"context"
	"errors"
	"log/slog"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/slot"
)

// silent is a database that answers no query.
type silent struct{ postgres.DB }

type silentRow struct{ ctx context.Context }

func (silent) QueryRow(ctx context.Context, _ string, _ ...any) pgx.Row { return silentRow{ctx} }

func (r silentRow) Scan(...any) error {
	<-r.ctx.Done()
	return r.ctx.Err()
}

// Claims and calls of all models wait for the exchange about the slot of a run.
func TestAnAdoptionWithoutAnswerHoldsOtherExchangesUpForSeconds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		holder := slot.Holder{DB: silent{}, Node: func() invalidation.NodeID { return 7 }}
		p := &SlotPool{
			tuning: usualTuning(), talk: make(talkLock, 1), holder: holder, log: slog.New(slog.DiscardHandler),
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		start := time.Now()
		h, err := p.adopt(ctx, &Endpoint{ID: 1}, slotAt(1, 0, 1))
		if took := time.Since(start); h != nil || err == nil || took > p.tuning.exchangeMax {
			t.Errorf("after %s: slot %v, error %v", took, h, err)
		}
		if !p.unsure {
			t.Error("the pool does not ask whether the slot was adopted")
		}
	})
}

// A node gets many runs at once where another one has drained. Its own drain must not wait for all of them in a row, nor
// what it does about slots once the database answers again.
func TestAdoptionsThatWaitForEachOtherGiveUpTogether(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		holder := slot.Holder{DB: silent{}, Node: func() invalidation.NodeID { return 7 }}
		p := &SlotPool{
			tuning: usualTuning(), talk: make(talkLock, 1), holder: holder, log: slog.New(slog.DiscardHandler),
		}
		start := time.Now()
		var runs sync.WaitGroup
		for range 20 {
			runs.Go(func() {
				if h, err := p.adopt(t.Context(), &Endpoint{ID: 1}, slotAt(1, 0, 1)); h != nil || err == nil {
					t.Errorf("slot %v, error %v", h, err)
				}
			})
		}
		runs.Wait()
		if took := time.Since(start); took > 3*p.tuning.exchangeMax {
			t.Errorf("20 adoptions ended after %s", took)
		}
		drained, drain := context.WithCancel(t.Context())
		if err := p.talk.lock(t.Context()); err != nil {
			t.Fatal(err)
		}
		drain()
		if _, err := p.adopt(drained, &Endpoint{ID: 1}, slotAt(1, 0, 1)); !errors.Is(err, context.Canceled) {
			t.Errorf("an adoption that waits while its run is ended ends with %v", err)
		}
	})
}
