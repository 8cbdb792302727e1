package gateway

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/worker"
)

// lateBank is a database whose answer to the first lease is lost when the gateway stops: the lease is carried out just
// before, or by run, later.
type lateBank struct {
	postgres.DB
	early bool // it is carried out before the gateway stops
	asked chan struct{}
	once  sync.Once
	run   func() error
}

func (b *lateBank) Query(ctx context.Context, sql string, args ...any) (rows pgx.Rows, err error) {
	if !callsFunction(sql, "lease_slots_within") {
		return b.DB.Query(ctx, sql, args...)
	}
	err = context.DeadlineExceeded
	b.once.Do(func() {
		b.run = func() error {
			rows, err := b.DB.Query(context.WithoutCancel(ctx), sql, args...)
			if err == nil {
				rows.Close()
				err = rows.Err()
			}
			return err
		}
		if b.early {
			err = b.run()
		}
		close(b.asked)
		<-ctx.Done()
		err = ctx.Err()
	})
	return nil, err
}

// A lease whose answer does not come before the gateway stops leaves no slot behind, whether it was carried out or is
// carried out later.
func TestALeaseWhoseAnswerIsLateLeavesNoSlot(t *testing.T) {
	t.Parallel()
	for name, early := range map[string]bool{"carried out before": true, "carried out later": false} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			x := newExchange(t)
			x.exec(`SELECT penstock.register_gateway(1, 'gateway', 'default', interval '1 hour')`)
			db := &lateBank{DB: x.pool, early: early, asked: make(chan struct{})}
			g := New(Config{Open: true})
			l := NewLeases(LeasesConfig{NodeLease: time.Hour, every: time.Hour, timeout: time.Minute}, g, db,
				func() invalidation.NodeID { return 1 })
			g.SetModels([]ModelState{{
				Name: "m", Protocol: worker.ProtocolOpenAI, Policy: DefaultPolicy(),
				Instances: []InstanceState{{ID: x.instance, Slots: 10, Usable: true}},
			}})
			ctx, stop := context.WithCancel(t.Context())
			ended := make(chan error, 1)
			go func() { ended <- l.Run(ctx) }()
			waits := &Request{Flow: "f", TTL: time.Hour, Leave: func(*Request, Dropped) {}}
			l.pool("m").do(func(now time.Time, p *Pool) {
				if _, refused := p.Arrive(now, waits); refused != nil {
					t.Error(refused)
				}
			})
			<-db.asked
			stop()
			if err := <-ended; err != nil {
				t.Error(err)
			}
			if !early {
				if err := db.run(); err != nil {
					t.Error(err)
				}
			}
			if n := x.count(`SELECT count(*) FROM penstock.slot`); n != 0 {
				t.Errorf("%d slots are left", n)
			}
			if n := x.count(`SELECT count(*) FROM penstock.node`); n != 0 {
				t.Error("the row of the gateway is left")
			}
		})
	}
}

// mutedDoubts is a database that refuses doubts.
type mutedDoubts struct{ postgres.DB }

func (d mutedDoubts) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	if strings.Contains(sql, "SET doubt_at") {
		return pgconn.CommandTag{}, errors.New("the statement fails")
	}
	return d.DB.Exec(ctx, sql, args...)
}

// A gateway whose leases end names the slots of calls that have not ended, and those of doubts that it could not tell.
func TestLeasesThatEndKeepTheSlotsInUse(t *testing.T) {
	t.Parallel()
	x := newExchange(t)
	x.exec(`SELECT penstock.register_gateway(1, 'gateway', 'default', interval '1 hour')`)
	g := New(Config{Open: true})
	l := NewLeases(LeasesConfig{NodeLease: time.Hour, every: time.Hour, timeout: time.Minute}, g, mutedDoubts{x.pool},
		func() invalidation.NodeID { return 1 })
	g.SetModels([]ModelState{{
		Name: "m", Protocol: worker.ProtocolOpenAI, Policy: DefaultPolicy(),
		Instances: []InstanceState{{ID: x.instance, Slots: 10, Usable: true}},
	}})
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- l.Run(ctx) }()
	pool := l.pool("m")
	calls := x.admit(pool, 3)
	pool.end(calls[0], CallEnd{Took: time.Second}) // its slot is idle
	inDoubt := calls[1].slot.Held
	l.doubt("m", inDoubt, "online call was broken off")
	pool.end(calls[1], CallEnd{Failed: true, Doubt: true})
	stop()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	var left []int64
	err := x.pool.QueryRow(t.Context(), `SELECT coalesce(array_agg(token ORDER BY token), '{}') FROM penstock.slot`).Scan(&left)
	if err != nil {
		t.Fatal(err)
	}
	want := []int64{inDoubt.Token, calls[2].slot.Token}
	slices.Sort(want)
	if !slices.Equal(left, want) {
		t.Errorf("the slots with the tokens %v are left, want those in use %v", left, want)
	}
}

// A gateway that leaves keeps the slots of calls that have not ended, and those of doubts that it could not tell.
func TestAGatewayThatLeavesFreesNoSlotInUse(t *testing.T) {
	t.Parallel()
	x := newExchange(t)
	pool := x.join(1)
	x.admit(pool, 2)
	x.exec(`UPDATE penstock.slot SET doubt_at = now() WHERE number = 0`)
	x.exec(`SELECT penstock.leave_gateway(1, '{m}', (SELECT array_agg(token) FROM penstock.slot WHERE number = 1))`)
	if n := x.count(`SELECT count(*) FROM penstock.slot WHERE number IN (0, 1)`); n != 2 {
		t.Errorf("%d of the slots in use are left, want 2", n)
	}
	if n := x.count(`SELECT count(*) FROM penstock.slot WHERE number > 1`); n != 0 {
		t.Errorf("%d idle slots are left", n)
	}
}
