package gateway

import (
	"bytes"
	"context"
	"errors"
	"log/slog"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/penstock/penstock/internal/postgres"
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

// hungDB keeps each statement until its context ends.
type hungDB struct{ bank }

func (*hungDB) Query(ctx context.Context, _ string, _ ...any) (pgx.Rows, error) {
	<-ctx.Done()
	return nil, ctx.Err()
}

func (*hungDB) QueryRow(ctx context.Context, _ string, _ ...any) pgx.Row {
	<-ctx.Done()
	return goneRow{}
}

func (*hungDB) Exec(ctx context.Context, _ string, _ ...any) (pgconn.CommandTag, error) {
	<-ctx.Done()
	return pgconn.CommandTag{}, ctx.Err()
}

type goneRow struct{}

func (goneRow) Scan(...any) error { return errGone }

// While the database is away, or keeps all statements, slots are used for a quarter of an hour, or, where the policy is
// strict, until the lease is over.
func TestSlotsEndWhileTheDatabaseStaysAway(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		db     postgres.DB
		strict bool
		holds  time.Duration
	}{
		"usual":            {&goneDB{}, false, 15 * time.Minute},
		"strict":           {&goneDB{}, true, 30 * time.Second},
		"no answer at all": {&hungDB{}, false, 15 * time.Minute},
		"none and strict":  {&hungDB{}, true, 30 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				g := New(Config{Open: true})
				l := NewLeases(LeasesConfig{}, g, c.db, func() invalidation.NodeID { return 1 })
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

// A request that is to become an entry is told to come again while the database keeps all statements.
func TestAPushEndsWhileTheDatabaseKeepsStatements(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		ctx, cancel := context.WithTimeout(t.Context(), time.Hour)
		defer cancel()
		q, d := NewQueuePusher(QueuePusherConfig{}, &hungDB{}), Durable{Queue: "m", Key: "k"}
		began := time.Now()
		if _, err := q.AcceptedBefore(ctx, d); err == nil || time.Since(began) > postgres.AnswerMax {
			t.Errorf("whether it was accepted is told after %s: %v", time.Since(began), err)
		}
		began = time.Now()
		if _, _, err := q.Push(ctx, d); err == nil || time.Since(began) > postgres.AnswerMax {
			t.Errorf("a push ends after %s: %v", time.Since(began), err)
		}
	})
}

// hungSweep answers nothing, and keeps a sweep until its context ends.
type hungSweep struct {
	goneDB
	shares atomic.Int32 // readings of shares
}

func (d *hungSweep) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	if callsFunction(sql, "slot_share") {
		d.shares.Add(1)
	}
	return d.goneDB.Query(ctx, sql, args...)
}

func (d *hungSweep) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	if callsFunction(sql, "sweep_gateways") {
		<-ctx.Done()
	}
	return d.goneDB.Exec(ctx, sql, args...)
}

// A sweep without an answer, as over a connection that a pooler has forgotten, ends, and what waits for it goes on.
func TestASweepWithoutAnAnswerEnds(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		g := New(Config{Open: true})
		d := &hungSweep{}
		l := NewLeases(LeasesConfig{}, g, d, func() invalidation.NodeID { return 1 })
		g.SetModels([]ModelState{{
			Name: "m", Protocol: worker.ProtocolOpenAI, Policy: DefaultPolicy(),
			Instances: []InstanceState{{ID: 1, Slots: 4, Usable: true}},
		}})
		g.Fixed()
		ctx, stop := context.WithCancel(t.Context())
		var group sync.WaitGroup
		group.Go(func() { _ = l.Run(ctx) })
		time.Sleep(2 * time.Minute)
		before := d.shares.Load()
		time.Sleep(time.Minute)
		if after := d.shares.Load(); before == 0 || after == before {
			t.Errorf("shares were read %d times in two minutes, and %d times in three", before, after)
		}
		stop()
		group.Wait()
	})
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
