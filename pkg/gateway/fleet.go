package gateway

import (
	"maps"
	"slices"
	"time"

	"github.com/penstock/penstock/pkg/slot"
	"github.com/penstock/penstock/pkg/worker"
)

// fleet is the instances of one model as the pool sees them, with the slots that this gateway holds.
type fleet struct {
	instances []*instance // by id
	affinity  *affinity
	until     time.Time // no slot is used from then on before it is known to be held still; zero: no such limit
}

// instance is one server that runs the model.
type instance struct {
	id       int32
	server   string
	address  string
	gpus     int
	usable   bool
	limit    limiter
	slots    slot.Ledger[struct{}] // those held here
	inFlight int                   // calls, those among them whose slots were lost meanwhile
	backoff  worker.Backoff        // after a call that the worker had no room for, and while it fails
	faults   int                   // calls that failed at once since one succeeded
	failing  bool                  // it gets one call a second at most
	queued   float64               // estimated slot-ms of what is in flight
	rate     float64               // tokens a second that it generated of late, over all calls
	kv       float64               // used part of the KV cache, at kvAt
	kvAt     time.Time
	adapters map[string]time.Time // LoRA adapters, and when each was used last
}

// room is how many more calls the instance may get now.
func (i *instance) room(now time.Time) int {
	if !i.usable || i.backoff.Active(now) {
		return 0
	}
	return min(i.slots.Idle(), i.limit.value()-i.inFlight)
}

// headroom is how many more slots of the instance could be used now if they were held.
func (i *instance) headroom(now time.Time) int {
	if !i.usable || i.backoff.Active(now) {
		return 0
	}
	return max(0, i.limit.value()-i.slots.Held())
}

// ceiling is how many calls may be in flight to the instance from here.
func (i *instance) ceiling() int {
	if !i.usable {
		return 0
	}
	return min(i.slots.Held(), i.limit.value())
}

func (f *fleet) find(id int32) *instance {
	at, found := slices.BinarySearchFunc(f.instances, id, func(i *instance,
		id int32,
	) int {
		return int(i.id) - int(id)
	})
	if !found {
		return nil
	}
	return f.instances[at]
}

// set replaces the list of instances. Those that stay keep their slots, limits and readings. Those that are gone are
// dropped with their slots, but not before these are idle: the slots of an instance that comes back are granted again.
func (f *fleet) set(now time.Time, list []InstanceState) {
	next := make([]*instance, 0, len(list))
	for _, s := range list {
		i := f.find(s.ID)
		if i == nil {
			i = &instance{id: s.ID, limit: newLimiter(s.Slots, now), adapters: map[string]time.Time{}}
		}
		if s.Usable && !i.usable {
			i.clear()
		}
		i.server, i.address, i.usable, i.gpus = s.Server, s.Address, s.Usable, max(s.GPUs, 1)
		i.limit.resize(s.Slots)
		maps.DeleteFunc(i.adapters, func(_ string, used time.Time) bool { return now.Sub(used) >= adapterKept })
		next = append(next, i)
	}
	for _, i := range f.instances {
		if i.slots.Busy() > 0 && !slices.Contains(next, i) {
			i.usable = false
			next = append(next, i)
		}
	}
	slices.SortFunc(next, func(a, b *instance) int { return int(a.id) - int(b.id) })
	f.instances = next
	if len(next) == 0 { // where requests went says nothing of other instances, and the model may be gone for good
		f.affinity.clear()
	}
	if !f.sound(nil) {
		for _, i := range next {
			i.clear()
		}
	}
}

// InstanceState is an instance as the registry knows it.
type InstanceState struct {
	ID      int32
	Server  string
	Address string // URL
	Slots   int
	GPUs    int  // that it works with; 0 is taken as 1
	Usable  bool // calls may be sent to it

	// Readings of the last probe, with the time when they were taken, which identifies the probe; nil where the worker
	// does not say.
	At     time.Time
	Queued *int
	KV     *float64
	probed time.Time // At by the clock of the database
}

// ceiling is the sum over the instances.
func (f *fleet) ceiling() (sum int) {
	for _, i := range f.instances {
		sum += i.ceiling()
	}
	return sum
}

func (f *fleet) usable() (n int) {
	for _, i := range f.instances {
		if i.usable {
			n++
		}
	}
	return n
}

// held and idle count slots.
func (f *fleet) held() (held, idle int) {
	for _, i := range f.instances {
		held += i.slots.Held()
		idle += i.slots.Idle()
	}
	return held, idle
}

// slots lists the slots.
func (f *fleet) slots() (all []slot.Held) {
	for _, i := range f.instances {
		for s := range i.slots.All() {
			all = append(all, s.Held)
		}
	}
	return all
}

// add takes a slot in, idle. It is false, and nothing changes, if the instance is not known here, or has the number
// under that token or a later one.
func (f *fleet) add(s slot.Held) bool {
	i := f.find(s.Instance)
	return i != nil && i.slots.Add(s) != nil
}

// drop takes a slot out of the fleet: it was lost, given back or is in doubt. A call on it goes on, and
// its end frees nothing.
func (f *fleet) drop(s slot.Held) {
	if i := f.find(s.Instance); i != nil {
		i.slots.Drop(i.slots.Find(s))
	}
}

// busyTokens returns the tokens of the slots that are busy.
func (f *fleet) busyTokens() (tokens []int64) {
	for _, i := range f.instances {
		for s := range i.slots.All() {
			if s.Busy() {
				tokens = append(tokens, s.Token)
			}
		}
	}
	return tokens
}

// leasedSlot is a slot in the ledger of its instance, or one that was.
type leasedSlot = slot.Leased[struct{}]

// begin begins a call on an idle slot of the instance.
func (i *instance) begin(estimate float64) *leasedSlot {
	s := i.slots.Last()
	i.slots.Occupy(s)
	i.inFlight++
	i.queued += estimate
	return s
}

// end ends a call. Its slot is ended apart from it.
func (i *instance) end(estimate float64) {
	i.inFlight--
	i.queued = max(0, i.queued-estimate)
}
