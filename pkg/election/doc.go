// Package election decides which of several leaders leads: a lease row with a growing term.
//
//	               the row is free                    renew, every Lease/4
//	┌───────────┐  or its lease lapsed   ┌─────────┐ ──┐
//	│ following │ ─────────────────────► │ leading │   │
//	└───────────┘      (a new term)      └─────────┘ ◄─┘
//	  ▲  ▲  ▲                              │  │  │
//	  │  │  └──── resigns ◄── ctx ends ────┘  │  │
//	  │  └─ resigns, holds off ◄─ lead returns┘  │
//	  └──── trust window closes, or the term is over
//
// # The clocks
//
// The lease is judged by the database's clock alone: a term ends one Lease after renewed_at. The leader judges its
// own trust by its monotonic clock, from the moment at which it began the request that renewed last, and only for
// three quarters of Lease. The database stamped renewed_at after that moment, so the leader has stopped before
// anybody else can start, as long as the two clocks run at about the same speed.
//
// Speed is an assumption, and a process may be frozen between looking at its clock and writing. So what the leader
// writes names its term (Fence, penstock.holds_term): the write happens in a transaction that holds the row of the
// term FOR KEY SHARE, which a take-over has to wait for and a renewal has not. A term that is over changes nothing.
// Such a transaction is short by force: the server ends it when a statement runs for two seconds, or when the
// leader falls silent in the middle for as long. Thus nobody can hold up a take-over by dying with it open.
//
// # How long it takes
//
// By default: a lease of 4 s, renewed every second, polled by followers every 150 to 300 ms.
//
//	planned hand-over   the leader ends its duties and frees the row; the next poll takes it     under 500 ms
//	crash               the rest of the lease, at most 4 s, and a poll                           under 4.5 s
//
// Followers poll rather than listen: a poll is one look-up in a table of one row, and works through a
// transaction pooler, behind which LISTEN does not.
//
// # What happens when each thing fails
//
//	leader is killed            its lease lapses, a follower takes over
//	leader freezes, then wakes  its trust window is closed, so lead's ctx has ended; what was on its way is refused
//	database slow or away       renewals fail; the trust window closes; nobody leads until the database is back
//	answer to a renewal lost    the next renewal asks again; the trust window counts from one that was answered
//	answer to an election lost  the row names our incarnation: the next poll takes a new term over it
//	answer to a resignation lost  the lease lapses by itself
//	lead returns or panics      a duty could not be started or kept: the leader resigns and holds off, so that
//	                            another one gets the next term; where nobody wants it for four polls
//	                            (1.2 s), it takes the next term itself
//	database clock jumps ahead  a follower may take over early; the old term's writes are refused from then on
//	database clock jumps back   a renewal later than the clock plus a lease counts as lapsed: no term outlives its lease
//	failover to a standby that has not seen the last term   the term is not in its table, so its writes are refused
//	read-only standby           polls fail like those of a database that is away
//
// Each election has a name; a process may take part in several. An elector needs one connection at a time, of a pool
// that is not shared with other work: busy connections would starve the renewals. The pool should allow ten, because
// a connection that a broken network has frozen takes up to 15 s to be given up, and by then others are tried.
package election
