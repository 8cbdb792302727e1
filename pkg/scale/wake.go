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
	passing  bool             // a pass is under way, or none has ended yet
	queues   map[int32]bool   // of hints that came meanwhile; bounded by the number of queues
	models   map[string]bool
	due      map[string]bool
}

func newWakeups() *wakeups {
	return &wakeups{
		some: make(chan struct{}, 1), passing: true,
		queues: map[int32]bool{}, models: map[string]bool{}, due: map[string]bool{},
	}
}

// queue is a hint about a queue.
func (w *wakeups) queue(id int32) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if model, sleeps := w.sleeping[id]; sleeps {
		w.add(model)
	} else if w.passing {
		w.queues[id] = true
	}
}

// model is a hint about a model.
func (w *wakeups) model(name string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.zero[name] {
		w.add(name)
	} else if w.passing {
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
	select {
	case w.some <- struct{}{}:
	default:
	}
}

// begin is called before a pass reads. The models that it decides are due no more: all, or those that it names.
func (w *wakeups) begin(models []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.passing = true
	if models == nil {
		clear(w.due)
	}
	for _, m := range models {
		delete(w.due, m)
	}
}

// end is called when a pass has decided for all models, or for those that it names, with the ones of them that have no
// instance and their queues.
func (w *wakeups) end(models []string, zero map[string][]int32) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if models == nil || w.zero == nil {
		w.sleeping, w.zero = map[int32]string{}, map[string]bool{}
	}
	for _, m := range models {
		delete(w.zero, m)
		maps.DeleteFunc(w.sleeping, func(_ int32, of string) bool { return of == m })
	}
	for m, queues := range zero {
		w.zero[m] = true
		for _, q := range queues {
			w.sleeping[q] = m
		}
	}
	for q := range w.queues {
		if m, sleeps := w.sleeping[q]; sleeps {
			w.add(m)
		}
	}
	for m := range w.models {
		if w.zero[m] {
			w.add(m)
		}
	}
	w.passing = false
	clear(w.queues)
	clear(w.models)
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

// wait is how long the next pass has to wait; it counts that pass.
func (p *pace) wait(now time.Time) time.Duration {
	left := max(0, p.full.Sub(now))
	p.full = now.Add(left + wokenPause)
	return max(0, left-(wokenBurst-1)*wokenPause)
}
