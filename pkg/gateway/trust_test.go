package gateway

import (
	"context"
	"reflect"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/slot"
	"github.com/penstock/penstock/pkg/worker"
)

// trusting is a gateway with one slot, whose trust moves on only as the test says.
func trusting(lease time.Duration, db postgres.DB) (l *Leases, mayUse func(ctx context.Context) bool) {
	g := New(Config{Open: true})
	l = NewLeases(LeasesConfig{NodeLease: lease}, g, db, func() invalidation.NodeID { return 1 })
	g.SetModels([]ModelState{{
		Name: "m", Protocol: worker.ProtocolOpenAI, Policy: DefaultPolicy(),
		Instances: []InstanceState{{ID: 1, Slots: 1, Usable: true}},
	}})
	g.Fixed()
	return l, func(ctx context.Context) bool {
		r := &Request{TTL: time.Millisecond}
		err := l.pool("m").await(ctx, r)
		if err == nil {
			l.pool("m").end(r, CallEnd{Took: time.Millisecond})
		}
		return err == nil
	}
}

// A process that was stopped uses no slot before it has compared them with the database; one that runs uses them
// also while the database is away.
func TestSlotsAreTrustedWhileTheProcessRuns(t *testing.T) {
	t.Parallel()
	for _, lease := range []time.Duration{5 * time.Second, 30 * time.Second} {
		synctest.Test(t, func(t *testing.T) {
			l, mayUse := trusting(lease, nil)
			may := func() bool { return mayUse(t.Context()) }
			ctx, stop := context.WithCancel(t.Context())
			go l.keepTrust(ctx)
			time.Sleep(10 * time.Minute)
			if !may() {
				t.Errorf("lease %s: no slot is used although the process runs", lease)
			}
			stop() // as if no goroutine of it ran
			time.Sleep(lease)
			if may() {
				t.Errorf("lease %s: a slot is used after a stop", lease)
			}
			l.moveTrust()
			if may() || len(l.wake) == 0 {
				t.Errorf("lease %s: a slot is used after a stop, or no comparison is asked for (%d)", lease, len(l.wake))
			}
			l.trustUntil(time.Now().Add(l.trust()))
			if !may() {
				t.Errorf("lease %s: no slot is used after a comparison", lease)
			}
		})
	}
}

// lateDB answers which slots are held, after some time.
type lateDB struct {
	postgres.DB
	after time.Duration
}

func (d *lateDB) Query(context.Context, string, ...any) (pgx.Rows, error) {
	time.Sleep(d.after) // also beyond the bound of the statement: the process was stopped
	return &slotRows{slots: []slot.Held{{Instance: 1, Token: 1}}}, nil
}

// slotRows is the answer that slots are the gateway's, for 30 s more.
type slotRows struct {
	pgx.Rows
	slots []slot.Held
	read  int
}

func (r *slotRows) Next() bool {
	r.read++
	return r.read <= len(r.slots)
}

func (r *slotRows) Scan(to ...any) error {
	s := r.slots[r.read-1]
	for i, value := range []any{&s.Instance, &s.Number, &s.Token, false, int64(30_000)} {
		reflect.ValueOf(to[i]).Elem().Set(reflect.ValueOf(value))
	}
	return nil
}

func (r *slotRows) Close()                        {}
func (r *slotRows) Err() error                    { return nil }
func (r *slotRows) CommandTag() pgconn.CommandTag { return pgconn.CommandTag{} }

// A comparison renews the trust from when it was asked for: an answer that a process reads after a stop says nothing
// about the time of the stop.
func TestOldComparisonRenewsNoTrust(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		db := &lateDB{after: 4 * time.Second}
		l, mayUse := trusting(6*time.Second, db) // a trust of 3 s
		l.moveTrust()
		time.Sleep(time.Second)
		l.compare(t.Context()) // stopped between question and answer
		if mayUse(t.Context()) || len(l.wake) == 0 {
			t.Errorf("a slot is used after the answer to an old question, or no comparison is asked for (%d)", len(l.wake))
		}
		db.after = 2 * time.Second
		<-l.wake
		l.compare(t.Context())
		if !mayUse(t.Context()) || len(l.wake) > 0 {
			t.Errorf("no slot is used after a comparison, or another is asked for (%d)", len(l.wake))
		}
		time.Sleep(l.trust() - 2*time.Second + time.Millisecond)
		if mayUse(t.Context()) {
			t.Error("the trust lasts from the answer, not from the question")
		}
	})
}
