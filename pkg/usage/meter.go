// Package usage adds up the measured use of workers in the memory of a node, and folds it into the database: for task
// nodes the calls of entries (pkg/inference), for gateways those of requests whose clients wait (pkg/gateway). What a
// row has, and the statement that adds it, is theirs.
//
// Rows are added to rows of the database, so a fold must not be added twice. The folds of a node are numbered, and the
// database adds one only if its number is larger than that of the last one (penstock.gateway_fold). A fold whose answer
// was lost is sent again under the number and the incarnation that it was sent with first.
package usage

import (
	"cmp"
	"context"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/penstock/penstock/internal/duty"
	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

const (
	rowsMax = 1000            // of a fold: those of a long outage go in several, each of which ends in time
	sendMax = 5 * time.Second // of one try to send a fold
)

// Row is what has been used under one key since the last fold.
type Row[K comparable, U any] struct {
	Key  K
	Used U
}

// Config says what a Meter adds up. All fields but Log are required.
type Config[K comparable, U any] struct {
	DB     postgres.DB
	Node   func() invalidation.NodeID // the present incarnation of the node
	Every  time.Duration              // between folds
	EndMax time.Duration              // of the last fold, for which the end of the node waits
	Step   string                     // what the log calls a fold
	Log    *slog.Logger               // default slog.Default()

	// Compare is the order in which rows are sent, and so locked: two nodes must not wait for each other.
	Compare func(a, b K) int
	Add     func(to *U, more U)
	// Times are the fields of a row that the database has in whole milliseconds.
	Times func(of *U) []*time.Duration
	// Send adds rows to the database, unless that has a fold of this node with this number or a larger one, and returns
	// the time of the database's clock. An error that postgres.RefusesRow knows is one of a row.
	Send func(
		ctx context.Context, db postgres.DB, node invalidation.NodeID, seq int64, rows []Row[K, U],
	) (now time.Time, err error)
}

// Meter adds up use by key. While the database is away it grows by one row for each key. What a node has not folded
// when it dies is lost. Rows that the database refuses are logged and not counted: they would be refused for ever, and
// keep all later ones back.
type Meter[K comparable, U any] struct {
	Clock postgres.Clock // of the database, by which budgets are read

	cfg  Config[K, U]
	mu   sync.Mutex
	sums map[K]U

	// of Fold alone
	sending []fold[K, U] // not answered yet, in the order of their numbers
	rests   map[K]U      // that carry keeps, since the hour restsOf began
	restsOf time.Time
	seq     int64
}

// fold is rows on their way, under the number and the incarnation that they were sent with first.
type fold[K comparable, U any] struct {
	node invalidation.NodeID
	seq  int64
	rows []Row[K, U]
}

// New returns a Meter without use.
func New[K comparable, U any](cfg Config[K, U]) *Meter[K, U] {
	cfg.Log = cmp.Or(cfg.Log, slog.Default())
	return &Meter[K, U]{cfg: cfg, sums: map[K]U{}, rests: map[K]U{}}
}

// Hour is the hour of the database's clock to which use that ends now is counted.
func (m *Meter[K, U]) Hour() time.Time { return m.Clock.Now().UTC().Truncate(time.Hour) }

// Add adds to what was used under a key. It may be called from any goroutine.
func (m *Meter[K, U]) Add(key K, used U) {
	m.mu.Lock()
	defer m.mu.Unlock()
	sum := m.sums[key]
	m.cfg.Add(&sum, used)
	m.sums[key] = sum
}

// Run folds until ctx ends, and once more then: end ctx after the last call of Add.
func (m *Meter[K, U]) Run(ctx context.Context) error {
	ticks := time.NewTicker(m.cfg.Every)
	defer ticks.Stop()
	var failing duty.Failing
	if err := m.Clock.Read(ctx, m.cfg.DB); err != nil && ctx.Err() == nil {
		m.cfg.Log.Warn("use goes by the clock of this machine until the first fold", "error", err)
	}
	for {
		select {
		case <-ctx.Done():
			ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), m.cfg.EndMax)
			defer cancel()
			return m.Fold(ctx)
		case <-ticks.C:
		}
		failing.Note(ctx, m.cfg.Log, slog.LevelError, m.cfg.Step, m.Fold(ctx))
	}
}

// Fold sends what was added before it, behind what was sent earlier without an answer. What is added meanwhile is left
// to the next Fold: under load there is always some, and this would never end. If the database does not answer, the
// same folds are sent again by the next Fold. A fold that it refuses is sent again in halves, until the rows that it
// refuses are alone. Fold may not run twice at once.
func (m *Meter[K, U]) Fold(ctx context.Context) error {
	if err := m.sendAll(ctx); err != nil {
		return err
	}
	for rows := range slices.Chunk(m.take(), rowsMax) {
		m.put(rows)
	}
	return m.sendAll(ctx)
}

// take returns what has been added, in the order of its keys.
func (m *Meter[K, U]) take() []Row[K, U] {
	m.mu.Lock()
	sums := m.sums
	m.sums = map[K]U{}
	m.mu.Unlock()
	rows := make([]Row[K, U], 0, len(sums))
	for key, used := range sums {
		rows = append(rows, Row[K, U]{key, used})
	}
	slices.SortFunc(rows, func(a, b Row[K, U]) int { return m.cfg.Compare(a.Key, b.Key) })
	m.carry(rows)
	return rows
}

// carry cuts the times of rows to milliseconds, as the columns have them, and adds what is cut off to the next row of
// the same hour. Without that a flow whose calls are short would be charged half a millisecond less in each fold.
func (m *Meter[K, U]) carry(rows []Row[K, U]) {
	if hour := m.Hour(); !hour.Equal(m.restsOf) {
		m.restsOf = hour
		clear(m.rests)
	}
	for i := range rows {
		rest := m.rests[rows[i].Key]
		whole, parts := m.cfg.Times(&rows[i].Used), m.cfg.Times(&rest)
		for t := range whole {
			sum := *whole[t] + *parts[t]
			*parts[t] = sum % time.Millisecond
			*whole[t] = sum - *parts[t]
		}
		m.rests[rows[i].Key] = rest
	}
}

// put appends a fold under the next number.
func (m *Meter[K, U]) put(rows []Row[K, U]) {
	m.seq++
	m.sending = append(m.sending, fold[K, U]{node: m.cfg.Node(), seq: m.seq, rows: rows})
}

// sendAll sends the folds that have no answer.
func (m *Meter[K, U]) sendAll(ctx context.Context) error {
	for len(m.sending) > 0 {
		f := m.sending[0]
		err := m.send(ctx, f)
		if err != nil && !postgres.RefusesRow(err) {
			return err
		}
		m.sending = m.sending[1:]
		switch half := len(f.rows) / 2; {
		case err == nil:
		case half == 0:
			m.cfg.Log.Error("use that the database refuses is not counted", "error", err)
		default:
			m.put(f.rows[:half])
			m.put(f.rows[half:])
		}
	}
	return nil
}

func (m *Meter[K, U]) send(ctx context.Context, f fold[K, U]) error {
	ctx, cancel := context.WithTimeout(ctx, sendMax)
	defer cancel()
	now, err := m.cfg.Send(ctx, m.cfg.DB, f.node, f.seq, f.rows)
	if err == nil {
		m.Clock.Set(now)
	}
	return err
}
