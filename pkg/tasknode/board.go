package tasknode

import (
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
)

// board is what the scheduling threads know about lanes: which may have work, and where in line to begin.
type board struct {
	mu     sync.Mutex
	queues map[int32]*service
	lanes  map[flowKey]*lane
	active []*lane // those that have work, in no order
	freed  int64   // counts whenever something came free that a claim may need
	top    int64   // the last place in line that any look or claim has met
	// of the last ranking, kept so that the next one need not make them
	ranked     []*lane
	candidates []*invalidation.Candidate
	chosen     []int
}

type flowKey struct {
	queue int32
	lane  invalidation.Lane
}

// service is a queue that the node serves.
type service struct {
	name    string
	queue   *invalidation.Queue
	handler invalidation.Handler
	run     time.Duration // of an entry, moving average; 0 while unknown
	lock    time.Duration // of all that one lock covers, likewise
	held    int           // locks of the queue on this node
	last    invalidation.Lane
	seen    bool // last has a lane in it
	heardAt time.Time
	again   time.Time // when to try its lanes again, since what they share left no room
	refused int64     // what freed was then
}

// rememberMax is how many lanes a board remembers, beside those that have work.
const rememberMax = 20_000

func newBoard() *board {
	return &board{queues: map[int32]*service{}, lanes: map[flowKey]*lane{}, freed: 1}
}

// serve replaces the queues that the node serves, and says whether they are others than before.
func (b *board) serve(services map[int32]*service) (changed bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	changed = len(services) != len(b.queues)
	for id, s := range services {
		if old := b.queues[id]; old != nil {
			old.queue, old.handler = s.queue, s.handler
			services[id] = old
		} else {
			changed = true
		}
	}
	b.queues = services
	maps.DeleteFunc(b.lanes, func(k flowKey, l *lane) bool {
		gone := services[k.queue] == nil
		if gone {
			b.sleep(l)
		}
		return gone
	})
	return changed
}

// served lists the queues from which the node may claim at all.
func (b *board) served() []int32 {
	b.mu.Lock()
	defer b.mu.Unlock()
	return slices.Sorted(maps.Keys(b.queues))
}

// hint says that a queue has new entries, in a lane that the hint names; else its lane that was served last is worth
// a try.
func (b *board) hint(queue int32, named *invalidation.Lane) {
	b.mu.Lock()
	defer b.mu.Unlock()
	s := b.queues[queue]
	if s == nil {
		return
	}
	s.heardAt = time.Now()
	if named == nil && !s.seen {
		return
	}
	key := flowKey{queue, s.last}
	if named != nil {
		key.lane = *named
	}
	if b.lanes[key] == nil && named == nil {
		return
	}
	l := b.lane(key)
	b.wake(l)
	l.hinted, l.heard = true, true
}

// lane returns a lane, and makes it where it is not known. It comes after all that is.
func (b *board) lane(key flowKey) *lane {
	l := b.lanes[key]
	if l == nil {
		b.forget()
		l = &lane{key: key, headAt: time.Now()}
		l.Lane = key.lane
		l.moved(b.top + 1)
		b.lanes[key] = l
	}
	return l
}

// found records which lanes of a queue have ready rows.
func (b *board) found(queue int32, heads []invalidation.LaneHead) {
	b.mu.Lock()
	defer b.mu.Unlock()
	s := b.queues[queue]
	if s == nil { // not any more: that changed during the look
		return
	}
	for _, h := range heads {
		l := b.at(queue, h)
		l.hinted = time.Since(s.heardAt) < time.Second
	}
	b.forget()
}

// forget drops lanes without work where there are very many: flows may come once and never again.
func (b *board) forget() {
	if len(b.lanes) > rememberMax {
		maps.DeleteFunc(b.lanes, func(_ flowKey, l *lane) bool { return l.active == 0 && !l.claiming && l.held == 0 })
	}
}

// again records where a key stands in line once more that a thread of this node had.
func (b *board) again(queue int32, head invalidation.LaneHead) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.queues[queue] != nil {
		b.at(queue, head).heard = true
	}
}

// at notes that a ready row stands in a lane.
func (b *board) at(queue int32, h invalidation.LaneHead) *lane {
	key := flowKey{queue, h.Lane}
	l := b.lanes[key]
	if l == nil {
		l = &lane{key: key, mark: h.Position, headAt: time.Now()}
		l.Lane = h.Lane
		b.lanes[key] = l
	}
	// A row before the mark came late, or came back.
	l.mark, l.stuck = min(l.mark, h.Position), min(l.stuck, h.Position)
	b.wake(l)
	l.moved(h.Position)
	b.top = max(b.top, h.Position)
	return l
}

// wake notes that there may be work.
func (b *board) wake(l *lane) {
	if l.active == 0 && b.lanes[l.key] == l {
		b.active = append(b.active, l)
		l.active, l.Since = len(b.active), time.Now()
	}
}

// sleep notes that there is no work.
func (b *board) sleep(l *lane) {
	if l.active == 0 {
		return
	}
	last := len(b.active) - 1
	b.active[l.active-1], b.active[last].active = b.active[last], l.active
	b.active[last], b.active = nil, b.active[:last]
	l.active = 0
}

// open says that a flow of a queue may be claimed from: neither is paused, and the queue is neither disabled nor at its
// limit on this node, nor does it rest.
func (s *service) open(flow string, now time.Time, freed int64) bool {
	c := &s.queue.Config
	if now.Before(s.again) && s.refused == freed || c.Disabled != nil || (c.MaxConcurrentPerNode > 0 && s.held >= c.MaxConcurrentPerNode) {
		return false
	}
	_, held := s.queue.Paused(flow, now)
	return !held
}

// visit is a scheduling thread's claim of a lane. While it lasts no other thread of the node is in the lane.
type visit struct {
	*service
	queue    *invalidation.Queue // as it was when the visit began, as is the handler
	handler  invalidation.Handler
	lane     *lane
	ranked   invalidation.Candidate // the lane as it was ranked
	from     int64
	fromHead bool
	mark     int64 // of the lane when the visit began
	freed    int64 // what freed was when the visit began: what comes free during it must not be missed
}

// take picks the lane that the ranker puts first among those with work, and up to most-1 that come next, to be claimed
// along. It returns nil if there is none, or none that should go before one that a thread of this node is in.
func (b *board) take(rank Ranker, affinity Affinity, idle bool, most int, now time.Time) []*visit {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.candidates, b.ranked = b.candidates[:0], b.ranked[:0]
	over := b.passOver(affinity, now)
	for _, l := range b.active {
		s := b.queues[l.key.queue]
		l.Busy = l.claiming || l.elsewhere(now)
		if over[l] || (!l.Busy && l.resting(now, b.freed)) || !s.open(l.key.lane.Flow, now, b.freed) {
			continue
		}
		l.Queue = s.queue
		b.candidates, b.ranked = append(b.candidates, &l.Candidate), append(b.ranked, l)
	}
	b.chosen = rank.Next(b.chosen[:0], b.candidates, most, idle)
	visits := make([]*visit, 0, len(b.chosen))
	for n, i := range b.chosen {
		l := b.ranked[i]
		if n > 0 && (l.large || visits[0].lane.large) {
			break // it would leave nothing to the next; they are for other threads
		}
		visits = append(visits, b.visit(l, now))
	}
	return visits
}

// visit begins a visit.
func (b *board) visit(l *lane, now time.Time) *visit {
	l.claiming, l.heard = true, false
	s := b.queues[l.key.queue]
	s.last, s.seen = l.key.lane, true
	v := &visit{service: s, queue: s.queue, handler: s.handler, lane: l, ranked: l.Candidate, from: max(l.stuck, l.mark-late), mark: l.mark, freed: b.freed}
	if now.Sub(l.headAt) > l.headEvery() {
		v.from, v.fromHead = 0, true
	}
	return v
}

// advance moves the lane's mark behind what a claim has met; missed says that it left rows which lead somewhere.
func (b *board) advance(v *visit, c invalidation.Claimed, missed bool, took time.Duration) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if v.fromHead {
		v.lane.headAt, v.lane.headCost = time.Now(), took
	}
	if missed && (v.lane.behind == 0 || v.from < v.lane.behind) {
		v.lane.behind = max(1, v.from)
	}
	if len(c.Locks) > 0 {
		v.lane.met = 0
	}
	if c.Scanned == 0 || len(c.Locks) > 0 {
		v.lane.passed = time.Time{}
	}
	switch {
	case c.Scanned == 0, v.lane.mark < v.mark: // a row stands before it since
	case len(c.Locks) == 0:
		// What is left there (a key whose row somebody holds) is met again when the lane is scanned from its head.
		v.lane.mark, v.lane.stuck = c.LowWater+1, c.LowWater+1
	default:
		v.lane.mark = c.LowWater
	}
	b.top = max(b.top, c.LowWater)
	if c.Drained || c.LowWater >= v.from { // else keys were met by a claim that leaves them to another
		v.lane.large = !c.Drained
	}
	if c.Drained {
		v.lane.moved(b.top + 1) // it is empty: what comes now comes after all that is known
	} else {
		v.lane.moved(c.LowWater + 1)
	}
}

// leave ends a visit; work says whether it is worth coming back, again from when on. So it is if a hint came during the
// visit, which may be about what the claim could not see yet.
func (b *board) leave(v *visit, work bool, again time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.end(v, work || v.lane.heard)
	v.lane.again, v.lane.refused = again, 0
}

func (b *board) end(v *visit, work bool) {
	v.lane.claiming = false
	if work {
		b.wake(v.lane)
	} else {
		b.sleep(v.lane)
	}
}

// few is how many rows a lane without hints must bring at once to be tried again when it is empty.
const few = 10

// more says whether a lane is worth another claim. If the last one emptied it, what comes later is hinted at, as what
// came before was, or found by the next look. Where no hints come, and much comes, the next claim finds out.
func (b *board) more(v *visit, c invalidation.Claimed) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	return c.Scanned > 0 && (!c.Drained || (!v.lane.hinted && c.Scanned >= few))
}

// met notes that somebody else was in the lane, and returns for how long to leave it to them: 2 to 64 ms.
func (b *board) met(v *visit) time.Duration {
	b.mu.Lock()
	defer b.mu.Unlock()
	return v.lane.meet()
}

// goBack lets a visit that came to the end of a lane begin anew at the first row that was left. It returns after how long
// to try, 0 if there is no such row: somebody had it, or its key, for a moment.
func (b *board) goBack(v *visit) time.Duration {
	b.mu.Lock()
	defer b.mu.Unlock()
	l := v.lane
	if l.behind == 0 {
		l.met = 0
		return 0
	}
	l.mark, l.stuck, l.behind = min(l.mark, l.behind), min(l.stuck, l.behind), 0
	return l.meet()
}

// busy is how many lanes have work.
func (b *board) busy() int {
	b.mu.Lock()
	defer b.mu.Unlock()
	return len(b.active)
}

// rested is how long until the first of the lanes that rest may be tried; an hour if none does.
func (b *board) rested(now time.Time) time.Duration {
	b.mu.Lock()
	defer b.mu.Unlock()
	first := time.Hour
	for _, l := range b.active {
		rest := l.again.Sub(now)
		if s := b.queues[l.key.queue]; s.refused == b.freed {
			rest = max(rest, s.again.Sub(now))
		}
		if !l.claiming && rest > 0 {
			first = min(first, rest)
		}
	}
	return first
}

// refuse ends a visit for which there was no permit or no leave. The lane is tried again when something came free.
func (b *board) refuse(v *visit, again time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.end(v, true)
	v.lane.again, v.lane.refused = again, v.freed
}

// refuseQueue notes that all lanes of the queue of a visit would be refused as well.
func (b *board) refuseQueue(v *visit, again time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	s := v.service
	s.again, s.refused = again, v.freed
}

// free notes that something came free that a claim may need.
func (b *board) free() {
	b.mu.Lock()
	b.freed++
	b.mu.Unlock()
}

// reserve counts up to want locks of the queue as held by this node, as its own limit allows, and returns how many.
func (b *board) reserve(s *service, want int) int {
	b.mu.Lock()
	defer b.mu.Unlock()
	if limit := s.queue.Config.MaxConcurrentPerNode; limit > 0 {
		want = max(0, min(want, limit-s.held))
	}
	s.held += want
	return want
}

// unhold counts n locks less.
func (b *board) unhold(s *service, n int) {
	b.mu.Lock()
	defer b.mu.Unlock()
	s.held -= n
}

// hold counts n locks more of a lane, and says whether they are the only ones on this node.
func (b *board) hold(l *lane, n int) (first bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	l.held += n
	return l.held == n
}

// ended counts a lock less for each of the assignments. A queue that left and came back has another service than before.
func (b *board) ended(jobs []*assignment) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for _, job := range jobs {
		job.home.held--
		job.service.held--
	}
}

// ran takes the length of a run into the average, which follows the last ten or so; alone says that it was all that its
// lock covered.
func (b *board) ran(s *service, d time.Duration, alone bool) {
	b.mu.Lock()
	defer b.mu.Unlock()
	s.run = follow(s.run, d)
	if alone {
		s.lock = follow(s.lock, d)
	}
}

// took does the same for all that a lock of several entries covered.
func (b *board) took(s *service, d time.Duration) {
	b.mu.Lock()
	defer b.mu.Unlock()
	s.lock = follow(s.lock, d)
}

func follow(average, d time.Duration) time.Duration {
	if average == 0 {
		average = d + 1
	}
	return average + (d-average)/10
}

// estimate is how long a run of the queue's entries is expected to take.
func (b *board) estimate(s *service) time.Duration {
	b.mu.Lock()
	defer b.mu.Unlock()
	return s.run
}

// ahead is how much work may wait on a node for its threads.
const ahead = 20 * time.Millisecond

// spare is how many locks of the queue may wait on this node beside those that run: as much as lies ahead for all threads,
// so that short runs do not leave threads idle for the time of a claim, and long ones are left for other nodes.
func (b *board) spare(s *service, threads int) int {
	const most = 2000
	b.mu.Lock()
	defer b.mu.Unlock()
	if s.lock == 0 {
		return 0
	}
	return int(min(most, float64(threads)*float64(ahead)/float64(s.lock)))
}

// fits says that a lock may be claimed although all permits are in use: it would be the only one of its lane here, so that
// a thread will take it after its present run, and that is soon. The visit has reserved that many locks of its queue.
func (b *board) fits(v *visit, reserved, threads int) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	if v.lane.held > 0 {
		return false
	}
	var locks, runs time.Duration
	for _, s := range b.queues {
		held := s.held
		if s == v.service {
			held -= reserved
		}
		if held > 0 && s.run == 0 {
			return false // it may be long
		}
		locks, runs = locks+time.Duration(held), runs+time.Duration(held)*s.run
	}
	return runs <= ahead*locks*time.Duration(threads)
}
