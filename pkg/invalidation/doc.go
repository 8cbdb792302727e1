// Package invalidation is the queue: push, claim, finish, fail, retry, expire, cancel, compact. It is the only
// writer of entries, ready rows, lock records, results and failures.
//
// # Words
//
// An entry is one unit of work in a typed queue; each queue has a table of its own, penstock.entry_<name>.
// Entries with the same lock key form a group: one lock record covers them, they run on one node, first in, first
// out. An entry without a lock key is solo; its key is "#" and its id. A ready row says that a key has something
// to claim, and is all that a claim scans. Ready rows stand in lanes (queue, priority, flow), in the order of pos.
// A lock record says which node computes a key, under which token. A seat is a thread of a node that waits for the next entry of
// a queue: a push that takes it hands its entry over, and makes the lock record itself. Tokens grow with every lock of a key; every
// write about a running entry names one, and counts only while the record still carries it. A load is pushes that go together.
//
// # States
//
//	            due_at to come                    claim
//	push ──────────────► initial ──promote──► ready ──────► locked ──► done        (result row)
//	  │                     ▲                 ▲  │             │  ├──► failed      (failure row)
//	  └─────────────────────┼─────────────────┘  │             │  └──► expired, cancelled (result row)
//	                        │      release, recover            │
//	                        │   ◄────────────────┼─────────────┤
//	                        └────────────────────┼─── retry ◄──┘
//	                                             └──► disabled (priority -1, no ready row) ──enable──► ready
//
// Stored are initial and pending. Pending and covered by a lock is computing; the rest of initial and pending is
// awaitingCompute, so initial + pending = computing + awaitingCompute.
//
// # Transitions
//
//	transition                        file         who calls it
//	push      → initial, ready        push.go      any client, in its own transaction
//	hand over → locked                seat.go      the push of one entry, to a node that waits for it
//	promote   initial → ready         promote.go   elected leader
//	claim     ready → locked          claim.go     scheduling threads
//	finish    locked → done           finish.go    processing threads, batched over the node
//	retry     locked → initial        retry.go     processing threads, after an error
//	fail      locked → failed         fail.go      processing threads, when no attempt is left
//	release   locked → ready, initial retry.go     drain, shutdown, no capacity, snooze
//	remove    locked → expired, cancelled  remove.go  processing threads
//	expire    initial, ready → expired     expire.go  elected leader
//	recover   locked → ready          recover.go   elected leader, for a node that died
//	cancel    initial, ready → cancelled   SQL        operators, through pkg/operator or psql
//	disable, enable                   SQL          the same
//	compact   ready entries of a key → one  compact.go  push, operators
//
// Around them: define.go (typed queues, synced with the registry), handler.go (what a handler's error asks for),
// progress.go (progress and checkpoints under the same fence), pushback.go (hold a queue or a flow back), hint.go and
// listen.go (wake-ups after commits), pause.go and weight.go (the settings that nodes apply), limit.go (refunds),
// outcome.go (how an entry ended), retention.go (partitions, and rows without a purpose). The functions of operators
// (pauses, limits, bulk operations, explain) are in pkg/operator.
//
// # Who waits for whom
//
// Claims and sweeps pass by what others have locked. Endings lock records in key order, and wait only for a sweep,
// a checkpoint or an operator that holds one of them FOR KEY SHARE, which in turn wait for nobody. Pushers lock at most one ready row of a
// key and wait only where the caller asked for it: for an uncommitted push with the same idempotency or unique key.
package invalidation
