package invalidation

import (
	"context"
	"errors"
	"fmt"
	"net"
	"slices"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/penstock/penstock/internal/postgres"
)

// hints runs a Hinter that may send one hint in 20 ms against a fake database, and returns when each hint went out,
// since the start.
func hints(t *testing.T, notify func() error, push func(*Hinter)) (sent map[string][]time.Duration) {
	t.Helper()
	synctest.Test(t, func(t *testing.T) {
		start := time.Now()
		sent = map[string][]time.Duration{}
		h := newHinter(20*time.Millisecond, func(_ context.Context, hints []string) error {
			for _, text := range hints {
				sent[text] = append(sent[text], time.Since(start))
			}
			return notify()
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

func fine() error { return nil }

func TestHintsOfPushesNowAndThenGoOutAtOnce(t *testing.T) {
	sent := hints(t, fine, func(h *Hinter) {
		for range 20 { // 5 and 45 ms apart
			h.Hint(1)
			time.Sleep(5 * time.Millisecond)
			h.Hint(1)
			time.Sleep(45 * time.Millisecond)
		}
	})
	for i, at := range sent["1"] {
		if want := time.Duration(i/2*50+i%2*5) * time.Millisecond; at != want {
			t.Errorf("hint %d went out at %v, want %v", i, at, want)
		}
	}
	if len(sent["1"]) != 40 {
		t.Errorf("%d hints, want 40", len(sent["1"]))
	}
}

func TestHintsOfAStreamOfPushesAreOneInTheInterval(t *testing.T) {
	sent := hints(t, fine, func(h *Hinter) {
		for range 1000 { // for a second
			h.Hint(1)
			h.Hint(2)
			time.Sleep(time.Millisecond)
		}
	})
	for _, q := range []string{"1", "2"} {
		if n := len(sent[q]); n < 50 || n > 51+hintBurst {
			t.Errorf("queue %s: %d hints in a second, want one in 20 ms and %d at the beginning", q, n, hintBurst)
		}
		late := sent[q][hintBurst:]
		for i := 1; i < len(late); i++ {
			if late[i]-late[i-1] < 20*time.Millisecond {
				t.Errorf("queue %s: hints at %v are closer than 20 ms", q, late)
			}
		}
	}
}

func TestTheLastPushOfABurstIsHintedAt(t *testing.T) {
	sent := hints(t, fine, func(h *Hinter) {
		for range hintBurst + 1 {
			h.Hint(1)
			time.Sleep(time.Millisecond)
		}
	})
	if all := sent["1"]; len(all) != hintBurst+1 || all[hintBurst] != 20*time.Millisecond {
		t.Errorf("hints went out at %v, want %d and the last one at 20 ms", all, hintBurst+1)
	}
}

func TestAHintNamesTheLanesThatItKnows(t *testing.T) {
	lane := func(flow string) []Lane { return []Lane{{Priority: 3, Flow: flow}} }
	told := func(push func(*Hinter)) []string {
		h := newHinter(time.Second, nil)
		push(h)
		texts, _ := h.ready(time.Now())
		slices.Sort(texts)
		return texts
	}
	for _, test := range []struct {
		name string
		push func(*Hinter)
		want []string
	}{
		{"two lanes", func(h *Hinter) { h.HintLanes(7, lane("a b")); h.HintLanes(7, lane("")); h.HintLanes(7, lane("")) }, []string{"7 3 ", "7 3 a b"}},
		{"one of them unknown", func(h *Hinter) { h.HintLanes(7, lane("a")); h.Hint(7); h.HintLanes(7, lane("b")) }, []string{"7"}},
		{"too many", func(h *Hinter) {
			for _, flow := range []string{"a", "b", "c", "d", "e", "f"} {
				h.HintLanes(7, lane(flow))
			}
		}, []string{"7"}},
		{"too long", func(h *Hinter) { h.HintLanes(7, lane(strings.Repeat("x", 600))) }, []string{"7"}},
	} {
		got := told(test.push)
		if !slices.Equal(got, test.want) {
			t.Errorf("%s: told %q, want %q", test.name, got, test.want)
		}
		for _, text := range got {
			queue, l, ok := parseHint(text)
			if !ok || queue != 7 || (l != nil && !slices.Contains(got, fmt.Sprintf("7 %d %s", l.Priority, l.Flow))) {
				t.Errorf("%s: %q is read as queue %d, lane %v", test.name, text, queue, l)
			}
		}
	}
}

func FuzzHint(f *testing.F) {
	for _, text := range []string{"7", "7 3 a b", "7 3 ", "7 3", " ", "echo 12 3", "99999999999 1 x", "1 99999 x"} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		queue, lane, ok := parseHint(text)
		if !ok || lane == nil {
			return
		}
		again, l, ok := parseHint((&telling{lanes: []Lane{*lane}}).texts(queue)[0])
		if len(text) < hintBytes/2 && (!ok || again != queue || *l != *lane) {
			t.Errorf("%q is read as %d %v, and then as %d %v", text, queue, lane, again, l)
		}
	})
}

func TestAPushNeverWaitsForAHint(t *testing.T) {
	var took time.Duration
	hints(t, func() error { time.Sleep(500 * time.Millisecond); return errors.New("the database is slow") }, func(h *Hinter) {
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
	hints(t, func() error { return errors.New("no database") }, func(it *Hinter) { h = it; it.Hint(1) })
	if h.Sent.Load() != 0 || h.Dropped.Load() != 1 {
		t.Errorf("%d sent, %d dropped; want 0 and 1", h.Sent.Load(), h.Dropped.Load())
	}
}

// listen runs a listener; hints arrive on the channel. It connects anew only where its connection has ended: a hint
// that is sent meanwhile is lost.
func (b *bed) listen(cfg ListenConfig) (*Listener, <-chan int32) {
	b.Helper()
	heard := make(chan int32, 100)
	cfg.EchoWithin = time.Minute
	cfg.Conn, cfg.Wake = b.pool.Config().ConnConfig.Copy(), func(q int32, _ *Lane) { heard <- q }
	l := NewListener(cfg)
	ctx, stop := context.WithCancel(b.ctx)
	done := make(chan struct{})
	go func() { defer close(done); _ = l.Run(ctx) }()
	b.Cleanup(func() { stop(); <-done })
	return l, heard
}

func (b *bed) await(what string, ok func() bool) {
	b.Helper()
	for deadline := time.Now().Add(time.Minute); !ok(); time.Sleep(5 * time.Millisecond) {
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
	if _, err := q.WithTx(tx).Push(b.ctx, withPayload(Push{})); err != nil {
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
	case <-time.After(time.Minute):
		t.Fatal("the push was not heard of")
	}
}

func TestALonePushCarriesItsHint(t *testing.T) {
	b := newBed(t, Config{})
	l, heard := b.listen(ListenConfig{})
	b.await("connected", func() bool { return l.Status().Connected })
	hinter := NewHinter(b.pool, 0) // it does not run: what is heard came with the push
	for _, q := range []*Queue{b.q.Hinting(hinter), b.q.Hinting(hinter).WithTx(b.pool)} {
		for _, p := range []Push{{}, {LockKey: "k"}, {UniqueKey: "u", UniquePolicy: WhileQueued}} {
			if _, err := q.Push(b.ctx, withPayload(p)); err != nil {
				t.Fatal(err)
			}
			select {
			case <-heard:
			case <-time.After(time.Minute):
				t.Fatalf("the push of %+v was not heard of", p)
			}
		}
	}
	if n := hinter.Sent.Load(); n != 6 {
		t.Errorf("%d hints were counted, want 6", n)
	}
}

func TestOnePushOfAProcessCarriesHintsAtATime(t *testing.T) {
	h := newHinter(time.Millisecond, nil)
	hints, ended := h.carry(1, []Lane{{Priority: 3}})
	if !slices.Equal(hints, []string{"1 3 "}) {
		t.Fatalf("the first push carries %q", hints)
	}
	if hints, _ := h.carry(2, nil); hints != nil {
		t.Errorf("a second one carries %q beside it", hints)
	}
	ended(true)
	if hints, ended = h.carry(2, nil); !slices.Equal(hints, []string{"2"}) {
		t.Fatalf("a push after it carries %q", hints)
	}
	ended(false)
	if n := h.Sent.Load(); n != 1 {
		t.Errorf("%d hints were counted, want 1", n)
	}
	h.HintLanes(2, []Lane{{Priority: 4}})
	if hints, _ := h.carry(2, nil); hints != nil {
		t.Errorf("a push overtakes the hint of an earlier one with %q", hints)
	}
}

// A push with a unique key goes by itself and not in a batch. It is a push that is under way all the same.
func TestPushesThatMeetCarryNoHints(t *testing.T) {
	b := newBed(t, Config{})
	hinter := NewHinter(b.pool, 0) // it does not run: what is sent went with a push
	q := b.q.Hinting(hinter)
	push := func(key string) ([]Pushed, error) {
		p := withPayload(Push{UniqueKey: key})
		if key != "" {
			p.UniquePolicy = WhileQueued
		}
		return q.Push(b.ctx, p)
	}
	tx := b.begin()
	b.pushAll(tx, Push{UniqueKey: "first", UniquePolicy: WhileQueued})
	hinter.stopCarrying() // else the first one has the hints of the process
	first := later(b, func() ([]Pushed, error) { return push("first") })
	b.awaitBlocked(tx)
	hinter.mu.Lock()
	hinter.carryAgainAt = time.Time{}
	hinter.mu.Unlock()
	for _, key := range []string{"", "second"} {
		if _, err := push(key); err != nil {
			t.Fatal(err)
		}
		if n := hinter.Sent.Load(); n != 0 {
			t.Errorf("the push with the unique key %q carried its hint beside another", key)
		}
		hinter.ready(time.Now()) // takes what is to be sent
	}
	b.commit(tx)
	first()
	hinter.ready(time.Now())
	if _, err := push("third"); err != nil || hinter.Sent.Load() != 1 {
		t.Errorf("%d hints went with the push that met no other, want 1: %v", hinter.Sent.Load(), err)
	}
}

// fullNotifications is a database whose queue of notifications is full.
type fullNotifications struct {
	postgres.DB
	batches int
}

// SendBatch runs the statement of the push, whose answer is read, and fails behind it.
func (f *fullNotifications) SendBatch(ctx context.Context, sent *pgx.Batch) pgx.BatchResults {
	f.batches++
	sent.QueuedQueries = sent.QueuedQueries[:1]
	sent.Queue(`DO $$ BEGIN RAISE EXCEPTION 'too many notifications in the NOTIFY queue' USING ERRCODE = '54000'; END $$`)
	return f.DB.SendBatch(ctx, sent)
}

func TestAPushIsAcceptedWhileNotificationsAreRefused(t *testing.T) {
	b := newBed(t, Config{})
	full := &fullNotifications{DB: b.pool}
	q := b.q.WithTx(full).Hinting(NewHinter(b.pool, 0))
	for range 2 {
		pushed, err := q.Push(b.ctx, withPayload(Push{}))
		if err != nil || len(pushed) != 1 {
			t.Fatalf("a push of one has %d answers: %v", len(pushed), err)
		}
		b.want(b.count(`SELECT count(*) FROM penstock.entry WHERE id = $1`, pushed[0].ID), 1)
	}
	b.want(b.count(`SELECT count(*) FROM penstock.entry`), 2)
	if full.batches != 1 {
		t.Errorf("%d pushes carried hints, want 1", full.batches)
	}
}

func TestAListenerComesBackAfterItsConnectionIsKilled(t *testing.T) {
	b := newBed(t, Config{})
	l, heard := b.listen(ListenConfig{SelfTest: 50 * time.Millisecond})
	b.await("connected", func() bool { return l.Status().Connected && l.Status().RoundTrip > 0 })
	// Of this database: others of the server are those of tests beside this one.
	b.exec(b.pool, `SELECT pg_terminate_backend(pid) FROM pg_stat_activity
	                 WHERE datname = current_database() AND pid <> pg_backend_pid()
	                   AND (query LIKE 'LISTEN%' OR query LIKE '%pg_notify($1, $2)%')`)
	b.await("connected again", func() bool { s := l.Status(); return s.Connected && s.Reconnects >= 1 })
	b.exec(b.pool, hintSQL, []string{"7"})
	select {
	case id := <-heard:
		if id != 7 {
			t.Errorf("heard of queue %d, want 7", id)
		}
	case <-time.After(time.Minute):
		t.Error("a hint was not heard of")
	}
}

// After a failover the first host of the address may be a machine that is gone: each connection waits for it first.
func TestAListenerReachesTheHostBehindOneThatIsSilent(t *testing.T) {
	silent, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer silent.Close()
	b := &bed{T: t, ctx: t.Context(), pool: openPool(t)}
	conn := b.pool.Config().ConnConfig.Copy()
	conn.Fallbacks = []*pgconn.FallbackConfig{{Host: conn.Host, Port: conn.Port, TLSConfig: conn.TLSConfig}}
	addr, _ := silent.Addr().(*net.TCPAddr)
	conn.Host, conn.Port, conn.TLSConfig = "127.0.0.1", uint16(addr.Port), nil
	conn.ConnectTimeout = 1100 * time.Millisecond
	l := NewListener(ListenConfig{Conn: conn, EchoWithin: time.Second, RetryMax: 10 * time.Millisecond})
	ctx, stop := context.WithCancel(b.ctx)
	done := make(chan struct{})
	go func() { defer close(done); _ = l.Run(ctx) }()
	b.await("connected", func() bool { return l.Status().Connected })
	stop()
	<-done
}

func TestAListenerThatHearsNothingSaysSo(t *testing.T) {
	b := &bed{T: t, ctx: t.Context(), pool: openPool(t)}
	conn := b.pool.Config().ConnConfig.Copy()
	conn.Host, conn.Port = t.TempDir(), 1
	l := NewListener(ListenConfig{Conn: conn, Wake: func(int32, *Lane) {}, EchoWithin: 200 * time.Millisecond, RetryMax: 10 * time.Millisecond})
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

func TestAListenerWithoutAConnectionSaysSo(t *testing.T) {
	if err := NewListener(ListenConfig{}).Run(t.Context()); err == nil || !strings.Contains(err.Error(), "ListenConfig.Conn") {
		t.Errorf("got %v, want an error that names the field", err)
	}
}

func TestAPayloadGoesToTheCallbackOfItsKind(t *testing.T) {
	var got []string
	note := func(format string, args ...any) { got = append(got, fmt.Sprintf(format, args...)) }
	l := NewListener(ListenConfig{
		Wake: func(queue int32, lane *Lane) {
			if lane == nil {
				lane = &Lane{}
			}
			note("wake %d %d %s", queue, lane.Priority, lane.Flow)
		},
		Cancelled: func(node NodeID) { note("cancel %d", node) },
		Granted:   func(node NodeID) { note("granted %d", node) },
		Slots:     func(model string) { note("slots %s", model) },
		Starting:  func(model string) { note("starting %s", model) },
	})
	payloads := []string{
		"7", "7 5 a flow", "cancel 3", "granted 4", "slots a model", "starting b", // and those of nobody:
		"cancel x", "granted", "7 x", "7 5", "news of tomorrow", "",
	}
	want := []string{"wake 7 0 ", "wake 7 5 a flow", "cancel 3", "granted 4", "slots a model", "starting b"}
	without := NewListener(ListenConfig{})
	for _, payload := range payloads {
		l.pass(payload)
		without.pass(payload)
	}
	if !slices.Equal(got, want) {
		t.Errorf("passed on %q, want %q", got, want)
	}
	if n := l.Status().Heard; n != int64(len(want)) || n != without.Status().Heard {
		t.Errorf("heard %d hints, want %d", n, len(want))
	}
}

// Queues come and go: what was told of those that are no more is forgotten, and each that has news is told of.
func TestQueuesThatHaveNothingToTellAreForgotten(t *testing.T) {
	const queues = 5000
	var most int
	told := hints(t, fine, func(h *Hinter) {
		for queue := range int32(queues) {
			if queue%2 == 0 {
				h.Hint(queue)
			} else if texts, ended := h.carry(queue, nil); len(texts) > 0 {
				ended(true)
			}
			h.mu.Lock()
			most = max(most, len(h.tells))
			h.mu.Unlock()
			time.Sleep(time.Millisecond)
		}
	})
	if len(told) != queues/2 {
		t.Errorf("%d queues were told of, want %d", len(told), queues/2)
	}
	if most > 500 { // a bucket is full again after 20 ms for each hint
		t.Errorf("%d queues were known at once, though few of them had been hinted of late", most)
	}
}
