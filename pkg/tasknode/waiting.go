package tasknode

import (
	"slices"
	"sync"
	"time"
)

// waiting is the line of jobs that no thread has taken yet. The first lock of a lane of which the node held
// none is urgent: threads take an urgent job and one of the others in turn, so that neither kind waits for as
// long as there are others. While every processing thread runs a job, the spare thread takes urgent ones.
type waiting struct {
	mu      sync.Mutex
	arrived *sync.Cond // for processing threads: there is a job, or no more will come
	spare   *sync.Cond // for the spare thread: an urgent job has no thread, or no more will come
	urgent  line
	others  line
	// urgentLanes are the lanes whose first lock is among the urgent jobs
	urgentLanes map[*lane]bool
	threads     int
	running     int  // threads that run a job; the spare one is not counted
	sparing     bool // the spare thread runs a job, or there is none: a node of one thread has none
	turn        bool // of the others
	closed      bool
}

// line is a queue of jobs, first in, first out.
type line struct {
	jobs []*job
	head int
}

func (l *line) len() int { return len(l.jobs) - l.head }

func (l *line) push(j *job) { l.jobs = append(l.jobs, j) }

func (l *line) pop() *job {
	j := l.jobs[l.head]
	l.jobs[l.head] = nil
	l.head++
	if 2*l.head >= len(l.jobs) { // half of it is free: move the rest to the front
		n := copy(l.jobs, l.jobs[l.head:])
		clear(l.jobs[n:])
		l.jobs, l.head = l.jobs[:n], 0
	}
	return j
}

func (l *line) first() *job { return l.jobs[l.head] }

// popOf takes the job of a lane out of the line, which has one.
func (l *line) popOf(of *lane) *job {
	i := l.head
	for l.jobs[i].lane != of {
		i++
	}
	j := l.jobs[i]
	l.jobs = slices.Delete(l.jobs, i, i+1)
	return j
}

// cut takes the jobs behind the first ones, of which so many stay, out of the line, if the next one has been here
// since before some time.
func (l *line) cut(stay int, before time.Time) []*job {
	from := l.head + stay
	if from >= len(l.jobs) || !l.jobs[from].since.Before(before) {
		return nil
	}
	jobs := slices.Clone(l.jobs[from:])
	clear(l.jobs[from:])
	l.jobs = l.jobs[:from]
	return jobs
}

func newWaiting(threads int) *waiting {
	w := &waiting{threads: threads, sparing: threads == 1, urgentLanes: map[*lane]bool{}}
	w.arrived, w.spare = sync.NewCond(&w.mu), sync.NewCond(&w.mu)
	return w
}

func (w *waiting) grow(more int) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.threads += more
}

// add puts jobs into the line.
func (w *waiting) add(urgent bool, jobs ...*job) {
	if len(jobs) == 0 {
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	to := &w.others
	if urgent {
		to = &w.urgent
	}
	for _, j := range jobs {
		to.push(j)
		if urgent {
			w.urgentLanes[j.lane] = true
		}
		w.arrived.Signal()
	}
	w.callSpare()
}

// callSpare wakes the spare thread if an urgent job has no other one.
func (w *waiting) callSpare() {
	if w.urgent.len() > 0 && w.running == w.threads {
		w.spare.Signal()
	}
}

// next waits for a job for a processing thread; done must follow. It returns nil when no more will come.
func (w *waiting) next() *job {
	w.mu.Lock()
	defer w.mu.Unlock()
	for w.urgent.len()+w.others.len() == 0 {
		if w.closed {
			return nil
		}
		w.arrived.Wait()
	}
	w.running++
	defer w.callSpare()
	if w.urgent.len() > 0 && (!w.turn || w.others.len() == 0) {
		w.turn = true
		return w.popUrgent()
	}
	w.turn = false
	if l := w.others.first().lane; w.urgentLanes[l] { // the lane's first lock goes before its second
		delete(w.urgentLanes, l)
		return w.urgent.popOf(l)
	}
	return w.others.pop()
}

func (w *waiting) popUrgent() *job {
	j := w.urgent.pop()
	delete(w.urgentLanes, j.lane)
	return j
}

func (w *waiting) done() {
	w.mu.Lock()
	w.running--
	w.mu.Unlock()
}

// nextSpare waits for a job for the spare thread. It returns nil when no more will come: the other threads
// take what is left.
func (w *waiting) nextSpare() *job {
	w.mu.Lock()
	defer w.mu.Unlock()
	for w.urgent.len() == 0 || w.running < w.threads {
		if w.closed {
			return nil
		}
		w.spare.Wait()
	}
	w.sparing = true
	return w.popUrgent()
}

func (w *waiting) doneSpare() {
	w.mu.Lock()
	w.sparing = false
	w.mu.Unlock()
}

// urgentWaits says that an urgent job waits for a run to end.
func (w *waiting) urgentWaits() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.urgent.len() > 0 && w.sparing && w.running == w.threads
}

// late takes the jobs that have been here since before some time out of the line, with those behind them. As many as
// there are threads stay, urgent ones before others.
func (w *waiting) late(before time.Time) []*job {
	w.mu.Lock()
	defer w.mu.Unlock()
	stay := min(w.urgent.len(), w.threads)
	jobs := w.urgent.cut(stay, before)
	for _, j := range jobs {
		delete(w.urgentLanes, j.lane)
	}
	return append(jobs, w.others.cut(w.threads-stay, before)...)
}

// close says that no more jobs will come.
func (w *waiting) close() {
	w.mu.Lock()
	w.closed = true
	w.mu.Unlock()
	w.arrived.Broadcast()
	w.spare.Broadcast()
}

func (w *waiting) len() int {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.urgent.len() + w.others.len()
}
