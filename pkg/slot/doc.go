// Package slot has the statements about slots that nodes send, and the count of those that a node holds. Nodes
// lease slots, hand them over, give them back and put them in doubt. Task nodes (pkg/inference) and gateways
// (pkg/gateway) send the same statements and count alike. Which slots there are to lease, and who may hold how
// many, is decided by the functions of the schema (inference.sql, gateway.sql).
//
// A slot is the right to one call at a time to an instance. A slot that is held is a row of penstock.slot; there is
// none for a free one. No other package of Go has statements that change these rows, or those of penstock.slot_demand;
// functions of the schema change them too, for a gateway that leaves and for operators.
//
// # Rules for each holder
//
//   - Slots may be used until the lease of the node lapses, by the clock of the database. An answer says how much of it
//     is left; that counts from before the question was sent (Holding).
//   - A slot is named with its token, which a slot that changes hands does not keep. A statement about a slot that is
//     another node's meanwhile changes nothing: one without an answer may be sent again.
//   - A statement without an answer may be carried out at any later time. Slots that it returns or hands over are not
//     used again. After a lease or an adoption without one the node asks what it holds (Holder.Slots).
//   - A slot whose call may still run, although the node does not follow it, is put in doubt. It takes room of its
//     instance, and is in no node's share, until a probe of the instance says otherwise, or the node that follows the
//     run on adopts it.
//
// # How task nodes and gateways differ
//
//	             task nodes                              gateways
//	lease        Lease: of any instance                  LeaseWithin: no more than an instance may get of calls
//	give back    Return: free for all, of many models    HandOver, Offer: to the nodes that miss some
//	shares       Shares                                  SharesAndShortages: busy slots are given up as well
//	demand       lapses after 3 s                        Withdraw: others keep slots back for it
//	preemption   TakePreemptions: end these runs         Preempt: order the end of runs
//
// Which call gets a slot is decided in those packages, and differs: a task node takes permits before it claims, and
// claims nothing without one; at a gateway requests are there, and wait for slots.
//
// # How slots are counted
//
// A slot of a node is in one state. Ledger has those that its calls may use, one ledger for each instance, and Leaving
// those that they may not use any more, of which the database is to be told:
//
//	               Add             Occupy
//	database ───────────────► idle ─────► busy
//	    ▲                      │ ▲  Free   │
//	    │                      │ └─────────┤
//	    │ Return, HandOver,    │ Drop      │ Drop
//	    │ Offer, Doubt         ▼           ▼
//	    └───────────────────── leaving ◄───┘
//
//	held = idle + busy     a slot that leaves gets no call, and no answer of the database brings it back
//
// Three other counts are of other things. The database counts the rows of all nodes: a slot that leaves is a row until
// a statement about it is carried out, and a lease that has no answer yet is a row before any node knows of it. Permits
// (pkg/inference) count entries that are claimed, for which idle slots are kept: a slot may carry several. Calls in
// flight (pkg/gateway) are those too whose slot was lost while they run.
//
// # Files
//
//	holder.go      who holds slots, and how a slot is named
//	lease.go       leases, adoptions, and what the node holds
//	giveback.go    slots that go back, or to other nodes
//	demand.go      what nodes miss, and what each may hold then
//	preempt.go     the end of runs whose slots online requests wait for
//	doubt.go       slots in doubt, those of dead nodes, and when these are free
//	warm.go        plans of the statements, made ahead of their use
//	ledger.go      the slots of an instance that calls of the node may use
//	leaving.go     the slots of a model that they may not use any more
package slot
