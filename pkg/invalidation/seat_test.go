package invalidation

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"sync"
	"testing"
	"time"
)

// seated is a bed whose pushes may always hint; hints are kept.
type seated struct {
	*bed
	mu    sync.Mutex
	hints []string
}

func parseHandOver(text string) (h HandOver, ok bool) {
	err := json.Unmarshal([]byte(text), &h)
	return h, err == nil
}

func newSeated(t *testing.T) *seated {
	t.Helper()
	s := &seated{bed: newBed(t, Config{})}
	h := newHinter(time.Nanosecond, func(_ context.Context, hints []string) error {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.hints = append(s.hints, hints...)
		return nil
	})
	done := make(chan struct{})
	ctx, stop := context.WithCancel(s.ctx)
	go func() { _ = h.Run(ctx); close(done) }()
	t.Cleanup(func() { stop(); <-done })
	s.q = s.q.Hinting(h)
	return s
}

func (s *seated) offer(node NodeID, claims ...int32) {
	s.Helper()
	for _, claim := range claims {
		if _, _, err := s.q.TendSeat(s.ctx, HandOver{Node: node, Claim: claim}, "offer"); err != nil {
			s.Fatal(err)
		}
	}
}

func (s *seated) wantSeat(want string, claim int32, unwanted bool) {
	s.Helper()
	do := "keep"
	if unwanted {
		do = "withdraw"
	}
	withdrawn, taken, err := s.q.TendSeat(s.ctx, HandOver{Node: here, Claim: claim}, do)
	if withdrawn != (want == "withdrawn") || taken != (want == "taken") || err != nil {
		s.Errorf("seat %d: withdrawn %t, taken %t (%v), want %s", claim, withdrawn, taken, err, want)
	}
}

// hint waits for the next hint.
func (s *seated) hint() (text string) {
	s.Helper()
	s.await("a hint", func() bool {
		s.mu.Lock()
		defer s.mu.Unlock()
		if len(s.hints) > 0 {
			text, s.hints = s.hints[0], s.hints[1:]
		}
		return text != ""
	})
	return text
}

// pushOne pushes an entry and says whether it was handed over.
func (s *seated) pushOne(p Push) (EntryID, bool) {
	s.Helper()
	before := s.count(`SELECT count(*) FROM penstock.seat`)
	pushed, err := s.q.Push(s.ctx, withPayload(p))
	if err != nil {
		s.Fatal(err)
	}
	text := s.hint()
	h, handed := parseHandOver(text)
	if taken := before-s.count(`SELECT count(*) FROM penstock.seat`) == 1; taken != handed || (handed && h.Entry != pushed[0].ID) {
		s.Errorf("a seat was taken: %t, the hint for entry %d says %q", taken, pushed[0].ID, text)
	}
	return pushed[0].ID, handed
}

func TestAPushHandsItsEntryOverToASeat(t *testing.T) {
	s := newSeated(t)
	s.offer(here, 11, 12)
	pushed, err := s.q.Push(s.ctx, Push{Payload: json.RawMessage(`{"n": 7}`), Flow: "acme", Trace: "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"})
	if err != nil {
		t.Fatal(err)
	}
	h, ok := parseHandOver(s.hint())
	if want := (HandOver{Queue: s.q.ID, Node: here, Claim: 11, Entry: pushed[0].ID}); !ok || h != want {
		t.Fatalf("hinted at %v, want %v", h, want)
	}
	if n := s.count(`SELECT count(*) FROM penstock.ready`); n != 0 {
		t.Errorf("%d ready rows", n)
	}
	other := h
	other.Claim = 12
	if locks, err := s.q.Handed(s.ctx, other); err != nil || len(locks) != 0 {
		t.Errorf("another claim reads %d locks (%v)", len(locks), err)
	}
	locks, err := s.q.Handed(s.ctx, h)
	if err != nil || len(locks) != 1 || len(locks[0].Entries) != 1 {
		t.Fatalf("read %d locks (%v)", len(locks), err)
	}
	l, e := locks[0], locks[0].Entries[0]
	if l.Lane != (Lane{Priority: 1, Flow: "acme"}) || l.pos != int64(e.ID) || string(e.Payload) != `{"n": 7}` || e.Trace == "" {
		t.Errorf("read %+v with %+v", l, e)
	}
	if again, err := s.q.Reclaim(s.ctx, here, 11); err != nil || len(again) != 1 || again[0].Token != l.Token || again[0].Entries[0].ID != e.ID {
		t.Errorf("the look without a hint finds %v (%v)", again, err)
	}
	s.wantSeat("taken", 11, false)
	s.wantSeat("left", 12, false)
	s.settle(doneAll(l)...)
	s.wantSeat("taken", 11, true)
	s.wantSeat("withdrawn", 12, true)
	if _, handed := s.pushOne(Push{}); handed || s.count(`SELECT count(*) FROM penstock.ready`) != 1 {
		t.Error("without a seat an entry was handed over, or is not ready")
	}
}

func TestWhatIsHandedOverGoesBackToItsPlace(t *testing.T) {
	s := newSeated(t)
	s.offer(here, 1)
	id, _ := s.pushOne(Push{})
	locks, err := s.q.Reclaim(s.ctx, here, 1)
	if err != nil {
		t.Fatal(err)
	}
	s.settle(releaseAll(locks...)...)
	if pos := s.count(`SELECT pos FROM penstock.ready`); EntryID(pos) != id {
		t.Errorf("entry %d stands at %d", id, pos)
	}
}

// What keeps claims off keeps hand-overs off, from the moment when it is committed, and no longer than it stands.
func TestNoSeatIsTakenWhereNothingMayBeClaimed(t *testing.T) {
	by := By{Actor: "test"}
	one := 1
	for _, test := range []struct {
		name      string
		stop, go_ func(*seated) error
	}{
		{
			"queue paused", func(s *seated) error { return pauseQueue(s.ctx, s.pool, "work", by, time.Time{}) },
			func(s *seated) error { return operate(s.ctx, s.pool, "resume_queue", "work", by) },
		},
		{
			"pause that ends", func(s *seated) error { return pauseQueue(s.ctx, s.pool, "work", by, time.Now().Add(time.Hour)) },
			func(s *seated) error {
				s.exec(s.pool, `UPDATE penstock.queue SET paused_until = now() - interval '1 second'`)
				return nil
			},
		},
		{
			"queue disabled", func(s *seated) error { return operate(s.ctx, s.pool, "disable_queue", "work", by) },
			func(s *seated) error { return operate(s.ctx, s.pool, "enable_queue", "work", by) },
		},
		{"flow paused", pauseOf(subject{"flow", "acme", ""}), resumeOf(subject{"flow", "acme", ""})},
		{"flow paused here", pauseOf(subject{"flow", "acme", "work"}), resumeOf(subject{"flow", "acme", "work"})},
		{"application paused", pauseOf(subject{"application", "default", ""}), resumeOf(subject{"application", "default", ""})},
		{"node paused", pauseOf(subject{"node", "here", ""}), resumeOf(subject{"node", "here", ""})},
		{"node paused by id", pauseOf(subject{"node", fmt.Sprint(here), ""}), resumeOf(subject{"node", fmt.Sprint(here), ""})},
		{
			"node drains", func(s *seated) error { return operate(s.ctx, s.pool, "drain_node", here, by) },
			func(s *seated) error { s.exec(s.pool, `UPDATE penstock.node SET draining_at = NULL`); return nil },
		},
		{
			"node silent", func(s *seated) error {
				s.exec(s.pool, `UPDATE penstock.node SET beat_at = clock_timestamp() - interval '25 minutes'`)
				return nil
			},
			func(s *seated) error {
				s.exec(s.pool, `UPDATE penstock.node SET beat_at = clock_timestamp()`)
				return nil
			},
		},
		{
			"node of another application", func(s *seated) error { s.exec(s.pool, `UPDATE penstock.node SET application = 'other'`); return nil },
			func(s *seated) error { s.exec(s.pool, `UPDATE penstock.node SET application = 'default'`); return nil },
		},
		{
			"order to hold off", func(s *seated) error { return PushBack(s.ctx, s.pool, "work", nil, time.Hour, "") },
			func(s *seated) error { _, err := LiftPushBack(s.ctx, s.pool, "work", nil); return err },
		},
		{
			"order for the flow", func(s *seated) error { flow := "acme"; return PushBack(s.ctx, s.pool, "work", &flow, time.Hour, "") },
			func(s *seated) error {
				flow := "acme"
				_, err := LiftPushBack(s.ctx, s.pool, "work", &flow)
				return err
			},
		},
		{
			"limit", func(s *seated) error {
				s.under("few", limitOptions{MaxUnits: &one}, map[string]int{"work": 1})
				return nil
			},
			func(s *seated) error { s.exec(s.pool, `DELETE FROM penstock.limit_use`); return nil },
		},
		{
			"order of acceptance", func(s *seated) error {
				_, err := Alter(s.ctx, s.pool, "work", map[string]any{"algorithm": "fifo"})
				return err
			},
			func(s *seated) error {
				_, err := Alter(s.ctx, s.pool, "work", map[string]any{"algorithm": "fair"})
				return err
			},
		},
		{
			"groups", func(s *seated) error {
				_, err := Alter(s.ctx, s.pool, "work", map[string]any{"grouping": "k"})
				return err
			},
			func(s *seated) error {
				_, err := Alter(s.ctx, s.pool, "work", map[string]any{"grouping": nil})
				return err
			},
		},
		{
			"capacity", func(s *seated) error {
				_, err := Alter(s.ctx, s.pool, "work", map[string]any{"capacity": 100})
				return err
			},
			func(s *seated) error {
				_, err := Alter(s.ctx, s.pool, "work", map[string]any{"capacity": nil})
				return err
			},
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			s := newSeated(t)
			s.offer(here, 1, 2)
			if err := test.stop(s); err != nil {
				t.Fatal(err)
			}
			if _, handed := s.pushOne(Push{Flow: "acme"}); handed {
				t.Error("an entry was handed over")
			}
			if err := test.go_(s); err != nil {
				t.Fatal(err)
			}
			s.q.seat.Store(0) // as pushes do now and then
			if _, handed := s.pushOne(Push{Flow: "acme"}); !handed {
				t.Error("nothing is in the way, and the entry was not handed over")
			}
		})
	}
}

func pauseOf(of subject) func(*seated) error {
	return func(s *seated) error { return pauseSubject(s.ctx, s.pool, of, By{Actor: "test"}, time.Time{}) }
}

func resumeOf(of subject) func(*seated) error {
	return func(s *seated) error { return resumeSubject(s.ctx, s.pool, of, By{Actor: "test"}) }
}

func TestPushesThatAskForMoreThanAThreadTakeNoSeat(t *testing.T) {
	s := newSeated(t)
	s.offer(here, 1)
	nine := int16(9)
	for _, p := range []Push{
		{LockKey: "k"},
		{Priority: &nine},
		{DueAt: time.Now().Add(time.Hour)},
		{StartBy: time.Now().Add(time.Hour)},
		{FinishBy: time.Now().Add(time.Hour)},
		{Cost: 2},
		{Name: "n"},
		{IdempotencyKey: "i"},
		{UniqueKey: "u", UniquePolicy: WhileQueued},
		{Callback: json.RawMessage(`{"url": "https://example.org"}`)},
	} {
		if _, handed := s.pushOne(p); handed {
			t.Errorf("%+v was handed over", p)
		}
	}
	if _, err := s.q.Push(s.ctx, withPayload(Push{}), withPayload(Push{})); err != nil {
		t.Fatal(err)
	}
	tx := s.begin()
	if _, err := s.q.On(tx).Push(s.ctx, withPayload(Push{})); err != nil {
		t.Fatal(err)
	}
	s.commit(tx)
	if s.count(`SELECT count(*) FROM penstock.seat`) != 1 {
		t.Error("the seat was taken")
	}
	if _, err := s.q.Push(s.ctx, Push{Payload: json.RawMessage(`"` + string(make([]byte, 1)) + `"`)}); !errors.Is(err, ErrInvalid) {
		t.Errorf("a payload that is no JSON: %v", err)
	}
	if _, err := s.q.Push(s.ctx, withPayload(Push{Flow: string(slices.Repeat([]byte("x"), 300))})); !errors.Is(err, ErrInvalid) {
		t.Errorf("a flow that is too long: %v", err)
	}
}

// A seat that a push has taken is passed by, and is back when the push comes to nothing.
func TestASeatIsBackWhenItsPushIsRolledBack(t *testing.T) {
	s := newSeated(t)
	s.offer(here, 1)
	tx := s.begin()
	s.exec(tx, handOverSQL, s.q.ID, `{}`, "", "", 0)
	s.wantSeat("left", 1, true) // not withdrawn from under a push
	if removed, err := RemoveNode(s.ctx, s.pool, here); removed || err != nil {
		t.Errorf("the node was removed: %t (%v)", removed, err)
	}
	if _, handed := s.pushOne(Push{}); handed {
		t.Error("a push took a seat that another one has")
	}
	if err := tx.Rollback(s.ctx); err != nil {
		t.Fatal(err)
	}
	s.q.seat.Store(0)
	if _, handed := s.pushOne(Push{}); !handed {
		t.Error("the seat is not back")
	}
}

func TestManyPushersTakeEachSeatOnce(t *testing.T) {
	s := newSeated(t)
	claims := make([]int32, 100)
	for i := range claims {
		claims[i] = int32(i + 1)
	}
	s.offer(here, claims...)
	var pushers sync.WaitGroup
	for range 8 {
		pushers.Go(func() {
			for i := range 40 {
				if _, err := s.q.Push(s.ctx, withPayload(Push{})); err != nil {
					t.Error(err)
				}
				if i == 10 {
					s.exec(s.pool, `INSERT INTO penstock.seat (queue_id, node_id, claim_id)
	                SELECT $1, $2, nextval('penstock.token_seq') + 1000 FROM generate_series(1, 2)`, s.q.ID, int64(there))
				}
			}
		})
	}
	pushers.Wait()
	locks, distinct := s.count(`SELECT count(*) FROM penstock.lock`), s.count(`SELECT count(DISTINCT (node_id, claim_id)) FROM penstock.lock`)
	ready, seats := s.count(`SELECT count(*) FROM penstock.ready`), s.count(`SELECT count(*) FROM penstock.seat`)
	if locks+ready != 320 || locks+seats != 116 || distinct != locks || locks < 100 {
		t.Errorf("%d locks of %d claims, %d ready, %d seats left; want 320 entries, and a lock for each of 116 seats that is not left", locks, distinct, ready, seats)
	}
}

// Seats that were taken are dead rows for as long as somebody holds a snapshot. From the mark on, no push walks over them.
func TestLooksForASeatStayFlatUnderAHeldSnapshot(t *testing.T) {
	s := newSeated(t)
	x := s.explainer()
	look := func(from int64) int {
		args := statement{handOverSQL, fmt.Sprintf(`%d, '{}', '', '', %d`, s.q.ID, from)}
		x.explain("look", args)
		return x.explain("look", args).buffers()
	}
	s.offer(here, 1)
	base := look(0)
	held := s.begin()
	s.exec(held, `SET TRANSACTION ISOLATION LEVEL REPEATABLE READ`)
	s.exec(held, `SELECT FROM penstock.seat LIMIT 1`)
	s.exec(s.pool, `INSERT INTO penstock.seat (queue_id, node_id, claim_id) SELECT $1, $2, generate_series(2, 20000)`, s.q.ID, int64(here))
	s.exec(s.pool, `DELETE FROM penstock.seat`)
	s.exec(s.pool, `VACUUM penstock.seat`)
	var next int64
	if err := s.pool.QueryRow(s.ctx, `SELECT next FROM penstock.take_seat($1, '', 0)`, s.q.ID).Scan(&next); err != nil {
		t.Fatal(err)
	}
	fromMark, fromHead := look(next), look(0)
	t.Logf("%d buffers at first, %d from the mark on, %d from the head", base, fromMark, fromHead)
	if fromMark > base+20 || fromHead < fromMark+100 {
		t.Errorf("%d buffers at first, %d from the mark on, %d from the head", base, fromMark, fromHead)
	}
}

func TestSeatsOfNodesThatAreDeadOrGoneAreRemoved(t *testing.T) {
	s := newSeated(t)
	s.offer(here, 1)
	s.offer(there, 1)
	s.offer(12345, 1) // it is not registered
	s.exec(s.pool, `INSERT INTO penstock.seat (queue_id, node_id, claim_id) VALUES ($1, 99, 1)`, s.q.ID)
	s.exec(s.pool, `UPDATE penstock.node SET beat_at = beat_at - interval '2 hours' WHERE id = $1`, int64(there))
	s.exec(s.pool, `SELECT penstock.remove_seats()`)
	if n, left := s.count(`SELECT count(*) FROM penstock.seat`), s.count(`SELECT max(node_id) FROM penstock.seat`); n != 1 || NodeID(left) != here {
		t.Errorf("%d seats are left, one of node %d; want that of the living node", n, left)
	}
}

func TestAHandOverIsHintedAtInWordsThatOnlyWhoKnowsThemReads(t *testing.T) {
	over := HandOver{Queue: 1, Node: 1 << 62, Claim: 7, Entry: 1 << 50}
	text := fmt.Sprintf(`{"Queue":1,"Node":%d,"Claim":7,"Entry":%d}`, over.Node, over.Entry)
	if h, ok := parseHandOver(text); !ok || h != over {
		t.Errorf("%q is read as %v", text, h)
	}
	if _, _, ok := parseHint(text); ok {
		t.Error("a node that knows of no seats reads it as another hint")
	}
}

// The push has taken the seat, and waits to lock its entry, while an operator puts the queue under a limit.
func TestALimitThatComesMeanwhileKeepsAHandOverBack(t *testing.T) {
	s := newSeated(t)
	s.offer(here, 11)
	operator := s.begin()
	s.exec(operator, `SELECT penstock.alter_queue('work', '{"max_concurrent": 1}')`)
	pushed := later(s.bed, func() (EntryID, error) {
		pushed, err := s.q.Push(s.ctx, withPayload(Push{}))
		return append(pushed, Pushed{})[0].ID, err
	})
	s.awaitBlocked(operator)
	s.commit(operator)
	id := pushed()
	s.want(s.count(`SELECT count(*) FROM penstock.lock`), 0)
	s.want(s.count(`SELECT count(*) FROM penstock.ready WHERE entry_id = $1`, id), 1)
	s.wantSeat("taken", 11, false) // nothing is found under it, and the node offers another
}

// A push that may not have a seat leaves it to others.
func TestAPushOfAFlowThatIsHeldBackLeavesSeatsToOthers(t *testing.T) {
	s := newSeated(t)
	s.offer(here, 11)
	s.exec(s.pool, `INSERT INTO penstock.push_back (queue_id, whole, flow, until, reason) VALUES ($1, false, 'held', now() + interval '1 hour', '')`, s.q.ID)
	if _, handed := s.pushOne(Push{Flow: "held"}); handed {
		t.Error("an entry of a flow that is held back was handed over")
	}
	if _, handed := s.pushOne(Push{Flow: "other"}); !handed {
		t.Error("the seat was not found any more")
	}
}

// Hints of hand-overs count as others do: a stream of pushes looks for no more seats than it may send hints.
func TestOnlyPushesThatMayBeHintedAtLookForASeat(t *testing.T) {
	h := newHinter(time.Hour, nil)
	for i := range hintBurst {
		if !h.spend(1, 0) {
			t.Fatalf("push %d may not look for a seat", i)
		}
		h.spend(1, 1)
	}
	if h.spend(1, 0) {
		t.Error("one more may")
	}
}
