package invalidation

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"sync"
	"time"

	"github.com/penstock/penstock/internal/postgres"
)

// interruptionsMax is how often in a row the database may interrupt the runs of an entry on one node before that
// counts as an error: a statement may be what makes the server fail.
const interruptionsMax = 5

// interruptedEntriesMax bounds the memory of the counts. Beyond it, all begin anew.
const interruptedEntriesMax = 10_000

// Interruptions counts, by entry, how often in a row the database interrupted the runs of this node. One of a node
// serves all its handlers, since they are made anew with each change of the registry.
type Interruptions struct {
	mu     sync.Mutex
	counts map[EntryID]int
}

// Wrap returns handler for work that is done in the database alone: where the database interrupted a run
// (it shut down, failed over, lost the connection, or ended the transaction in favour of another one) the entry goes
// back into line without an attempt spent. After five interruptions in a row on this node, the error counts.
func (i *Interruptions) Wrap(handler Handler) Handler {
	h := &interruptible{handler, i}
	if batch, ok := handler.(BatchHandler); ok {
		return &interruptibleBatch{h, batch}
	}
	return h
}

type interruptible struct {
	Handler
	interruptions *Interruptions
}

// Handle implements Handler.
func (i *interruptible) Handle(ctx context.Context, r *Run) (json.RawMessage, error) {
	result, err := i.Handler.Handle(ctx, r)
	return result, i.interruptions.judge(ctx, r.Entry.ID, err)
}

type interruptibleBatch struct {
	*interruptible
	batch BatchHandler
}

// HandleBatch implements BatchHandler.
func (i *interruptibleBatch) HandleBatch(ctx context.Context, runs []*Run) []BatchAnswer {
	answers := i.batch.HandleBatch(ctx, runs)
	for n := range answers {
		answers[n].Err = i.interruptions.judge(ctx, runs[n].Entry.ID, answers[n].Err)
	}
	return answers
}

// judge counts an interruption, and makes it free as long as there were few.
func (i *Interruptions) judge(ctx context.Context, id EntryID, err error) error {
	i.mu.Lock()
	defer i.mu.Unlock()
	if ctx.Err() != nil || !Interrupted(err) {
		delete(i.counts, id)
		return err
	}
	if i.counts == nil || len(i.counts) >= interruptedEntriesMax {
		i.counts = map[EntryID]int{}
	}
	i.counts[id]++
	if i.counts[id] > interruptionsMax {
		delete(i.counts, id)
		return err
	}
	return &answer{err: err, delay: time.Second, hasDelay: true, release: true, interrupted: true}
}

// Interrupted reports whether a transaction ended because of the database and not because of its statements. Errors
// that no server or connection raised, such as those of a result that cannot be recorded, are none.
func Interrupted(err error) bool {
	if code := postgres.Code(err); code != "" {
		return postgres.Unavailable(err) || strings.HasPrefix(code, "40")
	}
	return errors.Is(err, postgres.ErrSilent) || postgres.Disconnected(err)
}
