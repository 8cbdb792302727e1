package fairness

import (
	"math"
	"math/rand/v2"
	"sync"
	"time"
)

// Algorithm orders the lanes of one band of a queue.
type Algorithm uint8

// The algorithms of a queue; it may change between two rankings.
const (
	Fair Algorithm = iota // the flow that attained the least service for its weight goes first
	Fifo                  // the oldest head goes first, of any flow
)

// Lane is a lane that has, or may have, work.
type Lane struct {
	Queue       int32
	Priority    int16
	Flow        string
	Algorithm   Algorithm
	QueueWeight float64       // share of the queue among queues; 1 if not above zero
	Weight      float64       // share of the flow among flows; 1 if not above zero
	HeadAge     time.Duration // how long its head has waited: ages the band, and orders fifo queues
	HeadPos     int64         // position of its head, if known: orders fifo queues better than age
	Taken       bool          // it is just claimed from: it ranks as if it were charged as usual

	found *flow // by the last ranking, so that lanes kept from one to the next need no lookup
}

func (l *Lane) key() Key { return Key{Queue: l.Queue, Priority: l.Priority, Flow: l.Flow} }

// Config sets the half-life of service and the guaranteed shares of lower bands. A zero field means
// its default.
type Config struct {
	// HalfLife is the time after which service counts half. Default 5 min. All nodes and the exchange must agree on it.
	HalfLife time.Duration
	// Grace is how long a flow may be without work and still count as one that stayed. Default 1 s.
	Grace time.Duration
	// MinShare is the least share of each band with work, 0 to 1. Default 0.05; below zero means
	// none.
	MinShare float64
	// Seed makes nodes differ where lanes are equal. Default random.
	Seed uint64
}

func (c Config) withDefaults() Config {
	if c.HalfLife <= 0 {
		c.HalfLife = 5 * time.Minute
	}
	if c.Grace <= 0 {
		c.Grace = time.Second
	}
	if c.MinShare == 0 {
		c.MinShare = 0.05
	}
	c.MinShare = min(max(c.MinShare, 0), 1)
	if c.Seed == 0 {
		c.Seed = rand.Uint64()
	}
	return c
}

// Book is one node's view of the service of all flows. It reads no clock and does no I/O; its
// methods may be called from any goroutine.
type Book struct {
	config Config

	mu       sync.Mutex
	epoch    time.Time
	flows    map[Key]*flow
	queues   map[queueBand]*queue
	bands    []*band
	ranking  uint64
	turns    uint64
	rounds   uint64  // of the exchange
	nodes    float64 // live ones
	sortKeys []SortKey
	touched  []*queue
	lanes    []*flow
}

type queueBand struct {
	id       int32
	priority int16
}

// queue is one band of a queue: an account among the queues of the band, and a group of flows.
type queue struct {
	account
	key       queueBand
	band      *band
	members   group
	algorithm Algorithm
	nodes     float64 // how many nodes seem to serve it as this one does
	ranking   uint64
	taken     bool   // one of its lanes is, in this ranking
	kept      uint64 // the last round in which a flow of it was kept
}

type flow struct {
	account
	key   Key
	queue *queue
	book  *Book // nil once forgotten
}

// New returns an empty book.
func New(c Config) *Book {
	return &Book{
		config: c.withDefaults(), nodes: 1,
		flows: map[Key]*flow{}, queues: map[queueBand]*queue{},
	}
}

// Rank appends to dst the indexes of the lanes to try, best first; limit of them, or all if
// limit is 0. It allocates only for lanes it has never seen, and costs least for lanes that
// the caller keeps from one ranking to the next.
func (b *Book) Rank(dst []int, lanes []Lane, limit int, now time.Time) []int {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.ranking++
	scale := b.scale(now)
	b.resolve(lanes, scale, now)
	for _, q := range b.touched {
		q.members.rise()
		q.band.members.rise()
	}
	b.shares(now)
	for _, q := range b.touched {
		q.band.members.raise(&q.account, q.nodes, now, b.config.Grace)
		q.level += q.dither(q.nodes, scale, b.rounds)
		if q.taken {
			q.level += q.pending(q.nodes, scale)
		}
	}
	b.sortKeys = b.sortKeys[:0]
	for i, f := range b.lanes {
		q := f.queue
		s := SortKey{
			Due: q.band.due(), Priority: q.key.priority, Queue: q.level, QueueTurn: q.turn, FlowTurn: f.turn,
			QueueID: q.key.id, Tie: f.tie, Index: i,
		}
		if q.algorithm == Fair {
			q.members.raise(&f.account, q.nodes, now, b.config.Grace)
			s.Flow = f.level + f.dither(q.nodes, scale, b.rounds)
			if lanes[i].Taken {
				s.Flow += f.pending(q.nodes, scale)
			}
		} else {
			f.seen = now
			s.Flow = inLine(&lanes[i])
		}
		b.sortKeys = append(b.sortKeys, s)
	}
	return Order(dst, b.sortKeys, limit)
}

// inLine is a lane's sort key in a fifo queue: smaller is older.
func inLine(l *Lane) float64 {
	if l.HeadPos != 0 {
		return float64(l.HeadPos)
	}
	return -l.HeadAge.Seconds()
}

// resolve finds the accounts of all lanes and their levels before any is lifted.
func (b *Book) resolve(lanes []Lane, scale float64, now time.Time) {
	b.touched, b.lanes = b.touched[:0], b.lanes[:0]
	for _, x := range b.bands {
		x.now = false
	}
	for i := range lanes {
		l := &lanes[i]
		f := b.flow(l)
		q := f.queue
		if q.ranking != b.ranking {
			q.ranking, q.taken = b.ranking, false
			b.touched = append(b.touched, q)
			q.band.members.levelAt(&q.account, positive(l.QueueWeight), q.nodes, scale, now, b.config.Grace,
				b.ranking)
			b.turnTo(q, l.Algorithm)
		}
		q.taken = q.taken || l.Taken
		q.band.wake(l.HeadAge, now)
		q.members.levelAt(&f.account, positive(l.Weight), q.nodes, scale, now, b.config.Grace, b.ranking)
		b.lanes = append(b.lanes, f)
	}
}

// turnTo switches a queue's algorithm. Under fifo flows drift apart as they like; when the
// queue turns fair all start from the same level, as if they had just come.
func (b *Book) turnTo(q *queue, a Algorithm) {
	if q.algorithm == Fifo && a == Fair {
		for _, f := range b.flows {
			if f.queue == q {
				f.seen = time.Time{}
				q.members.floor = max(q.members.floor, f.virtual(q.nodes))
			}
		}
	}
	q.algorithm = a
}

// Charge books the estimated cost of the entries that one claim brought from a lane. Call it
// once a claim, before the next ranking.
func (b *Book) Charge(l Lane, estimate float64, now time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	f, estimate := b.flow(&l), sane(estimate)
	b.turns++
	f.charged(estimate, b.turns)
	f.queue.charged(estimate, b.turns)
	b.book(f, estimate, estimate, now)
}

// Extend books more service for an entry that has outlived its estimate, while it runs: call it
// before each report, so that a few long entries do not pass for short ones. These bookings are
// part of the estimate that Correct is given.
func (b *Book) Extend(l Lane, more float64, now time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	more = sane(more)
	b.book(b.flow(&l), more, more, now)
}

// Correct replaces an estimate by the actual cost of the entries, when they end.
func (b *Book) Correct(l Lane, estimate, actual float64, now time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	estimate, actual = sane(estimate), sane(actual)
	b.book(b.flow(&l), actual-estimate, -estimate, now)
}

func (b *Book) book(f *flow, cost, running float64, now time.Time) {
	q, scale := f.queue, b.scale(now)
	f.add(cost*scale, running, scale)
	q.add(cost*scale, running, scale)
	b.earn(q.band, cost, running, scale)
}

// sane keeps one wrong cost from spoiling the book for ever: 30,000 years are enough.
func sane(cost float64) float64 {
	if !(cost > 0) {
		return 0
	}
	return min(cost, 1e12)
}

// rebaseAt is the exponent at which the epoch moves; a float64 holds twice as much.
const rebaseAt = 500

// scale is what a cost of now is multiplied by.
func (b *Book) scale(now time.Time) float64 {
	if b.epoch.IsZero() {
		b.epoch = now
	}
	exponent := now.Sub(b.epoch).Seconds() / b.config.HalfLife.Seconds()
	if exponent < rebaseAt {
		return math.Exp2(exponent)
	}
	b.epoch = now
	b.rescale(math.Exp2(-exponent))
	return 1
}

func (b *Book) rescale(factor float64) {
	for _, f := range b.flows {
		f.rescale(factor)
	}
	for _, q := range b.queues {
		q.rescale(factor)
		q.members.floor *= factor
	}
	for _, x := range b.bands {
		x.members.floor *= factor
		x.peak *= factor
	}
}

func (b *Book) flow(l *Lane) *flow {
	key := l.key()
	if f := l.found; f != nil && f.book == b && f.key == key {
		return f
	}
	if f := b.flows[key]; f != nil {
		l.found = f
		return f
	}
	f := &flow{key: key, queue: b.queue(l.Queue, l.Priority), book: b}
	l.found = f
	f.weight, f.tie = 1, b.tie(key)
	b.flows[key] = f
	return f
}

func (b *Book) queue(id int32, priority int16) *queue {
	key := queueBand{id, priority}
	if q := b.queues[key]; q != nil {
		return q
	}
	q := &queue{key: key, band: b.band(priority), nodes: b.nodes}
	q.weight, q.tie = 1, b.tie(Key{Queue: id, Priority: priority, Whole: true})
	b.queues[key] = q
	return q
}

// tie hashes a key by FNV-1a and the node's seed.
func (b *Book) tie(key Key) uint64 {
	h := b.config.Seed ^ 0xcbf29ce484222325
	for _, x := range []byte(key.Flow) {
		h = (h ^ uint64(x)) * 0x100000001b3
	}
	return mix(mix(h^uint64(uint32(key.Queue))) ^ uint64(uint16(key.Priority)))
}

// positive bounds weights to what arithmetic can bear.
func positive(weight float64) float64 {
	if weight > 0 {
		return min(max(weight, 1e-6), 1e6)
	}
	return 1
}
