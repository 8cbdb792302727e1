// Package tasknode runs entries: a few scheduling threads claim them, many processing threads run their
// handlers, and a few settling threads record how the runs ended.
//
// # The way of a job
//
// A job is a lock on its way through the node. Five files tell its life, in this order:
//
//	claim.go        lease the lanes that rank first, claim from them, accept what the claim brought
//	reservation.go  before the claim: a permit, a place under the queue's limit and the admission of the gates, for
//	                each lock
//	job.go          each claimed lock becomes a job with its part of the reservation, and waits for a thread
//	run.go          a thread takes the job and runs its entries, oldest first, each run under a context of its own
//	settle.go       endings are recorded in batches; with the last one of a lock its reservation is released
//
// Beside them:
//
//	node.go, config.go      the node: its settings, its start and its end
//	register.go             the row of the node, and the queues that it serves
//	lanes.go                the table of lanes
//	lane.go                 the state of one lane
//	lane_lease.go           its lease, and the ways in which one ends
//	lane_rest.go            for how long it is not claimed from
//	lane_marks.go           the positions at which its claims begin
//	poll.go                 finds lanes that have work
//	rank.go, affinity.go    which lane is claimed from first; giveway.go: which groups give way to others
//	holdings.go             counts what the node holds, and how long runs take
//	waiting.go, threads.go  the line of jobs that no thread has taken yet, and the threads
//	handback.go             locks that wait for a thread for too long go back to their positions
//	jobs.go                 every job from its claim to its recorded end
//	call.go, suspect.go     the call of a handler, and the entry that another crash would end
//	charge.go               what jobs cost the flows of their lanes
//	settler.go, deferred.go the endings that wait to be recorded, and those whose rows another transaction has locked
//	heartbeat.go, lease.go  the lease of the node: renewed, with the orders that come back, and lost
//	handedback.go           why handlers have handed entries back, for heartbeats
//	stats.go, trace.go      counters, and spans of traced entries
//
// # The life of a job
//
//	claimed ────────► waiting ────────► running ──┐
//	   │                 │               │  ▲     │ the next run
//	   │ no entries,     │ late, drain,  │  └─────┘
//	   │ late, or a run  │ lease or      │ no run is left, or
//	   │ of its key      │ lock lost     │ the rest is handed back
//	   ▼ goes on         ▼               ▼
//	ended: the settler has its last ending ──► recorded, or left to recovery
//
// A run is one call of a handler. It has one entry, or all entries of the lock where the handler takes batches
// (job.perRun). With its first run the job has begun: from then on heartbeats list its lock as running, and a crash is
// counted if the node dies. A job that has ended runs nothing more; its permit is held, and heartbeats list its lock,
// until its last ending is recorded or left to recovery.
//
// # The life of a lane
//
//	      hint, poll, a key that is ready again          ranked first (Ranker, Affinity)
//	asleep ────────────────────────────────────► awake ─────────────────────────────────► leased
//	   ▲                                           ▲  resting for a while, or not           │
//	   │ drained                                   │ any other end                          │
//	   └───────────────────────────────────────────┴────────────────────────────────────────┘
//
// A lane is asleep (no work is known), awake (it may have work), or leased: one scheduling thread claims from it. One
// that is awake may rest: it is not claimed from for a while. A lease ends in one of these ways (lane_lease.go):
//
//	end        what happened                                    the lane is awake, and
//	unclaimed  the claim did not reach it                       may be leased at once
//	refused    the node had no permit                           may be leased at once: it stays first
//	           a gate, or the queue's limit on this node        rests 200 ms, or until something came free
//	failed     the claim ended in an error                      rests 200 ms
//	contended  another claimer was in it                        rests 2 ms, doubled each time up to 64 ms
//	limited    locks left no headroom under a limit             rests 50 ms, or until something came free
//	           a rate, or it is throttled                       rests for so long, 1 ms to 1 min
//	left rows  it was scanned, but not to its end               may be leased at once
//	rewound    to its end, but rows were left before it         rests 2 ms to 64 ms, and is scanned again from there
//	delayed    to its end, but for rows that are delayed        rests until the first of them is due, 100 ms at most
//	drained    to its end, and nothing is left                  not: it is asleep, unless a hint came meanwhile
//
// Where the reason of a refused or limited lane holds for its queue, all lanes of the queue rest.
//
// A lane that was refused, or limited by locks, wants what running jobs have: a running group whose lane ranks behind
// it gives way after its present entry, and is released at its old position (giveway.go).
//
// # What bounds the node
//
// A permit is needed for each lock that the node holds, from before the claim until its ending is recorded. There are
// as many permits as processing threads, and some more for queues whose runs are short: enough that threads do not
// run dry while the next claim is on its way. So memory is bounded by permits, never by the backlog, and a database
// that cannot be written to stops the claims by itself: endings are kept, and hold their permits.
//
// How long runs take is known from those in which an entry was done. Where they turn long, locks that have waited for a
// thread for longer than a beat are released at their positions, but for one for each thread.
//
// The first lock of a lane of which the node holds no other is urgent: threads take an urgent job and another one in
// turn (waiting.go), and while all threads run jobs one spare thread runs urgent jobs. So the node runs one job more
// than it has threads at most.
//
// # Words
//
//	permit  the right to hold one lock on this node; taken before the claim
//	gate    a further condition on taking entries of a queue: the governor, the slots of a model (Config.Gates)
//	urgent  the first lock of a lane of which the node holds no other
//	epoch   ends when something comes free that a claim may need, or limits change; a lane refused in an earlier one
//	        is tried again, but one that waits for a rate only where limits changed or token buckets have units back
//	busy    of an ending: another transaction has locked a row that it changes; its lock is deferred
//
// # What ends a run early
//
// Its context ends with a cause: ErrFinishBy, ErrRunTimeout, ErrCancelled, ErrDraining when the grace of a
// drain is over, ErrLeaseLost when three quarters of the lease have passed since the start of the last
// heartbeat that was answered. After the last one nothing of the node may touch the world outside, since the
// leader will soon give its entries to others. What a handler lets go on after a cancel ends then as well, and
// with the grace: invalidation.Run.Lasting. Runs of queues with the policy run_through are left alone:
// their calls touch nothing of ours, and the token decides whether their endings are recorded. They end with
// ErrLeaseLost if the node's row was removed, or if their locks were freed: the node asks when it is heard
// again, before it claims anything. That a claim brings a key of which a run has not ended shows that its lock
// was freed as well: the run ends, and the new lock is handed back for a moment. So no key runs twice at once
// on a node.
package tasknode
