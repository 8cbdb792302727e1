package tasknode

import (
	"time"

	"github.com/penstock/penstock/pkg/fairness"
	"github.com/penstock/penstock/pkg/invalidation"
)

// lane is a lane as the table remembers it. It is in one of the states that the comment of the package draws:
//
//	asleep  awake is 0, and lease is nil
//	awake   awake is greater than 0, and lease is nil. It is leased when rest is over, or early
//	leased  lease is not nil. It stays in laneTable.awake, unless its queue leaves the node
type lane struct {
	fairness.Candidate // as it is ranked
	key                laneKey

	awake int        // its number in laneTable.awake, from 1; 0: it is asleep, no work is known
	lease *laneLease // nil: no scheduling thread is in it
	rest  rest       // as its last lease left it
	want  want       // what it was refused last

	marks       marks     // where its claims begin
	hinted      bool      // pushes to it are hinted at, as far as one can tell
	large       bool      // the last claim of it did not come to its end
	fruitless   bool      // a claim was, and none since brought a lock, see claimEnd.fruitless
	contentions int       // how often in a row another claimer was in it, or had a row of it
	passed      time.Time // since when others are preferred to it; zero: they are not
}

// moved notes where the lane begins now.
func (l *lane) moved(head int64) {
	if head > l.Head {
		l.Since = time.Now()
	}
	l.Head = head
}

// elsewhere says that another node was in the lane a moment ago.
func (l *lane) elsewhere(now time.Time) bool {
	return l.contentions > 0 && !l.rest.refused() && now.Before(l.rest.until)
}

// backOff counts a contention, and returns for how long to leave the lane: 2 ms, doubled each time up to 64 ms.
func (l *lane) backOff() time.Duration {
	l.contentions = min(l.contentions+1, 6)
	return time.Millisecond << l.contentions
}

// few is how many rows a lane without hints must bring at once to be tried again when it is empty.
const few = 10

// leftRows says that a lane is worth another claim at once. If the last one emptied it, what comes later is hinted at,
// as what came before was, or found by the next poll. Where no hints come, and much comes, the next claim finds out.
func (l *lane) leftRows(c *invalidation.Claimed) bool {
	return c.Scanned > 0 && (!c.Drained || (!l.hinted && c.Scanned >= few))
}
