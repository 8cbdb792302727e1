package gateway

import (
	"container/list"
	"math"
	"time"

	"github.com/cespare/xxhash/v2"
)

// pick chooses the instance for a request among those with room: one that has served its session or
// prefix, unless that is loaded far beyond the others; else, for a request with a key, its home; else
// the one with the least work in proportion to its speed. Instances in avoid are the last choice.
func (f *fleet) pick(now time.Time, r *Request, bound float64) *instance {
	if !f.until.IsZero() && !now.Before(f.until) {
		return nil
	}
	var candidates, avoided []*instance
	inFlight, usable := 0, 0
	for _, i := range f.instances {
		if !i.usable {
			continue
		}
		usable++
		inFlight += i.inFlight
		switch {
		case i.room(now) <= 0:
		case r.avoids(i.id):
			avoided = append(avoided, i)
		default:
			candidates = append(candidates, i)
		}
	}
	if len(candidates) == 0 {
		candidates = avoided
	}
	if len(candidates) <= 1 {
		return only(candidates)
	}
	if r.Adapter != "" {
		candidates = withAdapter(now, candidates, r.Adapter)
	}
	most := bound*float64(inFlight)/float64(usable) + affinitySlack
	fits := func(i *instance) bool { return float64(i.inFlight) <= most }
	if id, known := f.affinity.find(r); known {
		for _, i := range candidates {
			if i.id == id && fits(i) {
				return i
			}
		}
	}
	if key := r.homeKey(); key != 0 {
		if i := home(candidates, key, fits); i != nil {
			return i
		}
	}
	return leastWork(now, candidates)
}

// affinitySlack is how many calls beyond the mean an instance may have and still get an affine request.
const affinitySlack = 4

func only(list []*instance) *instance {
	if len(list) == 0 {
		return nil
	}
	return list[0]
}

// adapterKept is for how long an instance counts as one that has an adapter loaded after a call for it. Servers have
// room for some adapters and say seldom which.
const adapterKept = 10 * time.Minute

// withAdapter keeps the instances that have the adapter loaded, all if none has.
func withAdapter(now time.Time, list []*instance, adapter string) []*instance {
	var loaded []*instance
	for _, i := range list {
		if used, has := i.adapters[adapter]; has && now.Sub(used) < adapterKept {
			loaded = append(loaded, i)
		}
	}
	if len(loaded) == 0 {
		return list
	}
	return loaded
}

// home is the instance with the greatest hash of key and instance among those that fit (rendezvous
// hashing, Thaler and Ravishankar 1998, with bounded load): gateways agree on it without talking.
func home(list []*instance, key uint64, fits func(*instance) bool) *instance {
	var best *instance
	var most uint64
	for _, i := range list {
		if !fits(i) {
			continue
		}
		if h := mix(key ^ mix(uint64(i.id)+1)); best == nil || h > most { //nolint:gosec // ids are positive
			best, most = i, h
		}
	}
	return best
}

// mix is the finalizer of MurmurHash3.
func mix(h uint64) uint64 {
	h ^= h >> 33
	h *= 0xff51afd7ed558ccd
	h ^= h >> 33
	h *= 0xc4ceb9fe1a85ec53
	return h ^ h>>33
}

// leastWork returns the instance with the least work in flight for its speed.
func leastWork(now time.Time, list []*instance) *instance {
	var fastest float64
	for _, i := range list {
		fastest = max(fastest, i.rate)
	}
	var best *instance
	least := math.Inf(1)
	for _, i := range list {
		if s := i.score(now, fastest); s < least {
			best, least = i, s
		}
	}
	return best
}

// score is the time that the work in flight will take, in proportion: calls over slots, longer on an
// instance that is slower than the fastest, and up to twice that with a full KV cache.
func (i *instance) score(now time.Time, fastest float64) float64 {
	work := i.queued/1000 + float64(i.inFlight)
	work /= float64(max(i.limit.slots, 1))
	if i.rate > 0 && fastest > 0 {
		work *= min(fastest/i.rate, 10)
	}
	if now.Sub(i.kvAt) <= staleAfter {
		work += i.kv * work
	}
	return work
}

// affinity remembers which instance served a session or a prefix last.
type affinity struct {
	entries map[uint64]*list.Element
	order   *list.List // most recently used first
	most    int
}

type affinityEntry struct {
	key      uint64
	instance int32
}

const (
	affinityMax   = 100_000 // remembered keys of a pool
	prefixBlock   = 1 << 10 // bytes
	prefixBlocks  = 70
	prefixMinimum = 2 // blocks that must agree: one is mostly a system prompt's beginning
)

func newAffinity() *affinity {
	return &affinity{entries: map[uint64]*list.Element{}, order: list.New(), most: affinityMax}
}

// find returns the instance that the request's session, cache key or longest known prefix went to.
func (a *affinity) find(r *Request) (int32, bool) {
	if r.Session != 0 {
		if e := a.entries[r.Session]; e != nil {
			a.order.MoveToFront(e)
			return e.Value.(affinityEntry).instance, true //nolint:errcheck,forcetypeassert // nothing else is stored
		}
	}
	for n := len(r.Prefix); n >= prefixMinimum; n-- {
		if e := a.entries[r.Prefix[n-1]]; e != nil {
			a.order.MoveToFront(e)
			return e.Value.(affinityEntry).instance, true //nolint:errcheck,forcetypeassert // nothing else is stored
		}
	}
	return 0, false
}

// remember notes where a request went, for those that are to follow it. A request that went elsewhere because its
// instance had no room for a moment leaves the memory as it is: the next one finds its prefix there.
func (f *fleet) remember(r *Request, instance int32) {
	if id, known := f.affinity.find(r); known && id != instance {
		if i := f.find(id); i != nil && i.usable && !i.failing && !r.avoids(id) {
			return
		}
	}
	f.affinity.note(r, instance)
}

// note remembers where a request went.
func (a *affinity) note(r *Request, instance int32) {
	if r.Session != 0 {
		a.put(r.Session, instance)
	}
	for _, key := range r.Prefix {
		a.put(key, instance)
	}
}

func (a *affinity) put(key uint64, instance int32) {
	if e := a.entries[key]; e != nil {
		e.Value = affinityEntry{key, instance}
		a.order.MoveToFront(e)
		return
	}
	a.entries[key] = a.order.PushFront(affinityEntry{key, instance})
	if a.order.Len() > a.most {
		oldest := a.order.Back()
		a.order.Remove(oldest)
		delete(a.entries, oldest.Value.(affinityEntry).key) //nolint:errcheck,forcetypeassert // nothing else is stored
	}
}

// clear forgets all.
func (a *affinity) clear() {
	if len(a.entries) > 0 {
		a.entries = map[uint64]*list.Element{} // an empty map keeps the memory of what was in it
		a.order.Init()
	}
}

// hashKey is the same in every process, so that gateways agree.
func hashKey(text string) uint64 { return xxhash.Sum64String(text) }

// prefixHashes returns a hash for each whole block at the beginning of a prompt, each of all blocks up
// to its end.
func prefixHashes(prompt []byte) []uint64 {
	n := min(len(prompt)/prefixBlock, prefixBlocks)
	if n == 0 {
		return nil
	}
	hashes := make([]uint64, n)
	var h uint64
	for i := range n {
		h = mix(h ^ xxhash.Sum64(prompt[i*prefixBlock:(i+1)*prefixBlock]))
		hashes[i] = h
	}
	return hashes
}
