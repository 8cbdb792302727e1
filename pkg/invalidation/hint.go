package invalidation

import (
	"context"
	"fmt"
	"maps"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/internal/tokenbucket"
)

// hintChannel is the channel of LISTEN and NOTIFY. The payloads are
//
//	<queue> [<priority> <flow>]  a queue, and where the pusher knows it the lane, has work
//	cancel <node>                the node runs an entry that is to be cancelled, see penstock.cancel_one
//	slots <model>                slots of the model are missing or came, see penstock.lease_slots and preempt_durable,
//	                             or an instance became ready, see note_ready
//	starting <model>             an instance of the model was announced, see announce_instance
//	granted <node>               slots were handed over to the node, see hand_over_slots
//	echo <pid> <n>               the self-test of a listener
const hintChannel = "penstock"

// notifySQL hints with texts $1 when the transaction commits. NOTIFY takes a lock over all databases before
// it writes the commit record and holds it until that is on disk, so that transactions with hints commit one
// after another. A push carries its hints where it meets no other: at most one of a process at a time, and
// none while pushes of the queue come together (ADR 21). All others are told about by hintSQL.
const notifySQL = `
SELECT pg_notify('` + hintChannel + `', hint) FROM unnest($1::text[]) u(hint)`

// hintSQL hints with texts $1 after the commit of pushes: one statement speaks for every push since the last.
// It commits without waiting for the disk, so that it has the lock of NOTIFY for a moment only: nothing is
// lost with it.
const hintSQL = `
SELECT pg_notify('` + hintChannel + `', hint), set_config('synchronous_commit', 'off', true)
  FROM unnest($1::text[]) u(hint)`

// Hinter tells nodes after a push that a queue has work, so that they need not wait for their next poll. A hint is
// only a hint: pushes never wait for it, and where the database does not answer it is dropped without a word.
// Make one with NewHinter, hand it to queues with Queue.Hinting, and let Run run.
type Hinter struct {
	notify func(ctx context.Context, hints []string) error
	rate   tokenbucket.Rate // of the hints of a queue

	mu           sync.Mutex
	tells        map[int32]*telling // of queues that were hinted of late
	tellsMax     int                // of which those that have nothing to tell are forgotten
	carryAgainAt time.Time          // until when no push carries hints
	wake         chan struct{}
	carrying     sync.Mutex // held by the push that carries hints

	// Sent and Dropped count hints.
	Sent, Dropped atomic.Int64
}

// telling is what there is to be told about one queue.
type telling struct {
	due   bool
	lanes []Lane             // with news; nil for "somewhere in the queue"
	sent  tokenbucket.Bucket // of the hinter's rate
}

const (
	// hintTimeout bounds how long a hint is tried. A later one would come too late anyway: nodes poll.
	hintTimeout = time.Second
	// hintBurst is how many hints of a queue may follow one another without a pause: pushes that come now and then are
	// hinted at once even where two of them are close, and only a stream of pushes is held to one hint in the interval.
	hintBurst = 8
	// hintLanes is how many lanes of a queue are named in a hint; if there is news in more, nodes look for themselves.
	hintLanes = 4
	// notCarriedFor is for how long pushes carry no hints after Postgres refused some: a listener of any program
	// that has been in a transaction for very long fills the one queue of all notifications.
	notCarriedFor = time.Minute
	// hintBytes bounds a hint: Postgres refuses those of 8000 bytes.
	hintBytes = 500
)

// NewHinter returns a Hinter that sends on db, in the long run one hint a queue in `every`, 10 ms if zero.
func NewHinter(db postgres.DB, every time.Duration) *Hinter {
	return newHinter(every, func(ctx context.Context, hints []string) error {
		_, err := db.Exec(ctx, hintSQL, hints)
		return err
	})
}

func newHinter(every time.Duration, notify func(context.Context, []string) error) *Hinter {
	if every == 0 {
		every = 10 * time.Millisecond
	}
	return &Hinter{
		notify: notify, rate: tokenbucket.Every(every, hintBurst), tells: map[int32]*telling{},
		wake: make(chan struct{}, 1),
	}
}

// Hint says that a push to the queue has committed. It returns at once. A nil Hinter does nothing.
func (h *Hinter) Hint(queue int32) { h.HintLanes(queue, nil) }

// HintLanes is Hint for callers that know all lanes in which entries became ready: nodes claim from a lane that a hint
// names, and look for lanes with work where it names none.
func (h *Hinter) HintLanes(queue int32, lanes []Lane) {
	if h == nil {
		return
	}
	h.mu.Lock()
	h.about(queue).add(lanes)
	h.mu.Unlock()
	select {
	case h.wake <- struct{}{}:
	default:
	}
}

// carry returns the hints about a push that is to commit with them, and what must be called when it has
// ended. There are none where the queue has sent so many that Run must space them, or while another push of
// this process carries some.
func (h *Hinter) carry(queue int32, lanes []Lane) (hints []string, ended func(sent bool)) {
	if h == nil || !h.carrying.TryLock() {
		return nil, nil
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	t, now := h.about(queue), time.Now()
	if t.due || h.wait(t, now) > 0 || now.Before(h.carryAgainAt) {
		h.carrying.Unlock()
		return nil, nil
	}
	t.add(lanes)
	hints = h.spend(queue, t, now)
	return hints, func(sent bool) {
		if sent {
			h.Sent.Add(int64(len(hints)))
		}
		h.carrying.Unlock()
	}
}

// hinted runs the statement of these pushes and, outside a transaction, hints at them: in the transaction of a lone
// push (no other one of the queue is under way in this process, as far as they are counted), so that nodes hear of the
// entries when they are committed, and else through the Hinter.
func (q *Queue) hinted(pushes []Push) query {
	if q.hinter == nil || q.onTx() {
		return queryOn(q.db)
	}
	return func(ctx context.Context, sql string, args []any, read func(pgx.Rows) error) error {
		lanes := q.lanes(pushes)
		if q.batcher == nil || q.batcher.pushing.Load() == 1 {
			sent, err := q.pushWithHints(ctx, lanes, sql, args, read)
			if sent || err != nil {
				return err
			}
		}
		err := queryOn(q.db)(ctx, sql, args, read)
		if err == nil {
			q.hinter.HintLanes(q.ID, lanes)
		}
		return err
	}
}

// pushWithHints runs the statement of a push together with hints. sent is false where it must be run without.
func (q *Queue) pushWithHints(
	ctx context.Context, lanes []Lane, sql string, args []any, read func(pgx.Rows) error,
) (sent bool, err error) {
	hints, ended := q.hinter.carry(q.ID, lanes)
	if hints == nil {
		return false, nil
	}
	defer func() { ended(sent) }()
	batch := &pgx.Batch{}
	batch.Queue(sql, args...).Query(read)
	batch.Queue(notifySQL, hints)
	err = q.db.SendBatch(ctx, batch).Close()
	if postgres.Code(err) == notificationsFull {
		q.hinter.stopCarrying()
		return false, nil
	}
	return err == nil, err
}

// notificationsFull is the SQLSTATE of a commit that finds the queue of notifications full.
const notificationsFull = "54000"

// lanes are where nodes find the entries of pushes, as far as the queue is known here; nil if a push leaves it open.
func (q *Queue) lanes(pushes []Push) []Lane {
	var lanes []Lane
	for i := range pushes {
		p := &pushes[i]
		if !p.DueAt.IsZero() || p.Flow == "" && q.Config.Shards > 1 {
			return nil
		}
		l := Lane{Priority: int16(q.Config.EntryPriority), Flow: p.Flow}
		if p.Priority != nil {
			l.Priority = *p.Priority
		}
		if n := len(lanes); n == 0 || lanes[n-1] != l {
			if n == hintLanes {
				return nil
			}
			lanes = append(lanes, l)
		}
	}
	return lanes
}

// stopCarrying lets no push carry hints for a while: Postgres refused them.
func (h *Hinter) stopCarrying() {
	h.mu.Lock()
	h.carryAgainAt = time.Now().Add(notCarriedFor)
	h.mu.Unlock()
}

// about returns what there is to be told about a queue.
func (h *Hinter) about(queue int32) *telling {
	t := h.tells[queue]
	if t == nil {
		if len(h.tells) >= max(tellsFew, h.tellsMax) {
			h.forget(time.Now())
		}
		t = &telling{}
		h.tells[queue] = t
	}
	return t
}

// tellsFew is how many queues need no look for those that have nothing to tell.
const tellsFew = 64

// forget drops what is known of queues of which there is nothing to tell and whose bucket is full, as that of a queue
// is that was never hinted: each look for hints reads them all, and queues come and go. The next time is when there are
// twice as many as are left. Called with mu held.
func (h *Hinter) forget(now time.Time) {
	maps.DeleteFunc(h.tells, func(_ int32, t *telling) bool {
		return !t.due && t.sent.Wait(now, h.rate, h.rate.Burst) == 0
	})
	h.tellsMax = 2 * len(h.tells)
}

// wait is how long a queue must wait until it may hint again; 0: it may.
func (h *Hinter) wait(t *telling, now time.Time) time.Duration { return t.sent.Wait(now, h.rate, 1) }

// spend takes the texts of the hints about a queue, which go out now.
func (h *Hinter) spend(queue int32, t *telling, now time.Time) []string {
	texts := t.texts(queue)
	t.due, t.lanes = false, nil
	t.sent.Take(now, h.rate, 1)
	return texts
}

func (t *telling) add(lanes []Lane) {
	if len(lanes) == 0 || (t.due && t.lanes == nil) {
		t.due, t.lanes = true, nil
		return
	}
	t.due = true
	for _, l := range lanes {
		if slices.Contains(t.lanes, l) {
			continue
		}
		if len(t.lanes) == hintLanes {
			t.lanes = nil
			return
		}
		t.lanes = append(t.lanes, l)
	}
}

// Run sends hints until ctx ends.
func (h *Hinter) Run(ctx context.Context) error {
	for {
		hints, wait := h.ready(time.Now())
		if len(hints) > 0 {
			h.send(ctx, hints)
			continue
		}
		var timer <-chan time.Time
		if wait > 0 {
			timer = time.After(wait)
		}
		select {
		case <-ctx.Done():
			return nil
		case <-h.wake:
		case <-timer:
		}
	}
}

// ready takes the hints that may go out now. If there are none it says when there will be some, 0 for unknown.
func (h *Hinter) ready(now time.Time) (hints []string, wait time.Duration) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for queue, t := range h.tells {
		if !t.due {
			continue
		}
		left := h.wait(t, now)
		if left == 0 {
			hints = append(hints, h.spend(queue, t, now)...)
		} else if wait == 0 || left < wait {
			wait = left
		}
	}
	return hints, wait
}

// texts are the payloads that tell about a queue; parseHint reads them.
func (t *telling) texts(queue int32) []string {
	var texts []string
	for _, l := range t.lanes {
		text := fmt.Sprintf("%d %d %s", queue, l.Priority, l.Flow)
		if len(text) > hintBytes {
			return []string{strconv.Itoa(int(queue))}
		}
		texts = append(texts, text)
	}
	if texts == nil {
		return []string{strconv.Itoa(int(queue))}
	}
	return texts
}

// parseHint reads a payload: a queue, and a lane if one is named. What does not parse is not from us.
func parseHint(text string) (queue int32, lane *Lane, ok bool) {
	id, rest, named := strings.Cut(text, " ")
	q, err := strconv.ParseInt(id, 10, 32)
	if err != nil {
		return 0, nil, false
	}
	if !named {
		return int32(q), nil, true
	}
	priority, flow, ok := strings.Cut(rest, " ")
	p, err := strconv.ParseInt(priority, 10, 16)
	if err != nil || !ok {
		return 0, nil, false
	}
	return int32(q), &Lane{Priority: int16(p), Flow: flow}, true
}

func (h *Hinter) send(ctx context.Context, hints []string) {
	ctx, cancel := context.WithTimeout(ctx, hintTimeout)
	defer cancel()
	if err := h.notify(ctx, hints); err != nil {
		h.Dropped.Add(int64(len(hints)))
		return
	}
	h.Sent.Add(int64(len(hints)))
}

// Hinting returns a copy of the queue whose pushes outside a transaction send their hints. They are committed as a
// group among themselves, not with those of q: call it once a queue and keep the result. A caller that pushes inside
// a transaction calls Hint after the commit.
func (q *Queue) Hinting(h *Hinter) *Queue {
	other := *q
	other.hinter, other.batcher = h, &batcher{}
	return &other
}
