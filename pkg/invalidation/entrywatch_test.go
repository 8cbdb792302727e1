package invalidation

import (
	"context"
	"errors"
	"log/slog"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
)

// away is a database that refuses each connection at once.
type away struct {
	postgres.DB
	asked atomic.Int64
}

func (a *away) Query(context.Context, string, ...any) (pgx.Rows, error) {
	a.asked.Add(1)
	return nil, errors.New("connection refused")
}

// While the database is away its refusals cost no time, from which the pause between polls would follow.
func TestWatchAsksADatabaseThatIsAwayOnceASecond(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		db := &away{}
		w, err := NewEntryWatch(db, 1, slog.New(slog.DiscardHandler)).Wait(1, 1, "")
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		if n := db.asked.Load(); n < 59 || n > 61 {
			t.Errorf("%d polls in a minute, want 60", n)
		}
		if w.News().Ended {
			t.Error("the entry is said to have ended")
		}
		w.Leave()
		time.Sleep(time.Minute)
		synctest.Wait()
		if n := db.asked.Load(); n > 61 {
			t.Errorf("%d polls although nobody waits", n-60)
		}
	})
}

func TestOneHolderHasHalfOfTheWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		watch := NewEntryWatch(&away{}, 4, slog.New(slog.DiscardHandler))
		var waiting []*EntryWaiter
		enter := func(holder string, want error) {
			t.Helper()
			c, err := watch.Wait(1, 1, holder)
			if !errors.Is(err, want) {
				t.Errorf("a wait of %q: %v, want %v", holder, err, want)
			}
			if err == nil {
				waiting = append(waiting, c)
			}
		}
		enter("a", nil)
		enter("a", nil)
		enter("a", ErrTooManyWaiters)
		enter("b", nil)
		enter("", nil)
		enter("b", ErrTooManyWaiters) // of all
		waiting[0].Leave()
		enter("a", nil)
		for _, c := range waiting[1:] {
			c.Leave()
		}
		if len(watch.of) > 0 || watch.Waiting() > 0 {
			t.Errorf("counted after all have left: %v", watch.of)
		}
		time.Sleep(time.Minute) // the poll ends
		synctest.Wait()
	})
}
