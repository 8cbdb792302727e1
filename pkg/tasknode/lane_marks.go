package tasknode

import "time"

// marks are the positions from which the claims of a lane begin.
//
//	  left                    floor                            lowWater
//	───┼────────────────────────┼─────────────────┼────────────────┼──────► position
//	                                              └─ claimOverlap ─┘
//	                                              ▲
//	                           the next claim begins here, or at floor where that is greater
//
// A row that comes, or comes back, before lowWater or floor lowers them to its position. A row that the node does not
// hear of is met when the lane is scanned from its head, once a second.
type marks struct {
	lowWater int64 // up to it claims have scanned the lane
	floor    int64 // the rows just before it could not be claimed: claims do not scan them again with the overlap
	left     int64 // from it on a claim left rows that could not be swept either; 0: none did

	headAt   time.Time     // when the lane was last scanned from its head
	headCost time.Duration // how long that took
}

// claimOverlap is how many positions before its low-water mark a claim begins. A push that took its positions and
// committed after the next ones is there: a batch of pushes (group commit) has up to 500 entries or a little more, and
// two of them are under way. So few positions cost next to nothing even where their rows are dead; with 100, pushes of
// 20 by 40 callers waited for up to 1 s, with 1000 for 70 ms. What came later still, or came back, is met when the lane
// is scanned from its head.
const claimOverlap = 1000

// next returns the position at which the next claim begins, and whether that is the head of the lane.
func (m *marks) next(now time.Time) (from int64, head bool) {
	if now.Sub(m.headAt) > m.headEvery() {
		return 0, true
	}
	return max(m.floor, m.lowWater-claimOverlap), false
}

// headEvery is how often a lane is scanned from its head, for rows that came in behind the low-water mark.
// Where dead rows make that dear, it may take 3 % of the time and no more.
func (m *marks) headEvery() time.Duration { return max(time.Second, 33*m.headCost) }

// lower has the next claim scan a position.
func (m *marks) lower(position int64) {
	m.lowWater, m.floor = min(m.lowWater, position), min(m.floor, position)
}

// advance moves the marks behind the rows that a claim scanned.
func (m *marks) advance(v *laneLease, e *claimEnd, now time.Time) {
	c := &e.answer
	if v.fromHead {
		m.headAt, m.headCost = now, e.took
	}
	if e.missed() && (m.left == 0 || v.from < m.left) {
		m.left = max(1, v.from)
	}
	switch {
	case c.Scanned == 0:
	case len(c.Locks) == 0:
		// What is left there (a key whose row a transaction holds) is met again when the lane is scanned from its head.
		m.lowWater, m.floor = c.LowWater+1, c.LowWater+1
	default:
		m.lowWater = c.LowWater
	}
	if v.arrived != 0 { // the claim may have been too early to see it
		m.lower(v.arrived)
	}
}

// rewind has the next claim scan the rows again that were left: a transaction had the row, or its key, locked for a
// moment.
func (m *marks) rewind() {
	m.lower(m.left)
	m.left = 0
}
