package invalidation

import (
	"context"
	"errors"
	"slices"
	"testing"
	"testing/synctest"
	"time"
)

// hints runs a Hinter against a fake database and returns when each hint went out, since the start.
func hints(t *testing.T, notify func([]int32) error, push func(*Hinter)) (sent map[int32][]time.Duration) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		sent = map[int32][]time.Duration{}
		h := newHinter(20*time.Millisecond, func(_ context.Context, queues []int32) error {
			for _, q := range queues {
				sent[q] = append(sent[q], time.Since(start))
			}
			return notify(queues)
		})
		ctx, stop := context.WithCancel(t.Context())
		go func() { _ = h.Run(ctx) }()
		push(h)
		time.Sleep(time.Second)
		stop()
		synctest.Wait()
	})
	return sent
}

func fine([]int32) error { return nil }

func TestTheFirstHintGoesOutAtOnce(t *testing.T) {
	sent := hints(t, fine, func(h *Hinter) { h.Hint(1) })
	if !slices.Equal(sent[1], []time.Duration{0}) {
		t.Errorf("hints went out at %v, want one at once", sent[1])
	}
}

func TestHintsOfAQueueAreOneInTheInterval(t *testing.T) {
	sent := hints(t, fine, func(h *Hinter) {
		for range 100 { // for 100 ms
			h.Hint(1)
			h.Hint(2)
			time.Sleep(time.Millisecond)
		}
	})
	for _, q := range []int32{1, 2} {
		if len(sent[q]) != 6 { // at 0, 20, ..., 80, and one for the last pushes
			t.Errorf("queue %d: hints went out at %v, want six", q, sent[q])
		}
		for i := 1; i < len(sent[q]); i++ {
			if sent[q][i]-sent[q][i-1] < 20*time.Millisecond {
				t.Errorf("queue %d: hints at %v are closer than 20 ms", q, sent[q])
			}
		}
	}
}

func TestTheLastPushOfABurstIsHintedAt(t *testing.T) {
	sent := hints(t, fine, func(h *Hinter) {
		h.Hint(1)
		time.Sleep(time.Millisecond)
		h.Hint(1)
	})
	if want := []time.Duration{0, 20 * time.Millisecond}; !slices.Equal(sent[1], want) {
		t.Errorf("hints went out at %v, want %v", sent[1], want)
	}
}

func TestAPushNeverWaitsForAHint(t *testing.T) {
	var took time.Duration
	hints(t, func([]int32) error { time.Sleep(500 * time.Millisecond); return errors.New("the database is slow") }, func(h *Hinter) {
		start := time.Now()
		for range 1000 {
			h.Hint(1)
		}
		took = time.Since(start)
	})
	if took != 0 {
		t.Errorf("hinting took %s", took)
	}
	(*Hinter)(nil).Hint(1)
}

func TestHintsThatFailAreDropped(t *testing.T) {
	var h *Hinter
	hints(t, func([]int32) error { return errors.New("no database") }, func(it *Hinter) { h = it; it.Hint(1) })
	if h.Sent.Load() != 0 || h.Dropped.Load() != 1 {
		t.Errorf("%d sent, %d dropped; want 0 and 1", h.Sent.Load(), h.Dropped.Load())
	}
}

// listen runs a listener; hints arrive on the channel.
func (b *bed) listen(cfg ListenConfig) (*Listener, <-chan int32) {
	b.Helper()
	heard := make(chan int32, 100)
	cfg.Conn, cfg.Wake = b.pool.Config().ConnConfig.Copy(), func(q int32) { heard <- q }
	l := NewListener(cfg)
	ctx, stop := context.WithCancel(b.ctx)
	done := make(chan struct{})
	go func() { defer close(done); _ = l.Run(ctx) }()
	b.Cleanup(func() { stop(); <-done })
	return l, heard
}

func (b *bed) await(what string, ok func() bool) {
	b.Helper()
	for deadline := time.Now().Add(20 * time.Second); !ok(); time.Sleep(5 * time.Millisecond) {
		if time.Now().After(deadline) {
			b.Fatalf("never: %s", what)
		}
	}
}

func TestAPushIsHeardAfterItsCommit(t *testing.T) {
	b := newBed(t, Config{})
	l, heard := b.listen(ListenConfig{})
	b.await("connected", func() bool { return l.Status().Connected })
	hinter := NewHinter(b.pool, 0)
	go func() { _ = hinter.Run(b.ctx) }()
	q := b.q.Hinting(hinter)

	tx := b.begin()
	if _, err := q.On(tx).Push(b.ctx, withPayload(Push{})); err != nil {
		t.Fatal(err)
	}
	b.commit(tx)
	if n := hinter.Sent.Load(); n != 0 || len(heard) != 0 {
		t.Errorf("a push inside a transaction sent %d hints", n)
	}
	if _, err := q.Push(b.ctx, withPayload(Push{})); err != nil {
		t.Fatal(err)
	}
	select {
	case id := <-heard:
		if id != q.ID {
			t.Errorf("heard of queue %d, want %d", id, q.ID)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("the push was not heard of")
	}
}

func TestAListenerComesBackAfterItsConnectionIsKilled(t *testing.T) {
	b := newBed(t, Config{})
	l, heard := b.listen(ListenConfig{SelfTest: 50 * time.Millisecond})
	b.await("connected", func() bool { return l.Status().Connected && l.Status().RoundTrip > 0 })
	b.exec(b.pool, `SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'LISTEN%' OR query LIKE '%pg_notify($1, $2)%' AND pid <> pg_backend_pid()`)
	b.await("connected again", func() bool { s := l.Status(); return s.Connected && s.Reconnects >= 1 })
	b.exec(b.pool, hintSQL, []int32{7})
	if id := <-heard; id != 7 {
		t.Errorf("heard of queue %d, want 7", id)
	}
}

func TestAListenerThatHearsNothingSaysSo(t *testing.T) {
	b := &bed{T: t, ctx: t.Context(), pool: openPool(t)}
	conn := b.pool.Config().ConnConfig.Copy()
	conn.Host, conn.Port = t.TempDir(), 1
	l := NewListener(ListenConfig{Conn: conn, Wake: func(int32) {}, EchoWithin: 200 * time.Millisecond, RetryMax: 10 * time.Millisecond})
	ctx, stop := context.WithCancel(b.ctx)
	done := make(chan struct{})
	go func() { defer close(done); _ = l.Run(ctx) }()
	b.await("an error", func() bool { return l.Status().Error != "" && l.Status().Reconnects > 2 })
	stop()
	<-done
	if l.Status().Connected {
		t.Error("the listener says it is connected")
	}
}
