package recovery

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// deferral is the backoff of a lock that could not be freed, so that later passes try other locks
// first.
type deferral struct {
	tries int
	until time.Time
}

// errUnresolved is the reason for a lock that was not freed without an error: another transaction
// has its record locked.
var errUnresolved = errors.New("its record is locked by a transaction, or its node came back")

// free ends stuck locks, at most cfg.PassLocksMax of them, oldest first. It returns an error only
// if no lock could have been freed. A single lock that cannot be freed is deferred and logged, and
// the others go on.
func (l *Locks) free(ctx context.Context, stuck []Stuck) error {
	l.forget(stuck)
	chosen := l.choose(stuck)
	l.left = len(chosen) == l.cfg.PassLocksMax
	if len(chosen) == 0 {
		return nil
	}
	queues, err := l.queues(ctx)
	if err != nil {
		return err
	}
	for _, batch := range batches(chosen, l.cfg.batchLocksMax) {
		queue, known := queues[batch[0].QueueID]
		if !known {
			l.putOff(ctx, batch, fmt.Errorf("queue %d is not registered", batch[0].QueueID))
			continue
		}
		if err := l.freeBatch(ctx, queue, batch); err != nil {
			return err
		}
	}
	return nil
}

// forget drops deferrals of locks that are not stuck any more.
func (l *Locks) forget(stuck []Stuck) {
	if len(l.deferred) == 0 {
		return
	}
	here := make(map[invalidation.Token]bool, len(stuck))
	for _, s := range stuck {
		here[s.Token] = true
	}
	for token := range l.deferred {
		if !here[token] {
			delete(l.deferred, token)
		}
	}
}

func (l *Locks) choose(stuck []Stuck) []Stuck {
	now := time.Now()
	var chosen []Stuck
	for _, s := range stuck {
		if len(chosen) == l.cfg.PassLocksMax {
			break
		}
		if !now.Before(l.deferred[s.Token].until) {
			chosen = append(chosen, s)
		}
	}
	return chosen
}

func (l *Locks) queues(ctx context.Context) (map[int32]*invalidation.Queue, error) {
	ctx, end := l.reads.Context(ctx, 0)
	list, err := invalidation.ListSettings(ctx, l.db)
	end(err)
	if err != nil {
		return nil, err
	}
	byID := make(map[int32]*invalidation.Queue, len(list))
	for _, q := range list {
		byID[q.ID] = q
	}
	return byID, nil
}

// batches groups locks that one call can free: of one queue, and all crashed or none.
func batches(stuck []Stuck, size int) [][]Stuck {
	type kind struct {
		queue   int32
		crashed bool
	}
	groups := map[kind][]Stuck{}
	var order []kind
	for _, s := range stuck {
		k := kind{s.QueueID, s.Cause.Crashed()}
		if groups[k] == nil {
			order = append(order, k)
		}
		groups[k] = append(groups[k], s)
	}
	var all [][]Stuck
	for _, k := range order {
		all = slices.AppendSeq(all, slices.Chunk(groups[k], size))
	}
	return all
}

// freeBatch frees locks together, and one by one if that fails, to find the lock that causes the
// error.
func (l *Locks) freeBatch(ctx context.Context, q *invalidation.Queue, batch []Stuck) error {
	freed, err := l.recover(ctx, q, batch)
	switch {
	case err == nil:
		l.answer()
		l.noteFreed(ctx, q, batch, freed)
		return nil
	case postgres.Unavailable(err) || ctx.Err() != nil: // or the term is over
		return err
	case len(batch) == 1:
		l.putOff(ctx, batch, err)
		return nil
	}
	for _, one := range slices.Collect(slices.Chunk(batch, 1)) {
		if err := l.freeBatch(ctx, q, one); err != nil {
			return err
		}
	}
	return nil
}

func (l *Locks) recover(ctx context.Context, q *invalidation.Queue, batch []Stuck) (invalidation.Recovered, error) {
	var ran, waited []invalidation.LockRef
	for _, s := range batch {
		if s.Waited {
			waited = append(waited, s.LockRef)
		} else {
			ran = append(ran, s.LockRef)
		}
	}
	var r invalidation.Recovered
	err := l.write(ctx, len(batch), func(ctx context.Context, tx pgx.Tx) (err error) {
		r, err = q.WithTx(tx).Recover(ctx, ran, waited, batch[0].Cause.Crashed())
		return err
	})
	return r, err
}

// noteFreed records the result of a batch. A lock that was not freed is deferred; if it is gone, the
// deferral is dropped later.
func (l *Locks) noteFreed(ctx context.Context, q *invalidation.Queue, batch []Stuck, r invalidation.Recovered) {
	freed := make(map[invalidation.Token]bool, len(r.Freed))
	for _, token := range r.Freed {
		freed[token] = true
	}
	var left []Stuck
	var lanes []invalidation.Lane // of the freed locks
	for _, s := range batch {
		if !freed[s.Token] {
			left = append(left, s)
			continue
		}
		lanes = append(lanes, s.Lane)
		l.done.Add(func(status *LocksStatus) { status.Freed[s.Cause]++ })
		l.cfg.Log.DebugContext(ctx, "freed a stuck lock", "queue", q.Name, "lock_key", s.Key, "token", s.Token,
			"node", s.Node, "cause", s.Cause, "age", s.Age)
	}
	if len(freed) > 0 {
		l.cfg.Hint(q.ID, lanes)
		l.cfg.Log.InfoContext(ctx, "freed stuck locks", "queue", q.Name, "locks", len(freed), "first_token",
			batch[0].Token,
			"node", batch[0].Node, "cause", batch[0].Cause)
	}
	for _, id := range r.DeadLettered {
		l.cfg.Log.ErrorContext(ctx, "dead-lettered an entry as poison: too many nodes died while they ran it",
			"queue", q.Name, "entry", id)
	}
	l.done.Add(func(status *LocksStatus) { status.DeadLettered += int64(len(r.DeadLettered)) })
	l.putOff(ctx, left, errUnresolved)
}

const (
	deferFirst = time.Second
	deferMax   = 30 * time.Second
	// Backoff for a lock record that another transaction has locked.
	deferLocked = 500 * time.Millisecond
	// Of the tries that end in errUnresolved one in quietTries is logged: a record that is being
	// settled is normal.
	quietTries = 20
)

// putOff defers locks for a time that grows with each try, and logs them.
func (l *Locks) putOff(ctx context.Context, locks []Stuck, why error) {
	for _, s := range locks {
		d := l.deferred[s.Token]
		wait := min(deferFirst<<min(d.tries, 10), deferMax)
		if errors.Is(why, errUnresolved) {
			wait = deferLocked
		}
		d.until = time.Now().Add(wait)
		d.tries++
		l.deferred[s.Token] = d
		if errors.Is(why, errUnresolved) && d.tries%quietTries != 0 {
			continue
		}
		l.done.Add(func(status *LocksStatus) { status.Unresolved++ })
		l.cfg.Log.ErrorContext(ctx, "cannot free a stuck lock; see the error", "queue_id", s.QueueID,
			"lock_key", s.Key,
			"token", s.Token, "node", s.Node, "cause", s.Cause, "tries", d.tries, "error", why)
	}
}
