package gateway

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/penstock/penstock/internal/duty"
	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// UsageBook adds up the measured use of calls, in memory, and folds it into the database every
// second: into the hours of use, and into the use by which durable entries are ordered. While the
// database is away it grows by one row for a flow, model and hour. A fold whose answer was lost is
// sent again under its number, and counts once.
type UsageBook struct {
	db    postgres.DB
	node  func() invalidation.NodeID
	every time.Duration
	log   *slog.Logger
	clock postgres.Clock // of the database, by which budgets are read

	mu      sync.Mutex
	rows    map[useKey]use
	refused map[string]int64 // requests, by model
	sending []*fold          // not answered yet, in the order of their numbers
	rests   map[useKey]use   // that carry keeps, since the hour restsOf began
	restsOf time.Time
	seq     int64
}

type useKey struct {
	hour               time.Time
	queue, model, flow string
	shared             bool
}

type use struct {
	calls, in, out     int64
	gpu, extra, wasted time.Duration // extra: of gpu, what is beyond the time of the slots; wasted is of gpu too
}

// fold is rows on their way, under the number and the incarnation that they were sent with first.
type fold struct {
	node    invalidation.NodeID
	seq     int64
	rows    map[useKey]use
	refused map[string]int64
}

// foldMost bounds the rows of a fold: those of a long outage go in several, each of which ends in time.
const foldMost = 1000

// NewUsageBook returns an empty book.
func NewUsageBook(db postgres.DB, node func() invalidation.NodeID, log *slog.Logger) *UsageBook {
	return &UsageBook{
		db: db, node: node, every: time.Second, log: cmp.Or(log, slog.Default()), rows: map[useKey]use{},
		refused: map[string]int64{}, rests: map[useKey]use{},
	}
}

// Charge implements Charger.
func (b *UsageBook) Charge(c Charge) {
	key := useKey{
		hour: b.clock.Now().UTC().Truncate(time.Hour), queue: c.Queue, model: c.Model, flow: c.Flow,
		shared: !c.Separate,
	}
	b.mu.Lock()
	defer b.mu.Unlock()
	u := b.rows[key]
	u.calls++
	u.gpu += c.GPU
	u.extra += c.GPU - c.Took
	if c.Wasted {
		u.wasted += c.GPU
	}
	u.in += c.TokensIn
	u.out += c.TokensOut
	b.rows[key] = u
}

// Refuse implements Charger.
func (b *UsageBook) Refuse(model string) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.refused[model]++
}

// Run folds until ctx ends, and once more then.
func (b *UsageBook) Run(ctx context.Context) error {
	ticks := time.NewTicker(b.every)
	defer ticks.Stop()
	var failing duty.Failing
	if err := b.clock.Read(ctx, b.db); err != nil && ctx.Err() == nil {
		b.log.Warn("use goes by the clock of this machine until the first fold", "error", err)
	}
	for {
		select {
		case <-ctx.Done():
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), 2*time.Second)
			defer cancel()
			return b.Fold(ctx)
		case <-ticks.C:
		}
		failing.Note(ctx, b.log, slog.LevelError, "fold use", b.Fold(ctx))
	}
}

// Fold sends the sums of the calls that ended before it. If the database does not answer, the same fold is sent again
// the next time. A fold that it refuses is sent again in parts, until the rows that it refuses are alone: they are not
// counted.
func (b *UsageBook) Fold(ctx context.Context) error {
	if err := b.sendAll(ctx); err != nil {
		return err
	}
	b.take()
	return b.sendAll(ctx)
}

// sendAll sends the folds without an answer. Use that comes meanwhile is left to the next Fold: under load there is
// always some, and this would never end.
func (b *UsageBook) sendAll(ctx context.Context) error {
	for f := b.first(); f != nil; f = b.first() {
		ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
		err := b.send(ctx, f)
		cancel()
		if err != nil && !postgres.RefusesRow(err) {
			return err
		}
		b.mu.Lock()
		b.sending = b.sending[1:]
		if err != nil {
			b.split(f, err)
		}
		b.mu.Unlock()
	}
	return nil
}

// first is the first fold without an answer.
func (b *UsageBook) first() *fold {
	b.mu.Lock()
	defer b.mu.Unlock()
	if len(b.sending) == 0 {
		return nil
	}
	return b.sending[0]
}

// take makes folds of what has come, each of up to foldMost rows.
func (b *UsageBook) take() {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.carry()
	for len(b.rows) > foldMost {
		b.put(moved(b.rows, foldMost), nil)
	}
	if len(b.rows) > 0 || len(b.refused) > 0 {
		b.put(b.rows, b.refused)
		b.rows, b.refused = map[useKey]use{}, map[string]int64{}
	}
}

// carry cuts the times of rows to milliseconds, as the columns have them, and adds what is cut off to the next row of
// the same hour. Without that a flow whose calls are short would be charged half a millisecond less in each fold.
// Called with mu held.
func (b *UsageBook) carry() {
	if hour := b.clock.Now().UTC().Truncate(time.Hour); !hour.Equal(b.restsOf) {
		b.restsOf = hour
		clear(b.rests)
	}
	for k, row := range b.rows {
		rest := b.rests[k]
		for _, part := range []struct{ row, rest *time.Duration }{
			{&row.gpu, &rest.gpu}, {&row.extra, &rest.extra}, {&row.wasted, &rest.wasted},
		} {
			sum := *part.row + *part.rest
			*part.rest = sum % time.Millisecond
			*part.row = sum - *part.rest
		}
		b.rows[k], b.rests[k] = row, rest
	}
}

// split puts the halves of a fold that the database has refused in its place; a single row is dropped, since it would
// be refused for ever, and keep all later use back. Called with mu held.
func (b *UsageBook) split(f *fold, err error) {
	switch {
	case len(f.rows) > 0 && len(f.refused) > 0:
		b.put(f.rows, nil)
		b.put(nil, f.refused)
	case len(f.rows) > 1:
		b.put(moved(f.rows, len(f.rows)/2), nil)
		b.put(f.rows, nil)
	case len(f.refused) > 1:
		b.put(nil, moved(f.refused, len(f.refused)/2))
		b.put(nil, f.refused)
	default:
		b.log.Error("use that the database refuses is not counted", "error", err)
	}
}

// put appends a fold under the next number. Called with mu held.
func (b *UsageBook) put(rows map[useKey]use, refused map[string]int64) {
	b.seq++
	b.sending = append(b.sending, &fold{node: b.node(), seq: b.seq, rows: rows, refused: refused})
}

// moved takes n entries out of a map.
func moved[K comparable, V any](from map[K]V, n int) map[K]V {
	out := make(map[K]V, n)
	for k, v := range from {
		if len(out) == n {
			break
		}
		out[k] = v
		delete(from, k)
	}
	return out
}

const foldSQL = `
SELECT penstock.fold_online_gpu($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15),
       clock_timestamp()`

func (b *UsageBook) send(ctx context.Context, f *fold) error {
	var c useColumns
	keys := slices.SortedFunc(maps.Keys(f.rows), func(a, b useKey) int {
		return cmp.Or(a.hour.Compare(b.hour), cmp.Compare(a.queue, b.queue), cmp.Compare(a.flow, b.flow))
	})
	for _, k := range keys {
		c.append(k, f.rows[k])
	}
	models := slices.Sorted(maps.Keys(f.refused))
	counts := make([]int64, len(models))
	for i, model := range models {
		counts[i] = f.refused[model]
	}
	var applied bool // false: it was so before, and its answer was lost
	var now time.Time
	err := b.db.QueryRow(ctx, foldSQL, f.node, f.seq, c.hours, c.queues, c.models, c.flows, c.calls, c.gpu, c.extra,
		c.wasted, c.in, c.out, c.shared, models, counts).Scan(&applied, &now)
	if err != nil {
		return fmt.Errorf("fold use of %d flows: %w", len(f.rows), err)
	}
	b.clock.Set(now)
	return nil
}

type useColumns struct {
	hours                       []time.Time
	queues, models, flows       []string
	calls, gpu, wasted, in, out []int64
	extra                       []int64
	shared                      []bool
}

func (c *useColumns) append(k useKey, u use) {
	c.hours, c.queues, c.models = append(c.hours, k.hour), append(c.queues, k.queue), append(c.models, k.model)
	c.flows, c.calls = append(c.flows, k.flow), append(c.calls, u.calls)
	c.gpu, c.extra = append(c.gpu, u.gpu.Milliseconds()), append(c.extra, u.extra.Milliseconds())
	c.wasted = append(c.wasted, u.wasted.Milliseconds())
	c.in, c.out, c.shared = append(c.in, u.in), append(c.out, u.out), append(c.shared, k.shared)
}
