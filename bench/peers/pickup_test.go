package peers

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

func TestTheWorkerTellsWhenTheFirstCallOfEachEntryArrived(t *testing.T) {
	worker, err := newInstantWorker(t.Context(), 3)
	if err != nil {
		t.Fatal(err)
	}
	defer worker.server.Close()
	before := monotonic()
	for _, n := range []int{2, 0, 0, 1} {
		body := strings.NewReader(fmt.Sprintf(`{"n":%d}`, n))
		call, err := http.NewRequestWithContext(t.Context(), http.MethodPost, worker.url, body)
		if err != nil {
			t.Fatal(err)
		}
		call.Header.Set("Content-Type", "application/json")
		reply, err := http.DefaultClient.Do(call)
		if err != nil || reply.StatusCode != http.StatusOK {
			t.Fatalf("call of entry %d: %v, %v", n, reply, err)
		}
		_ = reply.Body.Close()
	}
	at, err := arrivalsAt(t.Context(), worker.url)
	if err != nil {
		t.Fatal(err)
	}
	if len(at) != 3 || before > at[2] || at[2] > at[0] || at[0] > at[1] || at[1] > monotonic() {
		t.Errorf("after %d, calls of 2, 0, 0 and 1 arrived at %d by entry", before, at)
	}
}

func TestAPickUpThatNeverArrivesEndsWithItsContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		arrived := newArrivals(2)
		push := func(_ context.Context, i int) error {
			if i == 0 {
				arrived.note(i)
			}
			return nil
		}
		if _, err := pickUp(ctx, 2, push, arrived.wait); !errors.Is(err, context.DeadlineExceeded) {
			t.Errorf("a pick-up of which one entry never arrives ends with %v", err)
		}
	})
}
