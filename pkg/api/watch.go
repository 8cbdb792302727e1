package api

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// errCrowded says that as many clients wait here as may.
var errCrowded = errors.New("too many clients wait for entries here; ask again without waiting, or later")

// A look at the watched entries costs the database a few probes an entry. So the pause between two looks grows with the
// time that they take: together they use a twentieth of one connection, whatever the number of clients.
const (
	lookPauseMin = 25 * time.Millisecond
	lookPauseMax = time.Second
	lookShare    = 20
	lookEntries  = 2000 // in one statement
	lookTimeout  = 5 * time.Second
)

// watch polls entries for all clients that wait for them: one goroutine, which lives while there are clients.
type watch struct {
	db  postgres.DB
	max int // clients
	log *slog.Logger

	mu      sync.Mutex
	entries map[invalidation.EntryID]*watched
	waiting int
	looking bool
}

// watched is a living entry that at least one client waits for.
type watched struct {
	queue int32
	id    invalidation.EntryID
	by    map[*waiter]struct{}
	last  sighting
}

// sighting is the result of a poll. It is shared by all clients that wait for the entry.
type sighting struct {
	ended bool // or vanished
	state string
	// Of the last word of a run, zero if there is none.
	done       float64
	message    string
	progressAt time.Time
	// The last piece of output, zero if there is none.
	token invalidation.Token
	seq   int
}

// waiter is one client. A token in changed says that seen has something new.
type waiter struct {
	watch   *watch
	entry   *watched
	changed chan struct{}
}

// wait registers a client for an entry of a queue, errCrowded if there are too many. If the entry has ended by now the
// next look will say so.
func (w *watch) wait(queue int32, id invalidation.EntryID) (*waiter, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.waiting >= w.max {
		return nil, errCrowded
	}
	if w.entries == nil {
		w.entries = map[invalidation.EntryID]*watched{}
	}
	e := w.entries[id]
	if e == nil {
		e = &watched{queue: queue, id: id, by: map[*waiter]struct{}{}}
		w.entries[id] = e
	}
	c := &waiter{watch: w, entry: e, changed: make(chan struct{}, 1)}
	e.by[c] = struct{}{}
	w.waiting++
	if !w.looking {
		w.looking = true
		go w.look()
	}
	return c, nil
}

// seen is what the last look found.
func (c *waiter) seen() sighting {
	c.watch.mu.Lock()
	defer c.watch.mu.Unlock()
	return c.entry.last
}

func (c *waiter) leave() {
	w := c.watch
	w.mu.Lock()
	defer w.mu.Unlock()
	w.waiting--
	delete(c.entry.by, c)
	if len(c.entry.by) == 0 && w.entries[c.entry.id] == c.entry {
		delete(w.entries, c.entry.id)
	}
}

// look polls all watched entries until no client waits.
func (w *watch) look() {
	for {
		queues, ids := w.all()
		if len(ids) == 0 {
			return
		}
		start := time.Now()
		for part := range slices.Chunk(ids, lookEntries) {
			if err := w.lookAt(queues[:len(part)], part); err != nil {
				w.log.Warn("look at entries that clients wait for", "error", err)
			}
			queues = queues[len(part):]
		}
		time.Sleep(min(max(lookShare*time.Since(start), lookPauseMin), lookPauseMax))
	}
}

// all lists what is watched. Nothing: looking ends, and the next one to wait begins it anew.
func (w *watch) all() (queues []int32, ids []invalidation.EntryID) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for id, e := range w.entries {
		queues, ids = append(queues, e.queue), append(ids, id)
	}
	w.looking = len(ids) > 0
	return queues, ids
}

// lookSQL says how the living ones of entries $2 of queues $1 stand. An entry that is not among them has ended.
const lookSQL = `
SELECT w.id, CASE WHEN e.priority < 0 THEN 'disabled' WHEN e.status = 'initial' THEN 'initial' WHEN l.runs THEN 'computing'
                  ELSE 'pending' END,
       coalesce(p.done, 0), coalesce(p.message, ''), p.updated_at, coalesce(o.token, 0), coalesce(o.seq, 0)
  FROM unnest($1::integer[], $2::bigint[]) w(queue_id, id)
 CROSS JOIN LATERAL (SELECT status, priority, lock_key FROM penstock.entry WHERE queue_id = w.queue_id
        AND id = w.id OFFSET 0) e
  LEFT JOIN LATERAL (SELECT last_entry_id >= w.id AS runs FROM penstock.lock
                      WHERE queue_id = w.queue_id AND lock_key = coalesce(e.lock_key, '#' || w.id) OFFSET 0) l ON true
  LEFT JOIN LATERAL (SELECT done, message, updated_at FROM penstock.progress
                      WHERE queue_id = w.queue_id AND entry_id = w.id OFFSET 0) p ON true
  LEFT JOIN LATERAL (SELECT token, seq FROM penstock.output
                      WHERE queue_id = w.queue_id AND entry_id = w.id ORDER BY token DESC, seq DESC LIMIT 1) o ON true`

func (w *watch) lookAt(queues []int32, ids []invalidation.EntryID) error {
	ctx, cancel := context.WithTimeout(context.Background(), lookTimeout)
	defer cancel()
	living := make(map[invalidation.EntryID]sighting, len(ids))
	var (
		id invalidation.EntryID
		s  sighting
		at *time.Time
	)
	_, err := pgx.ForEachRow(postgres.Query(ctx, w.db, lookSQL, queues, ids),
		[]any{&id, &s.state, &s.done, &s.message, &at, &s.token, &s.seq}, func() error {
			if s.progressAt = (time.Time{}); at != nil {
				s.progressAt = *at
			}
			living[id] = s
			return nil
		})
	if err != nil {
		return fmt.Errorf("look at %d entries: %w", len(ids), err)
	}
	w.tell(ids, living)
	return nil
}

// tell wakes the clients whose entry is not as it was.
func (w *watch) tell(ids []invalidation.EntryID, living map[invalidation.EntryID]sighting) {
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
			s.ended = true
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
