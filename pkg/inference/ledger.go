package inference

import (
	"slices"
	"time"

	"github.com/penstock/penstock/pkg/slot"
	"github.com/penstock/penstock/pkg/worker"
)

// slotLedger is the arithmetic of the permits of one model: how many entries may be claimed for the slots that the node
// holds, which slot each gets, and which slots the node has no use for. The slots themselves are counted by slot.Ledger
// and slot.Leaving. It is pure: callers serialise, and pass the time.
//
// A permit is taken before an entry is claimed, and is backed by one slot of some instance. When the entry is about to
// run, the permit is assigned: a slot of a certain instance is busy with it. When the call has ended, the slot is idle
// again and the permit unassigned, until it is ended. If the call may still run at the worker, its slot is in doubt: it
// is not the node's to use any more. What a method moves:
//
//	take        permits  none ────────► unassigned
//	assign      permits  unassigned ──► assigned       a slot  idle ──────────► busy
//	dropPermit  a permit assigned ────► unassigned             it stays busy, with the other permits of its batch
//	finish      permits  assigned ────► unassigned     a slot  busy ──────────► idle, or in doubt
//	endPermits  permits  unassigned ──► none
//	add                                                a slot  not in here ───► idle
//	adopt       a permit unassigned ──► assigned       a slot  not in here ───► busy
//	sendAway                                           a slot  idle ──────────► goes back
//	lose        those of a busy slot are unassigned    a slot  idle or busy ──► not in here
//	            when its call finishes
//
// Where a model takes batches, a slot carries up to perSlot entries at once, each on a permit of
// its own:
//
//	idle * perSlot >= unassigned, but for slots that were lost while permits stood for them: then nothing is allowed
type slotLedger struct {
	instances  map[int32]*instanceSlots
	leaving    slot.Leaving
	perSlot    int // permits that one slot backs
	unassigned int // permits acquired and not assigned to a slot
	waiting    int // of these, the ones that wait for a busy slot and leave the idle ones to others
	share      int // how many slots this node may hold while others go without; -1: none does, as far as is known

	pressed map[int32]bool // instances that had better get no more calls while others have free slots
	relief  int            // free slots of the others, when last counted

	took durations // of calls that ended
}

// heldSlot is a slot that this node holds, or held.
type heldSlot = slot.Leased[slotCall]

// slotCall is what the node notes of the call of a slot.
type slotCall struct {
	permits int       // that are assigned to the slot
	since   time.Time // it is idle, or busy

	caution caution // of the entry that it is busy with
	company bool    // another call ran on the instance when it became busy
	begun   int64   // calls on the instance then, this one included
}

// instanceSlots is the slots of one instance, with what decides about calls to it.
type instanceSlots struct {
	slot.Ledger[slotCall]
	awaited int            // entries that wait for a busy one
	limit   int32          // slots the instance has; those numbered from there on are given back; 0: not known
	backoff worker.Backoff // after a call that the worker had no room for
	loaded  string         // the affinity of the last call that had one
	used    time.Time      // when that call began
	served  int64          // calls

	begun    int64     // calls, those that are followed on included
	suspects int       // busy slots of suspects, which run apart from each other
	closed   bool      // an entry runs alone: no other call may begin
	reserved time.Time // until then no other call may begin, since an entry is to run alone
}

// admits says whether a call may begin beside those that run.
func (s *instanceSlots) admits(c caution, now time.Time) bool {
	switch {
	case s.closed:
		return false
	case c == alone:
		return s.Busy() == 0
	case now.Before(s.reserved):
		return false
	}
	return c == together || s.suspects == 0
}

func newSlotLedger() *slotLedger {
	return &slotLedger{instances: map[int32]*instanceSlots{}, perSlot: 1, share: -1}
}

func (l *slotLedger) of(instance int32) *instanceSlots {
	s := l.instances[instance]
	if s == nil {
		s = &instanceSlots{}
		l.instances[instance] = s
	}
	return s
}

// add puts a leased slot into the ledger, idle. Whatever has its number is lost, also under a greater token: callers
// hold the talk lock from the question on, so that no answer is older than the ledger.
func (l *slotLedger) add(s slot.Held, now time.Time) *heldSlot {
	if l.share >= 0 && l.held() == 0 {
		l.share = -1 // it was read when the node held slots before: others may have enough by now
	}
	i := l.of(s.Instance)
	if old := i.Numbered(s.Number); old != nil {
		l.lose(old) // with what its call keeps away
	}
	h := i.Add(s)
	h.Call.since = now
	return h
}

// held counts the slots of all instances.
func (l *slotLedger) held() (n int) {
	for _, s := range l.instances {
		n += s.Held()
	}
	return n
}

// idle counts those without a call.
func (l *slotLedger) idle() (n int) {
	for _, s := range l.instances {
		n += s.Idle()
	}
	return n
}

// adopt puts a slot into the ledger that is busy already, and assigns a permit to it.
func (l *slotLedger) adopt(s slot.Held, now time.Time) *heldSlot {
	h := l.add(s, now)
	l.occupy(h, 1, now)
	return h
}

// has says whether a slot is the node's still.
func (l *slotLedger) has(h *heldSlot) bool {
	s := l.instances[h.Instance]
	return s != nil && s.Has(h)
}

// lose drops a slot that is not ours any more. If it is busy, its call goes on, and its end changes
// nothing here.
func (l *slotLedger) lose(h *heldSlot) {
	s := l.of(h.Instance)
	if !s.Drop(h) || !h.Busy() {
		return
	}
	if s.vacate(h); s.Busy() == 0 {
		s.reserved = time.Time{}
	}
}

// take acquires up to want permits.
func (l *slotLedger) take(now time.Time, want int, usable func(instance int32) bool) int {
	n := max(0, min(want, l.free(now, usable)))
	l.unassigned += n
	return n
}

// free is how many permits could be acquired.
func (l *slotLedger) free(now time.Time, usable func(instance int32) bool) int {
	idle, busy := 0, 0
	for id, s := range l.instances {
		busy += s.Busy()
		switch {
		case s.Idle() == 0 || s.backoff.Active(now) || !usable(id):
		case s.admits(together, now):
			idle += s.Idle()
		case s.admits(alone, now):
			idle++ // for the entry that the instance is reserved for
		}
	}
	if l.share >= 0 {
		idle = min(idle, l.share-busy)
	}
	return idle*l.perSlot - (l.unassigned - l.waiting)
}

// covering is how many idle slots cover the permits that are not assigned.
func (l *slotLedger) covering() int { return (max(l.unassigned, 0) + l.perSlot - 1) / l.perSlot }

// endPermits ends n permits that are not assigned.
func (l *slotLedger) endPermits(n int) { l.unassigned -= n }

// slotRequest says what an entry, or a batch of them, needs of a slot.
type slotRequest struct {
	permits  int            // permits that it has, 1 at least
	affinity string         // value of the affinity field: what the worker has to load
	until    time.Time      // how long it may wait for a worker that has that loaded
	exclude  map[int32]bool // instances that it has tried, or that are not for it
	pressed  map[int32]bool // instances that had better get no more calls while others are there
	caution  caution        // beside which calls it may run
	reserve  time.Duration  // how long calls last at most that it may have to see ended, to run alone
}

// assign picks the slot for an entry. admit is asked last, about one instance after the other.
// Without a slot it says which instance is worth waiting for, 0 if none is.
func (l *slotLedger) assign(now time.Time, want slotRequest, admit func(instance int32) bool) (h *heldSlot,
	swapped bool, await int32,
) {
	var candidates []candidate
	for id, s := range l.instances {
		if !s.backoff.Active(now) && !want.exclude[id] && s.admits(want.caution, now) {
			candidates = append(candidates, candidate{
				id: id, idle: s.Idle(), busy: s.Busy(), awaited: s.awaited, loaded: s.loaded,
				used: s.used, served: s.served,
				pressed: want.pressed[id],
			})
		}
	}
	order, await := rankCandidates(candidates, want.affinity, now.Before(want.until))
	for _, id := range order {
		if admit(id) {
			s := l.instances[id]
			h := s.Last()
			l.occupy(h, max(want.permits, 1), now)
			s.heed(h, want.caution)
			return h, s.note(want.affinity, now), 0
		}
	}
	return nil, false, await
}

// await lets something with so many permits wait for a busy slot of an instance, and leave the idle
// ones to others.
func (l *slotLedger) await(instance int32, permits int) {
	l.of(instance).awaited++
	l.waiting += permits
}

// unawait ends all such waits: a caller that still waits calls await again.
func (l *slotLedger) unawait() {
	l.waiting = 0
	for _, s := range l.instances {
		s.awaited = 0
	}
}

// occupy turns an idle slot busy and assigns permits to it.
func (l *slotLedger) occupy(h *heldSlot, permits int, now time.Time) {
	s := l.of(h.Instance)
	s.begun++
	h.Call.company, h.Call.begun = s.Busy() > 0, s.begun
	s.Occupy(h)
	h.Call.permits, h.Call.since = permits, now
	l.unassigned -= permits
}

// heed keeps the calls away beside which the entry of a busy slot must not run.
func (s *instanceSlots) heed(h *heldSlot, c caution) {
	h.Call.caution = c
	if c > together {
		s.suspects++
	}
	if s.closed = c == alone; s.closed {
		s.reserved = time.Time{}
	}
}

// vacate ends what the call of a slot keeps away.
func (s *instanceSlots) vacate(h *heldSlot) {
	if h.Call.caution > together {
		s.suspects--
	}
	if h.Call.caution == alone {
		s.closed = false
	}
	h.Call.caution = together
}

// solitary says whether no other call of this node ran on the instance since that of a busy slot began.
func (l *slotLedger) solitary(h *heldSlot) bool {
	return !h.Call.company && l.of(h.Instance).begun == h.Call.begun
}

// reservedFor is how long an empty instance is kept for an entry that is to run alone there: it comes back sooner.
const reservedFor = 5 * time.Second

// reserve keeps other calls from a busy instance, so that an entry can run alone there soon. Entries that need this
// share one instance, the one with the fewest calls.
func (l *slotLedger) reserve(now time.Time, want slotRequest, usable func(instance int32) bool) {
	var best *instanceSlots
	for id, s := range l.instances {
		switch {
		case want.exclude[id] || !usable(id):
		case s.closed || now.Before(s.reserved):
			return
		case s.Busy() > 0 && (best == nil || s.Busy() < best.Busy()):
			best = s
		}
	}
	if best != nil {
		best.reserved = now.Add(want.reserve)
	}
}

// dropPermit takes a permit off a busy slot, whose call goes on without it.
func (l *slotLedger) dropPermit(h *heldSlot) {
	h.Call.permits--
	l.unassigned++
}

// finish ends the call of a slot: it is idle again, or not in here any more, as it is in doubt.
func (l *slotLedger) finish(h *heldSlot, now time.Time, doubt bool) {
	others := l.unassigned // permits that need an idle slot; those of h itself are about to be given back
	l.unassigned += h.Call.permits
	h.Call.permits = 0
	if !l.has(h) {
		return
	}
	s := l.of(h.Instance)
	if doubt {
		s.Drop(h)
	} else {
		s.Free(h)
	}
	s.vacate(h)
	if until := now.Add(reservedFor); s.Busy() == 0 && s.reserved.After(until) {
		s.reserved = until
	}
	if !doubt {
		l.took.add(now.Sub(h.Call.since))
		h.Call.since = now
		l.retire(s)
		l.relieve(h, others)
	}
}

// sendAway lets a slot go back.
func (l *slotLedger) sendAway(h *heldSlot) {
	l.lose(h)
	l.leaving.GiveBack(h.Held)
}

// relieve lets the idle slot of a pressed instance go where another instance has a free one, which is leased
// in its place. Without it a node that is busy all the time would use the slots that it leased first for ever.
// A slot stays whose instance has loaded what entries need, as does one that one of so many other permits needs.
func (l *slotLedger) relieve(h *heldSlot, permits int) {
	if !l.has(h) || !l.relievable(h.Instance) {
		return
	}
	if (l.idle()-1)*l.perSlot < permits {
		return
	}
	l.relief--
	l.sendAway(h)
}

func (l *slotLedger) holdsPressed() bool {
	for id, s := range l.instances {
		if s.Held() > 0 && l.pressed[id] {
			return true
		}
	}
	return false
}

func (l *slotLedger) relievable(instance int32) bool {
	return l.relief > 0 && l.pressed[instance] && l.instances[instance].loaded == ""
}

// setLimit says how many slots an instance has. Those beyond are not used again.
func (l *slotLedger) setLimit(instance int32, limit int) {
	s := l.of(instance)
	s.limit = int32(min(limit, 1<<30)) //nolint:gosec // bounded just before
	l.retire(s)
}

// retire lets the idle slots of an instance go that it has no more.
func (l *slotLedger) retire(s *instanceSlots) {
	if s.limit == 0 {
		return
	}
	for h := range s.All() {
		if !h.Busy() && h.Number >= s.limit {
			l.sendAway(h)
		}
	}
}

// surplus lets the idle slots go back that the node has no use for: idle for long, on an instance that is not
// usable, on a pressed one where another has a free slot, or beyond its share while others go without. Permits that
// are out keep theirs. It returns all slots that go back, for a statement.
func (l *slotLedger) surplus(now time.Time, idleMax time.Duration, usable func(instance int32) bool) []slot.Held {
	spare := 0
	for id, s := range l.instances {
		if usable(id) {
			spare += s.Idle()
		}
	}
	spare -= l.covering()
	beyond := 0
	if l.share >= 0 {
		beyond = l.held() - l.share
	}
	for id, s := range l.instances {
		good := usable(id)
		for _, h := range slices.Collect(s.IdleSlots()) {
			goes := !good
			if good && spare > 0 && (now.Sub(h.Call.since) >= idleMax || beyond > 0 || l.relievable(id)) {
				goes = true
				spare--
				beyond--
				if l.relievable(id) {
					l.relief--
				}
			}
			if goes {
				l.sendAway(h)
			}
		}
		if s.Held() == 0 && !s.backoff.Active(now) && !good {
			delete(l.instances, id)
		}
	}
	return l.leaving.TakeBack()
}

// note records a call, and reports whether the worker had to load another affinity for it than that of the call before.
func (s *instanceSlots) note(affinity string, now time.Time) (swapped bool) {
	s.served++
	swapped = affinity != "" && s.loaded != "" && s.loaded != affinity
	if affinity != "" {
		s.loaded, s.used = affinity, now
	}
	return swapped
}
