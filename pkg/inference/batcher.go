package inference

import (
	"cmp"
	"slices"
	"time"

	"github.com/penstock/penstock/pkg/worker"
)

// batcher puts members together. It is pure: callers serialise, and pass the
// time. Members of a shape keep their order.
//
// A batch leaves when a slot is there for it, and it is full, or its oldest member has waited for
// Wait. It leaves earlier once no entry has joined it for a tenth of Wait: the slot idles, and no entry
// seems to be coming. What finds no slot stays and grows.
type batcher struct {
	limits worker.BatchLimits
	shapes map[string][]worker.Member
}

// newBatcher returns an empty batcher.
func newBatcher(limits worker.BatchLimits) *batcher {
	return &batcher{limits: limits.WithDefaults(), shapes: map[string][]worker.Member{}}
}

// Add lets a member wait.
func (b *batcher) Add(m worker.Member) { b.shapes[m.Shape] = append(b.shapes[m.Shape], m) }

// batch is the first so many members of a shape, in their order.
type batch []worker.Member

// Due returns the batches that idle slots should be given to now, one a shape, that with the oldest
// member first. Their members wait on until Leave says that they went.
func (b *batcher) Due(now time.Time) (due []batch) {
	for _, waiting := range b.shapes {
		if n, full := b.fitting(waiting); full || !now.Before(b.leavesAt(waiting)) {
			due = append(due, waiting[:n])
		}
	}
	slices.SortFunc(due, func(x, y batch) int {
		return cmp.Or(oldest(x).Compare(oldest(y)), cmp.Compare(x[0].Shape, y[0].Shape))
	})
	return due
}

// Leave removes the members of a batch.
func (b *batcher) Leave(left batch) {
	shape := left[0].Shape
	rest := slices.Clone(b.shapes[shape][len(left):])
	b.shapes[shape] = rest
	if len(rest) == 0 {
		delete(b.shapes, shape)
	}
}

// Next says when Due will return a batch if nothing else happens.
func (b *batcher) Next() (at time.Time, waiting bool) {
	for _, members := range b.shapes {
		leaves := b.leavesAt(members)
		if _, full := b.fitting(members); full {
			leaves = oldest(members)
		}
		if !waiting || leaves.Before(at) {
			at, waiting = leaves, true
		}
	}
	return at, waiting
}

// Withdraw removes a member, and says whether it waited here.
func (b *batcher) Withdraw(entry string) bool {
	for shape, members := range b.shapes {
		i := slices.IndexFunc(members, func(m worker.Member) bool { return m.Entry == entry })
		if i < 0 {
			continue
		}
		b.shapes[shape] = slices.Delete(slices.Clone(members), i, i+1)
		if len(b.shapes[shape]) == 0 {
			delete(b.shapes, shape)
		}
		return true
	}
	return false
}

// fitting counts the members that fit into one call. A member that exceeds a limit alone travels
// alone.
func (b *batcher) fitting(members []worker.Member) (n int, full bool) {
	var tokens, bytes int64
	for _, m := range members {
		tokens, bytes = tokens+m.Tokens, bytes+m.Bytes
		if n > 0 && (n == max(b.limits.Items, 1) || exceeds(tokens, b.limits.Tokens) ||
			exceeds(bytes, b.limits.Bytes)) {
			return n, true
		}
		n++
	}
	return n, members[0].Alone || n == max(b.limits.Items, 1) || exceeds(tokens+1,
		b.limits.Tokens) || exceeds(bytes+1, b.limits.Bytes)
}

func exceeds(amount, limit int64) bool { return limit > 0 && amount > limit }

func (b *batcher) leavesAt(members []worker.Member) time.Time {
	wait := b.limits.Wait.Duration()
	newest := slices.MaxFunc(members, byTime).At
	quiet, latest := newest.Add(wait/10), oldest(members).Add(wait)
	if quiet.Before(latest) {
		return quiet
	}
	return latest
}

// oldest is the time of the member that has waited longest: members may arrive
// out of the order in which they began to wait.
func oldest(members []worker.Member) time.Time { return slices.MinFunc(members, byTime).At }

func byTime(a, b worker.Member) int { return a.At.Compare(b.At) }
