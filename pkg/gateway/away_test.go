package gateway

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/worker"
)

// goneDB answers nothing.
type goneDB struct{ bank }

var errGone = errors.New("the database is away")

func (*goneDB) Query(context.Context, string, ...any) (pgx.Rows, error) { return nil, errGone }
func (*goneDB) QueryRow(context.Context, string, ...any) pgx.Row        { return goneRow{} }
func (*goneDB) Exec(context.Context, string, ...any) (pgconn.CommandTag, error) {
	return pgconn.CommandTag{}, errGone
}

type goneRow struct{}

func (goneRow) Scan(...any) error { return errGone }

// While the database is away slots are used for a quarter of an hour, or, where the policy is strict, until the lease is
// over.
func TestSlotsEndWhileTheDatabaseStaysAway(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		strict bool
		holds  time.Duration
	}{
		"usual":  {false, 15 * time.Minute},
		"strict": {true, 30 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				g := New(Config{Open: true})
				l := NewLeases(LeasesConfig{}, g, &goneDB{}, func() invalidation.NodeID { return 1 })
				policy := DefaultPolicy()
				policy.StrictSlots = c.strict
				g.SetModels([]ModelState{{
					Name: "m", Protocol: worker.ProtocolOpenAI, Policy: policy,
					Instances: []InstanceState{{ID: 1, Slots: 4, Usable: true}},
				}})
				g.Fixed()
				l.extendNodeLease(time.Now().Add(30 * time.Second)) // as a comparison does just before
				ctx, stop := context.WithCancel(t.Context())
				var group sync.WaitGroup
				group.Go(func() { _ = l.Run(ctx) })
				time.Sleep(c.holds - time.Second)
				if s := g.States()[0]; s.Held != 4 || !l.Figures().Degraded {
					t.Errorf("%d slots are held and degraded is %v a second before %s", s.Held, l.Figures().Degraded, c.holds)
				}
				r := &Request{Flow: "f", Criticality: Critical, TTL: time.Second}
				if err := l.pool("m").await(ctx, r); err != nil {
					t.Errorf("a request is not served: %v", err)
				} else {
					l.pool("m").end(r, CallEnd{Took: time.Millisecond})
				}
				time.Sleep(3 * time.Second)
				if s := g.States()[0]; s.Held != 0 {
					t.Errorf("%d slots are held behind %s", s.Held, c.holds)
				}
				stop()
				group.Wait()
			})
		})
	}
}

// Another session may have the rows of one model: its statements fail, and those of other models work.
func TestStatementsOfOneModelThatFailAreLoggedOnce(t *testing.T) {
	t.Parallel()
	var text bytes.Buffer
	l := NewLeases(LeasesConfig{Log: slog.New(slog.NewTextHandler(&text, nil))}, New(Config{}), nil, nil)
	for range 10 {
		for model, err := range map[string]error{"held": errors.New("locked"), "other": nil} {
			l.answered(err, "lease", model)
		}
	}
	if lines := strings.Count(text.String(), "\n"); lines != 1 || !strings.Contains(text.String(), "model=held") {
		t.Errorf("the log has %d lines, want one of model held:\n%s", lines, text.String())
	}
	l.answered(nil, "lease", "held")
	if !strings.Contains(text.String(), "works again") {
		t.Errorf("it works again:\n%s", text.String())
	}
}
