package invalidation

import (
	"context"
	"encoding/json"
	"testing"
	"time"

	"github.com/penstock/penstock/internal/pgtest"
)

// standbyBed is a bed on a server of its own, whose commits wait for a synchronous standby once Standbys has named one.
type standbyBed struct {
	*bed
	own *pgtest.Own
}

func newStandbyBed(t *testing.T) standbyBed {
	own := pgtest.ServerWith(t, map[string]string{"synchronous_commit": "on", "max_wal_senders": "1"})
	b := standbyBed{&bed{T: t, ctx: t.Context(), pool: openOn(t, own.DSN())}, own}
	q, err := Create(b.ctx, b.pool, "work", Config{})
	b.must(err)
	b.q = q
	return b
}

func (b standbyBed) until(what, sql string, args ...any) {
	b.Helper()
	for deadline := time.Now().Add(time.Minute); b.count(sql, args...) == 0; time.Sleep(2 * time.Millisecond) {
		if time.Now().After(deadline) {
			b.Fatalf("waited for %s in vain", what)
		}
	}
}

const waitForStandby = `SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'`

// giveUp calls fn, whose commit waits for the standby, and gives it up then. The driver cancels the wait, and the
// transaction is there, on this server alone.
func (b standbyBed) giveUp(fn func(ctx context.Context) error) {
	b.Helper()
	ctx, cancel := context.WithCancel(b.ctx)
	ended := make(chan error, 1)
	go func() { ended <- fn(ctx) }()
	b.until("the wait for the standby", waitForStandby)
	cancel()
	if err := <-ended; err == nil {
		b.Fatal("what was given up has succeeded")
	}
}

// waits calls fn, which must not succeed before commits wait for no standby any more.
func (b standbyBed) waits(fn func() error) {
	b.Helper()
	ended := make(chan error, 1)
	go func() { ended <- fn() }()
	for deadline := time.Now().Add(time.Minute); b.count(waitForStandby) == 0; time.Sleep(2 * time.Millisecond) {
		select {
		case err := <-ended:
			b.Fatalf("it was acknowledged though the standby has not got it (%v)", err)
		default:
		}
		if time.Now().After(deadline) {
			b.Fatal("it does not wait for the standby")
		}
	}
	b.own.Standbys("")
	b.must(<-ended)
}

// A push that a standby has not got is not acknowledged, not by its repetition either: a failover would lose it.
func TestARepeatedPushWaitsForTheStandbyAsTheFirstOneDid(t *testing.T) {
	b := newStandbyBed(t)
	push := Push{Payload: json.RawMessage(`{}`), IdempotencyKey: "once"}
	b.own.Standbys("away")
	b.giveUp(func(ctx context.Context) error { _, err := b.q.Push(ctx, push); return err })
	b.until("the entry", `SELECT count(*) FROM penstock.entry`)
	b.waits(func() error {
		pushed, err := b.q.Push(b.ctx, push)
		if err == nil && pushed[0].Verdict != Replayed {
			t.Errorf("the repetition is %v", pushed[0].Verdict)
		}
		return err
	})
}

// A claim that a standby has not got is not begun: after a failover its tokens would be given out again.
func TestAClaimWithoutAnAnswerIsFoundOnceTheStandbyHasIt(t *testing.T) {
	b := newStandbyBed(t)
	b.push("")
	b.own.Standbys("away")
	b.giveUp(func(ctx context.Context) error {
		_, err := b.q.Claim(ctx, ClaimRequest{Node: here, Lane: usual, Limit: 1, ClaimID: 1})
		return err
	})
	b.until("the lock", `SELECT count(*) FROM penstock.lock`)
	b.waits(func() error {
		locks, err := locksIn(b.q.Reclaim(b.ctx, here, 1))
		if err == nil && len(locks) != 1 {
			t.Errorf("found %d locks", len(locks))
		}
		return err
	})
}
