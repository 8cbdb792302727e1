package tasknode

import (
	"slices"
	"sync/atomic"
	"time"

	"github.com/penstock/penstock/pkg/fairness"
)

// A lane wants what running jobs have from when it is refused that until it gets it:
//
//	wants nothing ──1──► wants ──2──► granted
//	      ▲                │ ▲            │
//	      └───────4────────┘ └─────3──────┘
//
//	1  it was refused: for want of a permit of the node, by a gate, or by a limit on locks
//	2  a group gave way to it, whose lane ranks behind it: it is leased before any other lane, if it does not rest
//	3  giveWayEvery is over
//	4  a claim brought a lock of it, it is asleep, or it was not refused again for wantedFor; a granted one as well
const (
	// wantedFor is for how long a lane wants what it was refused. It is tried again more often than that.
	wantedFor = time.Second
	// giveWayEvery is the time between two groups that give way to one lane: by then it was claimed from, or refused
	// again.
	giveWayEvery = 50 * time.Millisecond
)

// want is what a lane was refused last.
type want struct {
	at        time.Time // when it was refused
	permit    bool      // a permit of the node; else what the jobs of its queue share
	gaveWayAt time.Time // when a group gave way to the lane last
}

// wants are the lanes that want what running jobs have. They are guarded by laneTable.mu.
type wants struct {
	lanes []*lane
	any   atomic.Bool // lanes is not empty: it is asked without mu, between all entries of groups
}

func (w *wants) add(l *lane) {
	if !slices.Contains(w.lanes, l) {
		w.lanes = append(w.lanes, l)
		w.any.Store(true)
	}
}

func (w *wants) remove(l *lane) {
	if i := slices.Index(w.lanes, l); i >= 0 {
		w.lanes = slices.Delete(w.lanes, i, i+1)
		w.any.Store(len(w.lanes) > 0)
	}
}

// expire removes the lanes that were not refused again for wantedFor. A lane whose queue or flow is paused is one.
func (w *wants) expire(now time.Time) {
	w.lanes = slices.DeleteFunc(w.lanes, func(l *lane) bool { return now.Sub(l.want.at) > wantedFor })
	w.any.Store(len(w.lanes) > 0)
}

// want notes that a lane was refused what running jobs have: a permit of the node, or what all jobs of the queue share.
func (t *laneTable) want(l *lane, permit bool, now time.Time) {
	l.want.at, l.want.permit = now, permit
	if l.awake > 0 {
		t.wants.add(l)
	}
}

// givesWay says that a job of that lane should give up what it holds, between two of its entries, since a lane
// that ranks before its own was refused. So one flow with long groups does not keep others waiting for its
// quantum. A lane that holds locks here is given way to only by one that would still have as many, so that two
// lanes do not pass a lock to and fro.
func (t *laneTable) givesWay(own *lane, held func(laneKey) int, now time.Time) bool {
	if !t.wants.any.Load() {
		return false
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.wants.expire(now)
	candidates := append(make([]*fairness.Candidate, 0, 1+len(t.wants.lanes)), &own.Candidate)
	lanes := append(make([]*lane, 0, 1+len(t.wants.lanes)), own)
	mine := held(own.key)
	for _, l := range t.wants.lanes {
		theirs := held(l.key)
		fewer := theirs == 0 || theirs+1 < mine
		open := l.lease == nil && now.Sub(l.want.gaveWayAt) > giveWayEvery
		if l != own && open && (l.want.permit || l.key.queue == own.key.queue) && fewer {
			l.Taken = false // as it was when its thread took it
			candidates, lanes = append(candidates, &l.Candidate), append(lanes, l)
		}
	}
	if len(candidates) == 1 {
		return false
	}
	own.Taken = false // or it would be passed over
	first := t.ranker.Next(nil, candidates, 1, true)
	if len(first) == 0 || first[0] == 0 {
		return false
	}
	lanes[first[0]].want.gaveWayAt = now
	return true
}

// granted returns the lane to which a group has just given way, if it may be claimed from now: what came free
// is for that lane. The ranking alone could give it back to the lane of the group, whose charge for entries
// that have not run is returned.
func (t *laneTable) granted(now time.Time) *lane {
	for _, l := range t.wants.lanes {
		granted := now.Sub(l.want.gaveWayAt) <= giveWayEvery
		if granted && l.lease == nil && !l.rest.lasts(now, t.epoch) && t.open(l, now) {
			return l
		}
	}
	return nil
}

// inTurn says that a lane was refused of late for want of what the jobs of its queue share. Then no lane is
// claimed from while one that ranks before it is: it could take what came free for that one.
func (t *laneTable) inTurn(now time.Time) bool {
	if !t.wants.any.Load() {
		return false
	}
	t.wants.expire(now)
	return slices.ContainsFunc(t.wants.lanes, func(l *lane) bool { return !l.want.permit })
}
