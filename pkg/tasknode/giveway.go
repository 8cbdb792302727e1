package tasknode

import (
	"slices"
	"time"

	"github.com/penstock/penstock/pkg/fairness"
)

const (
	// wantedFor is for how long a lane counts as wanted after it was refused. It is tried again more often than that.
	wantedFor = time.Second
	// giveWayEvery is the time between two groups that give way to one lane: by then it was claimed from, or refused
	// again.
	giveWayEvery = 50 * time.Millisecond
)

// wanted notes that a lane was refused for want of something that a running job has: a permit of the node, or
// what all jobs of the queue share.
func (t *laneTable) wanted(l *lane, permit bool, now time.Time) {
	l.wantedAt, l.wantsPermit = now, permit
	if l.awake > 0 && !slices.Contains(t.want, l) {
		t.want = append(t.want, l)
		t.anyWanted.Store(true)
	}
}

// unwant notes that a lane got what it wanted, or has no work.
func (t *laneTable) unwant(l *lane) {
	if i := slices.Index(t.want, l); i >= 0 {
		t.want = slices.Delete(t.want, i, i+1)
		t.anyWanted.Store(len(t.want) > 0)
	}
}

// givesWay says that a job of that lane should give up what it holds, between two of its entries, since a lane
// that ranks before its own was refused. So one flow with long groups does not keep others waiting for its
// quantum. A lane that holds locks here is given way to only by one that would still have as many, so that two
// lanes do not pass a lock to and fro.
func (t *laneTable) givesWay(own *lane, held func(laneKey) int, now time.Time) bool {
	if !t.anyWanted.Load() {
		return false
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	candidates := append(make([]*fairness.Candidate, 0, 1+len(t.want)), &own.Candidate)
	lanes := append(make([]*lane, 0, 1+len(t.want)), own)
	mine := held(own.key)
	for _, l := range slices.Clone(t.want) {
		if now.Sub(l.wantedAt) > wantedFor {
			t.unwant(l)
			continue
		}
		theirs := held(l.key)
		fewer := theirs == 0 || theirs+1 < mine
		open := !l.claiming && now.Sub(l.gaveWayAt) > giveWayEvery
		if l != own && open && (l.wantsPermit || l.key.queue == own.key.queue) && fewer {
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
	lanes[first[0]].gaveWayAt = now
	return true
}

// granted returns the lane to which a group has just given way, if it may be claimed from now: what came free
// is for that lane. The ranking alone could give it back to the lane of the group, whose charge for entries
// that have not run is returned.
func (t *laneTable) granted(now time.Time) *lane {
	for _, l := range t.want {
		if now.Sub(l.gaveWayAt) <= giveWayEvery && !l.claiming && !l.resting(now, t.epoch) && t.open(l, now) {
			return l
		}
	}
	return nil
}

// inTurn says that a lane was refused of late for want of what the jobs of its queue share. Then no lane is
// claimed from while one that ranks before it is: it could take what came free for that one.
func (t *laneTable) inTurn() bool {
	return t.anyWanted.Load() && slices.ContainsFunc(t.want, func(l *lane) bool { return !l.wantsPermit })
}
