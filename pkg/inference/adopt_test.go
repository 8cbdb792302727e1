package inference

import (
	"context"
	"log/slog"
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
		p := &SlotPool{tuning: usualTuning(), holder: holder, log: slog.New(slog.DiscardHandler)}
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
