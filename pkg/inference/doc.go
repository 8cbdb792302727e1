// Package inference runs entries of inference queues on workers that nobody
// had to change: one adapter a protocol, behind one small interface.
//
// The life of a call:
//
//	slot held, entry claimed
//	   │
//	   ▼
//	Submit ──▶ Done(result)        the worker answered; finish the entry
//	   │  ├──▶ Accepted(remote)    the worker runs it; store the remote id, then Follow
//	   │  ├──▶ Busy, NotReady      nothing ran; retry elsewhere, no attempt is spent
//	   │  ├──▶ Rejected            the worker refuses this entry for good
//	   │  ├──▶ Failed(class)       it ran and failed; an attempt is spent
//	   │  ├──▶ Cancelled           the worker is known to have stopped it
//	   │  └──▶ Unknown             it may have run; the queue's declared policy decides
//	   ▼
//	Follow ──▶ any of the above, or Accepted again when this node must hand the run over
//
// An outcome never says more than the worker said: a connection that broke
// after the request was sent is Unknown, not Failed, because the work may be
// done. Outcome.MaybeRunning tells apart whether the slot is free.
//
// Everything in this package that decides (classes, breaker, batches, stale
// slots, limits of a run) is pure and takes now; everything that talks HTTP is
// in transport.go and the adapter's own file.
package inference
