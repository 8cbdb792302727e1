package tasknode

import (
	"time"

	"github.com/penstock/penstock/pkg/fairness"
	"github.com/penstock/penstock/pkg/invalidation"
)

// lane is a lane as the table remembers it.
type lane struct {
	fairness.Candidate
	key             laneKey
	lowWater        int64 // position at which the next claim begins
	stuck           int64 // position before which are rows that could not be claimed: the next claim begins behind them
	awake           int   // index in laneTable.awake, from 1; 0: it is asleep, no work is known
	hinted          bool  // pushes to it are hinted at, as far as one can tell
	heard           bool  // a hint came since the last claim began
	claiming        bool  // a scheduling thread is in it
	arrivedPosition int64 // the first ready row that was noted while a thread was in it; 0: none
	large           bool  // the last claim of it did not come to its end
	fruitless       bool  // a claim was, and none since brought a lock, see claimEnd.fruitless
	contentions     int   // how often in a row another claimer was in it, or had a row of it
	behind          int64 // position from which on rows were left that could not be swept either; 0: none
	retryAt         time.Time
	refusedIn       epoch         // in which it was refused or limited; zero: it was not, or has been tried again
	headAt          time.Time     // when it was last scanned from its beginning
	headCost        time.Duration // how long that took
	passed          time.Time     // since when others are preferred to it; zero: they are not

	wantedAt    time.Time // when it was refused last, see laneTable.wanted
	gaveWayAt   time.Time // when a group gave way to it last
	wantsPermit bool      // a permit of the node was missing; else what the jobs of its queue share
}

// claimOverlap is how many positions before its low-water mark a claim begins. A push that took its positions and
// committed after the next ones is there: a batch of pushes (group commit) has up to 500 entries or a little more, and
// two of them are under way. So few positions cost next to nothing even where their rows are dead; with 100, pushes of
// 20 by 40 callers waited for up to 1 s, with 1000 for 70 ms. What came later still, or came back, is met when the lane
// is scanned from its beginning.
const claimOverlap = 1000

// headEvery is how often a lane is scanned from its beginning, for rows that came in behind the low-water mark.
// Where dead rows make that dear, it may take 3 % of the time and no more.
func (l *lane) headEvery() time.Duration { return max(time.Second, 33*l.headCost) }

// moved notes where the lane begins now.
func (l *lane) moved(head int64) {
	if head > l.Head {
		l.Since = time.Now()
	}
	l.Head = head
}

// resting says that the lane is not to be tried yet.
func (l *lane) resting(now time.Time, present epoch) bool {
	return now.Before(l.retryAt) && (l.refusedIn == epoch{} || !l.refusedIn.over(present))
}

// elsewhere says that another node was in the lane a moment ago.
func (l *lane) elsewhere(now time.Time) bool {
	return l.contentions > 0 && l.refusedIn == epoch{} && now.Before(l.retryAt)
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

// rewind moves the low-water mark back to the first row that was left behind it: a transaction had the row, or its key,
// locked for a moment. It returns after how long to try.
func (l *lane) rewind() time.Duration {
	l.lowWater, l.stuck, l.behind = min(l.lowWater, l.behind), min(l.stuck, l.behind), 0
	return l.backOff()
}
