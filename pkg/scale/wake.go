package scale

import (
	"maps"
	"slices"
	"sync"
	"time"

	"github.com/penstock/penstock/internal/tokenbucket"
)

// wakeups holds the models that are to be decided before the next tick. Hints about queues and models come from other
// goroutines at any rate; they count for models that have no instance. A hint that comes while a pass is under way is
// kept until that pass has told which models these are: the pass may have read before what the hint is about.
type wakeups struct {
	wake chan struct{} // holds one: a model became due

	mu       sync.Mutex
	sleeping map[int32]string   // queues of models that have no instance, with these models
	zero     map[string][]int32 // these models, with their queues
	passing  bool               // a pass is under way, or none has ended yet
	queues   map[int32]bool     // of hints that came meanwhile; bounded by the number of queues
	models   map[string]bool
	due      map[string]bool
}

func newWakeups() *wakeups {
	return &wakeups{
		wake: make(chan struct{}, 1), passing: true, sleeping: map[int32]string{}, zero: map[string][]int32{},
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
	if _, sleeps := w.zero[name]; sleeps {
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
	case w.wake <- struct{}{}:
	default:
	}
}

// begin is called before a pass reads. The models that it decides are due no more.
func (w *wakeups) begin(models []string) {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.passing = true
	for _, m := range models {
		delete(w.due, m)
	}
}

// end is called when a pass has decided for models, with the ones of them that have no instance and their queues.
func (w *wakeups) end(models []string, zero map[string][]int32) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, m := range models {
		w.forget(m)
	}
	for m, queues := range zero {
		w.zero[m] = queues
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
		if _, sleeps := w.zero[m]; sleeps {
			w.add(m)
		}
	}
	w.passing = false
	clear(w.queues)
	clear(w.models)
}

func (w *wakeups) forget(model string) {
	for _, q := range w.zero[model] {
		if w.sleeping[q] == model {
			delete(w.sleeping, q)
		}
	}
	delete(w.zero, model)
}

// retain forgets all models but those that exist.
func (w *wakeups) retain(exists map[string]bool) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for m := range w.zero {
		if !exists[m] {
			w.forget(m)
		}
	}
	maps.DeleteFunc(w.due, func(m string, _ bool) bool { return !exists[m] })
}

// any says whether a model is due.
func (w *wakeups) any() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return len(w.due) > 0
}

// some returns models that are due, at most so many. They are due until a pass begins to decide for them.
func (w *wakeups) some(most int) []string {
	w.mu.Lock()
	defer w.mu.Unlock()
	models := slices.Sorted(maps.Keys(w.due))
	return models[:min(most, len(models))]
}

// Bounds of passes beside the tick: pushes and reports of backends may come at any rate. The first request of a
// model needs three: one makes its deployment, the report of its backend is followed by one that decides, and the
// next request may be of another model. Models that are due at once share a pass, so that none waits for longer than a
// pause.
const (
	wokenPause = 50 * time.Millisecond  // between two in the long run
	wholePause = 200 * time.Millisecond // the same for those that decide for all models, as under a budget
	wokenBurst = 5                      // pauses that may be left out
)

// pace spaces passes. Its zero value permits a burst.
type pace struct{ tokenbucket.Bucket }

// wokenRate is of passes whose pause is wokenPause: one with a longer pause counts as several.
var wokenRate = tokenbucket.Every(wokenPause, wokenBurst)

// left is how long the next pass has to wait.
func (p *pace) left(now time.Time) time.Duration { return p.Wait(now, wokenRate, 1) }

// spend counts a pass that is to be followed by a pause.
func (p *pace) spend(now time.Time, pause time.Duration) {
	p.Take(now, wokenRate, float64(pause)/float64(wokenPause))
}
