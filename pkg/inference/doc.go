// Package inference runs entries of inference queues on workers: it keeps the registered models and
// instances, counts slots, runs calls, follows runs beyond the life of a node, and puts entries
// together into batches. Package worker speaks the protocols.
//
// # Slots
//
// A slot is the right to one call at a time to an instance, of one entry or of a batch. A held slot is a row of
// penstock.slot with a token; there is none for a free one. The statements are those of package slot, which
// gateways send as well; the slots that a node holds are counted by the ledgers there. Nodes lease slots in blocks
// (leasing.go), and count entries in them by permits (slots.go, with the arithmetic of ledger.go). A slot, as its
// node sees it:
//
//	free ──1──► idle ──2──► busy ──4──► in doubt ──7──► free, or busy at the node that follows the run on
//	 ▲          │  ▲         │ │
//	 │          5  └────3────┘ 6
//	 │          ▼              │
//	 └───8── goes away ◄───────┘
//
//	1  leased, in a block (leasing.go)
//	2  assigned to a call (assign.go)
//	3  the call ended
//	4  the node follows the call no more, and it may still run at the worker
//	5  idle for a while, beyond the node's share while others go without, its instance takes no calls or has fewer
//	   slots now, or a gateway misses slots
//	6  the call ended, and a gateway is to have the slot (handover.go)
//	7  freed when no call can run in it (stale.go), or adopted with the run (remote.go)
//	8  returned, or handed over; until then it is the node's by the database (slot.Leaving)
//
// A permit of an entry:
//
//	       Take, before the claim              assign
//	none ─────────────────────────► unassigned ──────► assigned to a busy slot
//	 ▲                               │      ▲            │
//	 └───────────────────────────────┘      └────────────┘
//	     the run of the entry has ended        the call ended, or goes on without the entry
//
// Permits that are unassigned are covered by idle slots, one each, or as many as a batch has entries. The pool of
// pkg/gateway is another thing: there requests wait for slots, in the order of their flows; here no entry is claimed
// before it has a permit.
//
// What keeps calls within slots:
//   - a lease is given under the instance's row, by number and by count, never beyond its slots;
//   - a node begins calls with what it holds only while its own lease cannot have lapsed by the database's clock; a
//     call that has begun runs through, so that the worker of a node that alone is cut off may get a call beyond its
//     slots;
//   - a slot is freed by others only when its node's lease has lapsed or its call is in doubt, and then only as the
//     worker's own count allows, or when no call could have lasted so long (stale.go). Just after the database did not
//     answer, or its clock stepped ahead, a lapsed lease says nothing.
//
// A run that a worker accepted is stored before it is followed (remote.go), or, where the database cannot be reached
// then, meanwhile or when it is handed over. The node that claims its entry next adopts its slot and follows it on.
// Since that slot is taken, the claim needs a permit without one: SlotPool.takeAbandoned.
//
// # Words
//
//	model     what calls are made of: a name with a protocol and settings, to which queues refer
//	instance  one worker that serves a model, with an address and a number of slots
//	permit    a place in a slot for one entry, taken before its claim; a permit of pkg/tasknode is taken besides
//	suspect   an entry one of whose calls ended with the device lost (suspect.go)
//	in doubt  a slot whose call may still run at the worker, although no node follows it
//
// # Files
//
//	register.go, registry.go   models and instances: changed and read by every process
//	slots.go, leasing.go       the slots that the node holds: leased, renewed, given back
//	ledger.go, affinity.go     permits, and which slot an entry gets; pure
//	assign.go                  the slot of one call: assigned, released, in doubt
//	breaker.go, quarantine.go  instances that get no calls, by what calls said; breaker.go is pure
//	handover.go                slots that go to gateways
//	preempt.go                 runs that are ended for online requests
//	residual.go                how long calls that run will take yet, for the autoscaler
//	run.go, conclude.go        the life of an entry, and what each outcome means for it
//	record.go                  what a call says of its instance and its entry, and who pays for it
//	waitlist.go, batcher.go    entries that share a call or wait for a worker that has loaded what they need
//	remote.go, reports.go      runs that outlive their connection or their node
//	reattach.go                the life of an entry whose run an earlier lock began
//	aborted.go                 generations that an instance gave up: is it about to go away?
//	blame.go                   entries for whose failures their instances were excused, and how often
//	suspect.go                 entries whose calls ended with the device lost: which of them is to blame?
//	labels.go                  instances with the labels that an entry asks for
//	objects.go, objects_s3.go  results that are too large for a row
//	health.go                  probes of instances
//	sweep.go                   between probes: deletes what is too old, and what entries have left
//	stale.go                   slots that no node follows: which of them are free? pure
//	starting.go                instances that are not ready yet: may requests wait for them?
//	usage.go                   what calls used of workers, by the hour
//	service.go, tuning.go      all of it together, for a node; the figures by which it works
package inference
