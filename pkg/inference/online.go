package inference

import (
	"time"

	"github.com/penstock/penstock/pkg/worker"
)

// Models returns every model that is registered and valid, by name.
func (r *Registry) Models() map[string]worker.Model { return r.current.Load().models }

// ModelQueue returns the queue of a model's entries, empty if there is none.
func (r *Registry) ModelQueue(model string) string {
	first := ""
	for queue, of := range r.current.Load().queues {
		if of.model == model && (first == "" || queue < first) {
			first = queue
		}
	}
	return first
}

// OnChange has fn called after each change of models or instances. Call it before Run.
func (r *Registry) OnChange(fn func()) { r.onChange(fn) }

// Usable says whether calls may be sent to the instance.
func (e *Endpoint) Usable(now time.Time) bool { return e.usable(now) }
