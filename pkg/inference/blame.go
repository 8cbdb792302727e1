package inference

import (
	"sync"
	"time"
)

// Bounds on what an entry may cost without paying for it.
const (
	freeMax      = 10               // runs of one entry on a node that are put down to instances
	lossMax      = 3                // runs that end with the device lost
	oomMax       = 5                // runs that end out of memory
	harmedMax    = 2                // instances of which this happened to it
	servedWithin = 10 * time.Minute // another entry must have been served, for an entry to be refused by all
	blamedMax    = 100_000          // entries remembered
)

// blame remembers which entries instances were excused for: an instance that is ill must not cost
// entries their attempts, and an entry that no instance can run must not be excused for ever.
type blame struct {
	mu      sync.Mutex
	entries map[string]*blamed
	models  map[string][2]servedEntry // the last two entries that a model served
	devices map[int32]*device         // by instance
}

type blamed struct {
	free      int            // runs that cost it nothing
	excused   map[int32]bool // instances that these were put down to
	misrouted map[int32]bool // instances that do not have what it asks for
	losses    int            // of devices during its calls: it is a suspect
}

type servedEntry struct {
	entry string
	at    time.Time
}

func newBlame() *blame {
	return &blame{
		entries: map[string]*blamed{}, models: map[string][2]servedEntry{}, devices: map[int32]*device{},
	}
}

// of is called with mu held.
func (b *blame) of(entry string) *blamed {
	if b.entries[entry] == nil {
		if len(b.entries) >= blamedMax {
			clear(b.entries)
		}
		b.entries[entry] = &blamed{excused: map[int32]bool{}, misrouted: map[int32]bool{}}
	}
	return b.entries[entry]
}

// free counts a run on an instance that shall cost the entry nothing, and says whether it may.
func (b *blame) free(entry string, instance int32) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	of := b.of(entry)
	of.free++
	of.excused[instance] = true
	return of.free <= freeMax
}

func (b *blame) misrouted(entry string, instance int32) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.of(entry).misrouted[instance] = true
}

// served notes an entry that an instance of a model answered.
func (b *blame) served(model, entry string, instance int32, now time.Time) {
	b.mu.Lock()
	defer b.mu.Unlock()
	delete(b.entries, entry)
	*b.deviceOf(instance) = device{served: now}
	last := b.models[model]
	if last[0].entry != entry {
		last[1] = last[0]
	}
	last[0] = servedEntry{entry, now}
	b.models[model] = last
}

// everywhere reports whether all instances refused the entry as none of theirs while another entry
// of the model was served: then the entry is to blame, and not the route.
func (b *blame) everywhere(model, entry string, instances []int32, now time.Time) bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	of := b.entries[entry]
	if of == nil || len(instances) == 0 {
		return false
	}
	for _, id := range instances {
		if !of.misrouted[id] {
			return false
		}
	}
	for _, s := range b.models[model] {
		if s.entry != "" && s.entry != entry && now.Sub(s.at) <= servedWithin {
			return true
		}
	}
	return false
}

// avoid returns the instances that the entry should not be sent to again while there are others: it
// would be the same witness twice.
func (b *blame) avoid(entry string, instances []int32) map[int32]bool {
	b.mu.Lock()
	defer b.mu.Unlock()
	avoid := map[int32]bool{}
	of := b.entries[entry]
	if of == nil {
		return avoid
	}
	for _, id := range instances {
		if of.excused[id] || of.misrouted[id] {
			avoid[id] = true
		}
	}
	if len(avoid) == len(instances) {
		clear(avoid)
	}
	return avoid
}

// usableInstances lists the instances that calls may be sent to.
func (d *dispatch) usableInstances() []int32 {
	var ids []int32
	for _, e := range d.registry.Endpoints(d.model.Name) {
		if e.Usable(time.Now()) {
			ids = append(ids, e.ID)
		}
	}
	return ids
}

// evidence is what the breaker is told of a call beside its outcome.
func (d *dispatch) evidence() evidence {
	e := evidence{
		entry: d.call.Entry, ran: time.Since(d.began), last: d.pool.isLast(d.model.Name, d.held.endpoint.ID),
	}
	if !d.shared() {
		e.flow = d.run.Lock.Lane.Flow
	}
	return e
}
