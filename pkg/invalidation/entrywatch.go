package invalidation

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/duty"
	"github.com/penstock/penstock/internal/postgres"
)

// ErrTooManyWaiters is returned by EntryWatch.Wait: as many clients wait in this process as may.
var ErrTooManyWaiters = errors.New("too many clients wait for entries here; ask again without waiting, or later")

// A poll of the watched entries costs the database a few probes an entry. So the pause between two polls grows with
// the time that they take: together they use a twentieth of one connection, whatever the number of clients.
const (
	watchPauseMin = 25 * time.Millisecond
	watchPauseMax = time.Second
	watchShare    = 20
	watchEntries  = 2000 // in one statement
	watchTimeout  = 5 * time.Second
)

// EntryWatch polls living entries for all clients of a process that wait for their changes and their ends. It has one
// goroutine, which lives while there are clients, and sends nothing while there are none. It may be used by several
// goroutines at once.
type EntryWatch struct {
	db  postgres.DB
	max int // clients
	log *slog.Logger

	failing duty.Failing

	mu      sync.Mutex
	entries map[EntryID]*watched
	waiting int
	of      map[string]int // clients that wait, by holder
	polling bool
}

// NewEntryWatch returns a watch that polls db. At most waitersMax clients wait at a time; 0: any number.
func NewEntryWatch(db postgres.DB, waitersMax int, log *slog.Logger) *EntryWatch {
	if log == nil {
		log = slog.Default()
	}
	return &EntryWatch{db: db, max: waitersMax, log: log, entries: map[EntryID]*watched{}, of: map[string]int{}}
}

// watched is a living entry that at least one client waits for.
type watched struct {
	queue int32
	id    EntryID
	by    map[*EntryWaiter]struct{}
	since *time.Time // from when on a client follows its output; nil: none does
	last  EntryNews
}

// EntryNews is the result of a poll. It is shared by all clients that wait for the entry.
type EntryNews struct {
	Ended bool   // or vanished
	State string // initial, pending, computing or disabled; empty before the first poll
	// Of the last report of progress of a run, zero if there is none.
	Done       float64 // 0 to 1
	Message    string
	ProgressAt time.Time
	// The last piece of output, zero if there is none, or no client follows it.
	Token Token
	Seq   int
}

// EntryWaiter is one client. Changed receives when News has something new.
type EntryWaiter struct {
	Changed <-chan struct{}

	watch   *EntryWatch
	entry   *watched
	holder  string
	changed chan struct{} // holds one
}

// waitedSQL says which queue an entry is in, and whether it has ended.
const waitedSQL = `
SELECT f.queue_id, f.queue_name, f.ended IS NOT NULL FROM penstock.find_entry($1) f WHERE f.queue_id IS NOT NULL`

// Find looks for an entry, in whichever queue it is, registers a client for it as Wait does, and names its queue. It
// returns no client, and no error, where the entry has ended, and ErrEntryNotFound if there is no such entry.
func (w *EntryWatch) Find(
	ctx context.Context, id EntryID, holder string,
) (queue string, c *EntryWaiter, err error) {
	var number int32
	var ended bool
	err = w.db.QueryRow(ctx, waitedSQL, id).Scan(&number, &queue, &ended)
	if errors.Is(err, pgx.ErrNoRows) {
		err = ErrEntryNotFound
	}
	if err != nil {
		return "", nil, fmt.Errorf("wait for entry %d: %w", id, err)
	}
	if !ended {
		c, err = w.Wait(number, id, holder)
	}
	return queue, c, err
}

// Wait registers a client for an entry of a queue. It returns ErrTooManyWaiters if there are too many. Those of one
// holder, such as a token, are at most half of all, so that it leaves room for the others; an empty one has no name.
// If the entry has ended by now the next poll will say so. Leave must follow.
func (w *EntryWatch) Wait(queue int32, id EntryID, holder string) (*EntryWaiter, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	switch {
	case w.max <= 0:
	case w.waiting >= w.max:
		return nil, ErrTooManyWaiters
	case holder != "" && w.of[holder] >= max(1, w.max/2):
		return nil, fmt.Errorf("%w: %s has as many as one may", ErrTooManyWaiters, holder)
	}
	e := w.entries[id]
	if e == nil {
		e = &watched{queue: queue, id: id, by: map[*EntryWaiter]struct{}{}}
		w.entries[id] = e
	}
	changed := make(chan struct{}, 1)
	c := &EntryWaiter{Changed: changed, watch: w, entry: e, holder: holder, changed: changed}
	e.by[c] = struct{}{}
	w.waiting++
	w.of[holder]++
	if !w.polling {
		w.polling = true
		go w.poll()
	}
	return c, nil
}

// FollowOutput makes pieces of output news too, from a time on: see Queue.OutputSince.
func (c *EntryWaiter) FollowOutput(since time.Time) {
	c.watch.mu.Lock()
	defer c.watch.mu.Unlock()
	c.entry.since = &since
}

// Waiting returns how many clients wait.
func (w *EntryWatch) Waiting() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.waiting
}

// News is the result of the last poll.
func (c *EntryWaiter) News() EntryNews {
	c.watch.mu.Lock()
	defer c.watch.mu.Unlock()
	return c.entry.last
}

// Leave ends the wait of the client.
func (c *EntryWaiter) Leave() {
	w := c.watch
	w.mu.Lock()
	defer w.mu.Unlock()
	w.waiting--
	if w.of[c.holder]--; w.of[c.holder] == 0 {
		delete(w.of, c.holder)
	}
	delete(c.entry.by, c)
	if len(c.entry.by) == 0 && w.entries[c.entry.id] == c.entry {
		delete(w.entries, c.entry.id)
	}
}

// poll polls all watched entries, again and again, until no client waits.
func (w *EntryWatch) poll() {
	for {
		all := w.all()
		if len(all) == 0 {
			return
		}
		start := time.Now()
		pause := watchPauseMin
		for part := range slices.Chunk(all, watchEntries) {
			err := w.pollSome(part)
			w.failing.Note(context.Background(), w.log, slog.LevelWarn, "poll entries that clients wait for", err)
			if err != nil {
				pause = watchPauseMax
			}
		}
		time.Sleep(min(max(watchShare*time.Since(start), pause), watchPauseMax))
	}
}

// all lists the watched entries. If there are none polling ends, and the next one to wait begins it anew.
func (w *EntryWatch) all() (list []watched) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, e := range w.entries {
		list = append(list, watched{queue: e.queue, id: e.id, since: e.since})
	}
	w.polling = len(list) > 0
	return list
}

// watchSQL reads the living ones of entries $2 of queues $1. An entry that is not among them has ended.
const watchSQL = `
SELECT w.id, penstock.entry_state(e.status, e.priority, l.covers),
       coalesce(p.done, 0), coalesce(p.message, ''), p.updated_at
  FROM unnest($1::integer[], $2::bigint[]) w(queue_id, id)
 CROSS JOIN LATERAL (SELECT status, priority, lock_key FROM penstock.entry
                      WHERE queue_id = w.queue_id AND id = w.id OFFSET 0) e
  LEFT JOIN LATERAL (SELECT last_entry_id >= w.id AS covers FROM penstock.lock
                      WHERE queue_id = w.queue_id
                        AND lock_key = penstock.record_key(e.lock_key, w.id) OFFSET 0) l ON true
  LEFT JOIN LATERAL (SELECT done, message, updated_at FROM penstock.progress
                      WHERE queue_id = w.queue_id AND entry_id = w.id OFFSET 0) p ON true`

func (w *EntryWatch) pollSome(list []watched) error {
	queues, ids := make([]int32, len(list)), make([]EntryID, len(list))
	for i, e := range list {
		queues[i], ids[i] = e.queue, e.id
	}
	ctx, cancel := context.WithTimeout(context.Background(), watchTimeout)
	defer cancel()
	living := make(map[EntryID]EntryNews, len(ids))
	var (
		id EntryID
		s  EntryNews
		at *time.Time
	)
	_, err := pgx.ForEachRow(postgres.Query(ctx, w.db, watchSQL, queues, ids),
		[]any{&id, &s.State, &s.Done, &s.Message, &at}, func() error {
			if s.ProgressAt = (time.Time{}); at != nil {
				s.ProgressAt = *at
			}
			living[id] = s
			return nil
		})
	if err != nil {
		return fmt.Errorf("poll %d entries: %w", len(ids), err)
	}
	if err := w.pollOutput(ctx, list, living); err != nil {
		return err
	}
	w.tell(ids, living)
	return nil
}

// watchOutputSQL reads the last pieces of output of entries $2 of queues $1, each from its time in $3 on, of which $4
// is the first.
const watchOutputSQL = `
SELECT w.id, o.token, o.seq
  FROM unnest($1::integer[], $2::bigint[], $3::timestamptz[]) w(queue_id, id, since)
 CROSS JOIN LATERAL (SELECT token, seq FROM penstock.output
                      WHERE queue_id = w.queue_id AND entry_id = w.id AND at >= w.since AND at >= $4
                      ORDER BY token DESC, seq DESC LIMIT 1) o`

// pollOutput adds the last pieces of output to the news of the living entries whose output a client follows.
func (w *EntryWatch) pollOutput(ctx context.Context, list []watched, living map[EntryID]EntryNews) error {
	var queues []int32
	var ids []int64
	var since []time.Time
	for _, e := range list {
		if _, lives := living[e.id]; lives && e.since != nil {
			queues, ids, since = append(queues, e.queue), append(ids, int64(e.id)), append(since, *e.since)
		}
	}
	if len(ids) == 0 {
		return nil
	}
	first := slices.MinFunc(since, time.Time.Compare)
	rows := postgres.Query(ctx, w.db, watchOutputSQL, pgx.QueryExecModeSimpleProtocol, queues, ids, since, first)
	var id EntryID
	var token Token
	var seq int
	_, err := pgx.ForEachRow(rows, []any{&id, &token, &seq}, func() error {
		news := living[id]
		news.Token, news.Seq = token, seq
		living[id] = news
		return nil
	})
	if err != nil {
		return fmt.Errorf("poll output of %d entries: %w", len(ids), err)
	}
	return nil
}

// tell wakes the clients whose entry is not as it was.
func (w *EntryWatch) tell(ids []EntryID, living map[EntryID]EntryNews) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, id := range ids {
		e := w.entries[id]
		if e == nil {
			continue
		}
		s, lives := living[id]
		if !lives {
			s = e.last
			s.Ended = true
			delete(w.entries, id) // the next client finds the end without waiting, or a new life
		}
		if s == e.last {
			continue
		}
		e.last = s
		for c := range e.by {
			select {
			case c.changed <- struct{}{}:
			default:
			}
		}
	}
}
