package tasknode

import (
	"cmp"
	"sync"
	"time"
)

// holdings knows how much of each queue and lane the node holds, how long its runs take and what they cost: by that it
// tells how many locks to claim ahead of the threads, and what a claim is charged.
type holdings struct {
	mu     sync.Mutex
	queues map[int32]*holding // by queue: one may leave the node and come back while locks of it are held
	lanes  map[laneKey]int    // locks of each lane; lanes with none are not in it
}

// holding is what the node holds and knows of a queue. The averages but one are of runs in which an entry was done:
// errors and refusals may come at once, and say nothing of the runs to come.
type holding struct {
	held   int           // locks, and places reserved for a claim under way
	run    time.Duration // of a run, moving average; 0 while unknown
	lock   time.Duration // of all that one lock covers, likewise
	anyRun time.Duration // of a run, however it ended, likewise: all that is known where runs only fail, or snooze
	// of a run, as entries count that declare no cost, and with the costs that they declare; moving averages, known
	// where run is
	use, cost float64
}

func newHoldings() *holdings {
	return &holdings{queues: map[int32]*holding{}, lanes: map[laneKey]int{}}
}

func (h *holdings) of(s *servedQueue) *holding {
	l := h.queues[s.id]
	if l == nil {
		l = &holding{}
		h.queues[s.id] = l
	}
	return l
}

// forget drops what is known of queues that are not served any more, once nothing of them is held.
func (h *holdings) forget(served map[int32]*servedQueue) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for id, l := range h.queues {
		if l.held == 0 && served[id] == nil {
			delete(h.queues, id)
		}
	}
}

// reserve takes up to want places under the queue's limit on this node, 0 for no limit, and returns how many.
func (h *holdings) reserve(s *servedQueue, limit, want int) int {
	h.mu.Lock()
	defer h.mu.Unlock()
	l := h.of(s)
	if limit > 0 {
		want = max(0, min(want, limit-l.held))
	}
	l.held += want
	return want
}

func (h *holdings) unreserve(s *servedQueue, n int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.of(s).held -= n
}

// hold counts n locks more of a lane, and says whether they are the only ones on this node.
func (h *holdings) hold(lane laneKey, n int) (only bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.lanes[lane] += n
	return h.lanes[lane] == n
}

// ended counts a lock less for the lane of each job.
func (h *holdings) ended(jobs []*job) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for _, j := range jobs {
		h.lanes[j.lane.key]--
		if h.lanes[j.lane.key] <= 0 {
			delete(h.lanes, j.lane.key)
		}
	}
}

// held is how many locks of a lane the node holds.
func (h *holdings) held(lane laneKey) int {
	h.mu.Lock()
	defer h.mu.Unlock()
	return h.lanes[lane]
}

// noteDone takes a run in which an entry was done into the averages: its length, its use and its cost. whole says that
// the run was all that its lock covered.
func (h *holdings) noteDone(s *servedQueue, d time.Duration, use, cost float64, whole bool) {
	h.mu.Lock()
	defer h.mu.Unlock()
	l := h.of(s)
	if l.run == 0 {
		l.use, l.cost = use, cost
	}
	l.use += (use - l.use) / 10
	l.cost += (cost - l.cost) / 10
	l.run = movingAverage(l.run, d)
	if whole {
		l.lock = movingAverage(l.lock, d)
	}
}

// noteLock takes into the average how long all took that a lock covered, where its entries ran one after another.
func (h *holdings) noteLock(s *servedQueue, d time.Duration) {
	h.mu.Lock()
	defer h.mu.Unlock()
	l := h.of(s)
	l.lock = movingAverage(l.lock, d)
}

// noteRun takes the length of a run into the average of all runs, however it ended.
func (h *holdings) noteRun(s *servedQueue, d time.Duration) {
	h.mu.Lock()
	defer h.mu.Unlock()
	l := h.of(s)
	l.anyRun = movingAverage(l.anyRun, d)
}

// movingAverage returns an average over the last ten or so, with one length more.
func movingAverage(average, d time.Duration) time.Duration {
	if average == 0 {
		average = d + 1
	}
	return average + (d-average)/10
}

// unknownUse is what a run is expected to use at least while none of its queue was done. With nothing its queue would
// get each thread that comes free, until its runs are charged for their time.
const unknownUse = 1

// expected is what a run of the queue's entries is expected to use, and to cost: what runs of late did, else what those
// did of the queues of which the node holds locks.
func (h *holdings) expected(s *servedQueue) (use, cost float64) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if l := h.of(s); l.run > 0 {
		return l.use, l.cost
	}
	locks := 0.0
	for _, l := range h.queues {
		if l.run > 0 {
			locks += float64(l.held)
			use, cost = use+float64(l.held)*l.use, cost+float64(l.held)*l.cost
		}
	}
	locks = max(1, locks)
	return max(unknownUse, use/locks), max(unknownUse, cost/locks)
}

// usedIn is what a run is expected to have used after d. A second uses what it did in runs that were done: the GPUs of
// an instance, the part of a batch that an entry has, or less where runs wait for slots; 1 while none was done. A
// charge that is not of time, such as one for each call, does not grow while a call hangs: more than twice the average
// is expected only where d is more.
func (h *holdings) usedIn(s *servedQueue, d time.Duration) float64 {
	h.mu.Lock()
	defer h.mu.Unlock()
	l := h.of(s)
	if l.run == 0 {
		return d.Seconds()
	}
	return min(d.Seconds()/l.run.Seconds()*l.use, max(d.Seconds(), 2*l.use))
}

// noteWait takes into account that a lock has waited for a thread for so long: the average by which it was claimed
// ahead of the threads was too short.
func (h *holdings) noteWait(s *servedQueue, d time.Duration) {
	h.mu.Lock()
	defer h.mu.Unlock()
	l := h.of(s)
	l.lock = max(l.lock, d)
}

// aheadTime is how much work may wait on a node for its threads.
const aheadTime = 20 * time.Millisecond

// ahead is how many locks of the queue may wait on this node beside those that run: as much as takes all
// threads aheadTime, so that short runs do not leave threads idle for the time of a claim, and long ones are
// left for other nodes.
func (h *holdings) ahead(s *servedQueue, threads int) int {
	const most = 2000
	h.mu.Lock()
	defer h.mu.Unlock()
	l := h.of(s)
	if l.lock == 0 {
		return 0
	}
	return int(min(most, float64(threads)*float64(aheadTime)/float64(l.lock)))
}

// fits says that a lock may be claimed although all permits are in use: it would be the only one of its lane
// here, so that a thread will take it after its present run, and that is soon. The claim has reserved that
// many places of its queue.
func (h *holdings) fits(l *laneLease, reserved, threads int) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.lanes[l.lane.key] > 0 {
		return false
	}
	var locks, runs time.Duration
	for id, q := range h.queues {
		held := q.held
		if id == l.served.id {
			held -= reserved
		}
		run := cmp.Or(q.run, q.anyRun) // a lock too many is the most that comes of one that is long for once
		if held > 0 && run == 0 {
			return false // it may be long
		}
		locks, runs = locks+time.Duration(held), runs+time.Duration(held)*run
	}
	return runs <= aheadTime*locks*time.Duration(threads)
}
