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
// # Slots
//
// A slot is the right to one call at a time to an instance, of one entry or of a batch. A held slot is a row of
// penstock.slot with a token; there
// is none for a free one. Nodes lease slots in blocks (slots.go), and hand them out as permits (permit.go):
//
//	            Take, before the claim       assign                 the call ended
//	leased ──────────────► permit ──────────► busy with an entry ──────────► permit ──► given back, leased still
//	  ▲                                        │
//	  │ lease_slots                            └─ the call may still run: in doubt ──► freed, or adopted by
//	free ◄── idle for a while, beyond the node's share, instance shrank                whoever follows the run on
//
// What keeps calls within slots:
//   - a lease is given under the instance's row, by number and by count, never beyond its slots;
//   - a node uses what it holds only while its own lease cannot have lapsed by the database's clock;
//   - a slot is freed by others only when its node's lease has lapsed or its call is in doubt, and then only as the
//     worker's own count allows, or when no call could have lasted so long (health.go).
//
// A run that a worker accepted is stored before it is followed (remote.go). The node that claims its entry next adopts
// its slot and follows it on. Since that slot is taken, the claim needs a permit without one: SlotPool.takeAbandoned.
//
// # Where what is
//
//	register.go, registry.go   models and instances: changed by anybody, read by every process
//	slots.go, lease.go         what the node holds, and what it leases and gives back
//	permit.go, affinity.go     permits, and which slot an entry gets; pure
//	dispatch.go, conclude.go   the life of an entry, and what each outcome means for it
//	join.go, batch.go          entries that share a call or wait for a worker that has loaded what they need; batch.go is pure
//	remote.go, callbacks.go    runs that outlive their connection or their node
//	health.go                  probes, and slots that nobody answers for
//	service.go                 all of it together, for a node
//
// Everything in this package that decides (classes, breaker, batches, stale
// slots, limits of a run) is pure and takes now; everything that talks HTTP is
// in transport.go and the adapter's own file.
package inference
