// Package tasknode runs entries: a few scheduling threads claim them, many processing threads run their handlers.
//
//	wake, poll ──► scheduling thread ──claim──► work ──► processing thread ──ending──► settler ──► Postgres
//	                 │  asks the governor                  │ runs the handler            │ one transaction for
//	                 │  ranks the lanes (board)            │ under a context that ends   │ all that ended since
//	                 └─ takes permits first                └ with deadline, cancel, lease└ the last one
//
//	heartbeat ──► renews the lease, says which tokens are held, brings back drains, cancels and changed settings
//
// # What bounds the node
//
// A permit stands for one lock that the node holds, from before the claim until its ending is recorded. There are
// as many permits as processing threads, and some more for queues whose runs are short: enough that threads do not
// run dry while the next claim is on its way. So memory is bounded by permits, never by the backlog, and a database
// that cannot be written to stops the claims by itself: endings are kept, and hold their permits.
//
// # What ends a run early
//
// Its context ends with a cause: ErrFinishBy, ErrRunTimeout, ErrCancelled, ErrDraining when the grace of a drain is
// over, ErrLeaseLost when three quarters of the lease have passed since the start of the last heartbeat that was
// answered. After the last one nothing of the node may touch the world outside, since the leader will soon give its
// entries to others.
package tasknode
