package scale

import (
	"maps"
	"slices"
	"sync"
	"time"
)

// wakeups holds the models that are to be decided before the next tick. Hints about queues and models come from other
// goroutines at any rate; they count for models that have no instance. A hint that comes while a pass is under way is
// kept until that pass has told which models these are: the pass may have read before what the hint is about.
type wakeups struct {
	some chan struct{} // holds one: there are due models

	mu       sync.Mutex
	sleeping map[int32]string // queues of models that have no instance, with these models
	zero     map[string]bool  // these models
	passing  bool             // a pass over some models is under way
	all      bool             // a pass over all is under way, or none has ended yet
	queues   map[int32]bool   // of hints that came meanwhile; bounded by the number of queues
	models   map[string]bool
	due      map[string]bool
}

func newWakeups() *wakeups {
	return &wakeups{
		some: make(chan struct{}, 1), all: true,
		queues: map[int32]bool{}, models: map[string]bool{}, due: map[string]bool{},
	}
}

// queue is a hint about a queue.
func (w *wakeups) queue(id int32) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if model, sleeps := w.sleeping[id]; sleeps {
		w.add(model)
	} else if w.passing || w.all {
		w.queues[id] = true
	}
}

// model is a hint about a model.
func (w *wakeups) model(name string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.zero[name] {
		w.add(name)
	} else if w.passing || w.all {
		w.models[name] = true
	}
}

// now has a model decided, whatever instances it has.
func (w *wakeups) now(model string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.add(model)
}

func (w *wakeups) add(model string) {
	w.due[model] = true
	w.signal()
}

// signal says that there are due models.
func (w *wakeups) signal() {
	select {
	case w.some <- struct{}{}:
	default:
	}
}

// begin is called before a pass reads. The models that it decides are due no more: all, or those that it names.
func (w *wakeups) begin(models []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if models == nil {
		w.all = true
		clear(w.due)
		return
	}
	w.passing = true
	for _, m := range models {
		delete(w.due, m)
	}
}

// beginBeside is begin of a pass over all beside which the models that are due are decided: it leaves them due, unless
// there are so many that this pass is the one that decides for them.
func (w *wakeups) beginBeside() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.all = true
	if len(w.due) > wokenMax {
		clear(w.due)
	}
	if len(w.due) > 0 {
		w.signal()
	}
}

// end is called when a pass has decided for the models that it names, with the ones of them that have no instance and
// their queues. It may have run beside a pass over all.
func (w *wakeups) end(models []string, zero map[string][]int32) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.zero == nil {
		w.sleeping, w.zero = map[int32]string{}, map[string]bool{}
	}
	for _, m := range models {
		delete(w.zero, m)
		maps.DeleteFunc(w.sleeping, func(_ int32, of string) bool { return of == m })
	}
	w.passing = false
	w.learn(zero)
}

// endAll is end of a pass over all. What is known of the models but is newer than what it read.
func (w *wakeups) endAll(zero map[string][]int32, but map[string]bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	sleeping, before := w.sleeping, w.zero
	w.sleeping, w.zero = map[int32]string{}, map[string]bool{}
	for m := range but {
		if before[m] {
			w.zero[m] = true
		}
	}
	for q, m := range sleeping {
		if but[m] {
			w.sleeping[q] = m
		}
	}
	maps.DeleteFunc(zero, func(m string, _ []int32) bool { return but[m] })
	w.all = false
	w.learn(zero)
}

// learn takes in which models have no instance. Hints that were kept for them make them due.
func (w *wakeups) learn(zero map[string][]int32) {
	for m, queues := range zero {
		w.zero[m] = true
		for _, q := range queues {
			w.sleeping[q] = m
		}
	}
	for q := range w.queues {
		if m, sleeps := w.sleeping[q]; sleeps {
			delete(w.queues, q)
			w.add(m)
		}
	}
	for m := range w.models {
		if w.zero[m] {
			delete(w.models, m)
			w.add(m)
		}
	}
	if !w.passing && !w.all {
		clear(w.queues)
		clear(w.models)
	}
}

// wokenMax is how many models are read one by one. More of them are decided in a pass over all.
const wokenMax = 4

// take returns the models that are due, nil where a pass over all is to decide for them. There may be none: one that
// was due was decided by a tick.
func (w *wakeups) take() (models []string, some bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.due) > wokenMax {
		return nil, true
	}
	return slices.Sorted(maps.Keys(w.due)), len(w.due) > 0
}

// Bounds of passes beside the tick: pushes and reports of backends may come at any rate. The first request of a
// model needs three: one makes its deployment, the report of its backend is followed by one that decides, and the
// next request may be of another model.
const (
	wokenPause = 200 * time.Millisecond // between two in the long run
	wokenBurst = 5                      // at once
)

// pace spaces passes by the generic cell rate algorithm of ATM. Its zero value permits a burst.
type pace struct {
	full time.Time // when a burst is permitted again
}

// passes says whether the next pass need not wait, and counts it then.
func (p *pace) passes(now time.Time) bool {
	if p.full.Sub(now) > (wokenBurst-1)*wokenPause {
		return false
	}
	p.wait(now)
	return true
}

// wait is how long the next pass has to wait; it counts that pass.
func (p *pace) wait(now time.Time) time.Duration {
	left := max(0, p.full.Sub(now))
	p.full = now.Add(left + wokenPause)
	return max(0, left-(wokenBurst-1)*wokenPause)
}
