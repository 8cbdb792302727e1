// Package election elects one of several leader processes by a lease row with a growing term.
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
// # Clocks
//
// Only the database's clock decides about the lease: a term ends one Lease after renewed_at. The
// leader measures its trust window by its own monotonic clock, from the start of the last renewal
// that was answered, and for three quarters of Lease. The database set renewed_at after that start,
// so the leader stops before another process can start, as long as the two clocks run at about the
// same speed.
//
// Equal speed is an assumption, and a process may be frozen between reading its clock and writing.
// So each write of the leader names its term (Fence, penstock.holds_term): it is in a transaction
// that locks the row of the term FOR KEY SHARE, for which a take-over waits and a renewal does not.
// A write of a term that is over is refused. The server bounds such a transaction: it ends it when
// a statement runs for two seconds, or when the leader is idle in it for as long. So a leader that
// dies with such a transaction open delays a take-over by at most that.
//
// # Durations
//
// By default: a lease of 4 s, renewed every second, polled by followers every 150 to 300 ms.
//
//	planned hand-over   the leader ends its duties and frees the row; the next poll takes it     under 500 ms
//	crash               the rest of the lease, at most 4 s, and a poll                           under 4.5 s
//
// Followers poll rather than listen: a poll is one lookup in a table of one row, and works through a
// transaction pooler, behind which LISTEN does not.
//
// # Failures
//
//	leader is killed            its lease lapses, a follower takes over
//	leader freezes, then wakes  its trust window is closed, so lead's ctx has ended; its late writes are refused
//	database slow or away       renewals fail; the trust window closes; no process leads until the database is back
//	answer to a renewal lost    the next renewal tries again; the trust window counts from one that was answered
//	answer to an election lost  the row names our incarnation: the next poll takes a new term
//	answer to a resignation lost  the lease lapses by itself
//	lead returns or panics      a duty could not be started or kept: the leader resigns and holds off, so that
//	                            another process gets the next term; if none takes it for four polls
//	                            (1.2 s), it takes the next term itself
//	database clock jumps ahead  a follower may take over early; the old term's writes are refused from then on
//	database clock jumps back   a renewal later than the clock plus a lease counts as lapsed: no term outlives its
//	                            lease
//	failover to a standby that has not seen the last term   the term is not in its table, so its writes are refused
//	read-only standby           polls fail as for a database that is unavailable
//
// Each election has a name; a process may take part in several. An elector needs one connection at
// a time, of a pool that is not shared with other work: busy connections would delay the renewals.
// The pool should allow ten, because a connection over a broken network takes up to 15 s to fail,
// and meanwhile others are tried.
package election
