// Package invalidation is the queue: push, claim, finish, fail, retry, expire, cancel, compact. It is the only Go
// package with statements that write entries, ready rows, lock records, results and failures; the SQL functions of the
// schema write them too. Its name is that of the invalidation queues that it began with, whose entries said that
// computed values are out of date: entries may be any work.
//
// # Words
//
//	entry        one unit of work in a typed queue; each queue has a table of its own, penstock.entry_<name>
//	key          the lock key of an entry. Entries with the same key form a group: one lock record covers them, they
//	             run on one node, first in, first out
//	solo         an entry without a lock key; its lock record has the key "#" and the id
//	ready row    a row of penstock.ready: the key, or the solo entry, may be claimed. A claim scans nothing else
//	lane         queue, priority and flow. Ready rows of a lane are ordered by position
//	flow         the tenant, or another unit of fairness, that an entry belongs to
//	position     the order of ready rows within a lane: the id of the entry, or a later number for one that came again
//	lock record  a row of penstock.lock: which node runs a key, under which token, and which entries it covers
//	cover        a lock record covers the entries of its key up to an id; later ones wait for the next lock
//	token        the fencing token of a lock record. Tokens grow with every lock of a key; each write about a running
//	             entry names one, and takes effect only while the record still carries it
//	claim        takes ready rows of lanes and inserts lock records. It deletes the rows first (lanes of solo entries)
//	             or locks them first (lanes with keys); the node keeps for each lane which of the two
//	contended    another claimer is in the lane, or holds a limit exclusively
//	headroom     the locks that the limits of a queue leave; queue-wide if all lanes share the limit
//	weight       of an entry: how many times the units of each max_units of its queue it takes while it runs; a rate
//	             counts entries. That of a flow, or of a queue (its setting priority), is its share beside others
//	priority     of an entry: 0 to 9, the band in which it is claimed, higher first
//	name         of an entry, optional (name of the push): entries with one name can be listed, paused, disabled and
//	             bounded together. Entries of a cron job have the name of the job, those of a batch "batch:" and its
//	             id
//	rate kind    the strongest token bucket among the limits of a queue: none, shared, or one for each key
//	blocked      a lock key whose entries do not run since one of them failed (Config.OnFailure), until it is
//	             unblocked
//	low water    the position from which the next claim of a lane may begin
//	sweep        deletes ready rows of keys that are locked
//	delayed      a ready row that may not be claimed before a time (not_before): its entry was released with a delay
//	throttled    a queue or flow from which no node claims for a while, by order of a handler (ThrottleQueue); a lock
//	             key whose token bucket is empty, until it has the units of an entry
//	quantum      how many entries, and how long, a lock may cover before its key goes to the end of the lane
//	ending       the end of one run of an entry: done, retry, fail, release, postpone, yield, expire or cancel
//	outcome      the end of an entry: done, failed, expired or cancelled
//	settle       record endings under their tokens
//	attempt      a run that ended in an error; the retry policy bounds them. A crash, the death of a node during a
//	             run, is counted apart
//	release      make a locked key ready again at its old position, without spending an attempt
//	postpone     the ending that makes an entry initial until a later time, without spending an attempt (Snooze)
//	recover      release locks in place of a node that died
//	lease        how long a node lives without a heartbeat. Its locks are recovered when it has lapsed
//	term         the period of one elected leader; its duties write only within it
//	tid          where a row is on disk: a finish goes there instead of through an index
//	yield        the ending of a lock whose quantum is over: its key goes to the end of the lane, without spending an
//	             attempt
//	poison       the class of the failure of an entry that has as many crashes as its queue allows, or whose runs
//	             lost the devices of instances (pkg/inference). It is dead-lettered: moved to the failures without a
//	             further attempt
//	node         a process with a row in penstock.node and a lease: a task node or a gateway
//	task node    a node that claims entries and runs them by handlers
//	handler      the code that runs an entry; its error decides the ending
//	gateway      a node that takes requests whose clients wait, and sends them to workers (pkg/gateway)
//	leader       a process that serves the HTTP API. One of them is elected, for a term: it recovers, promotes and
//	             fires schedules, among other duties
//	maintenance  what the elected leader does to keep queues in order beside recovery and schedules: due times, bulk
//	             operations, retention, compaction, counts and samples, and the brake on pushes (pkg/maintenance)
//	application  a name that queues have; a task node serves the queues of one application
//	model        a name with a protocol and settings, by which entries are sent to workers
//	worker       a server that runs a model
//	instance     one worker that serves a model, with an address and a number of slots
//	slot         the right to one call at a time to an instance
//	permit       the right of a node to hold one more lock, or a slot for one more entry; taken before the claim
//	batch        pushes of one process that are committed as a group (group commit). Any other batch is named with its
//	             content: of endings (one transaction), of entries (one run or one call), of requests (lines of a file
//	             that a client of a gateway has sent, pkg/gateway/openaibatch); a batch queue splits input into
//	             entries (pkg/batch)
//	hint         a notification that a lane has work. Hints may be lost: nodes poll
//
// # States
//
//	            due_at to come                    claim
//	push ──────────────► initial ──promote──► ready ──────► locked ──► done        (result row)
//	  │                     ▲                 ▲ ▲ │            │  ├──► failed      (failure row)
//	  └─────────────────────┼─────────────────┘ │ │            │  └──► expired, cancelled (result row)
//	                        │                   └─┼── release, ┤
//	                        │                     │   recover  │
//	                        └─────────────────────┼── retry, ──┘
//	                                              │   postpone
//	                                              └──► disabled (priority -1, no ready row) ──enable──► ready
//
// Stored are initial and pending. Pending and covered by a lock is computing; the rest of initial and pending is
// awaitingCompute, so initial + pending = computing + awaitingCompute.
//
// # Transitions
//
//	transition                        file         caller
//	push      → initial, ready        push.go      any client, in its own transaction
//	promote   initial → ready         promote.go   elected leader
//	claim     ready → locked          claim.go     scheduling threads
//	finish    locked → done           finish.go    settling threads, in batches over the node
//	retry     locked → initial        retry.go     settling threads, after an error
//	fail      locked → failed         fail.go      settling threads, when no attempt is left
//	fail      ready → failed          noinstance.go  elected leader: the model has had no instance for too long
//	fail      ready → failed          unreadable.go  scheduling threads: no claim can read the entry
//	fail      locked → failed         recover.go   elected leader: poison, too many nodes died with it
//	release   locked → ready          retry.go     drain, shutdown, no capacity: at the old position, delayed or not
//	postpone  locked → initial        retry.go     a handler that snoozes
//	remove    locked → expired, cancelled  remove.go  settling threads
//	expire    initial, ready → expired     expire.go  elected leader
//	recover   locked → ready          recover.go   elected leader, for a node that died
//	unlock    locked → ready          unlock.go    operators, by hand (ForceUnlock)
//	cancel    initial, ready → cancelled   cancel.go  elected leader: requested while the entry ran
//	cancel    initial, ready → cancelled   SQL        operators, through pkg/operator or psql
//	disable, enable                   SQL          the same
//	compact   ready entries of a key → one  compact.go  elected leader, where a queue falls behind; users of Compact
//
// Around them:
//
//	queue.go, config.go, define.go  a queue and its settings; typed queues, synced with the registry
//	list.go, handles.go             all queues, with what is set for flows; handles that pushes share
//	entry.go, lane.go, errors.go    an entry and its lock; a lane; the errors that callers tell apart
//	document.go, numbers.go         which JSON the database can hold
//	push_sql.go, groupcommit.go     the statements of a push; pushes that share a commit
//	claim_sql.go, claim_read.go     the statements of a claim and their answer; reclaim.go: a claim without an answer
//	quantum.go, sweep.go            how much of a key a lock covers; ready rows of keys that are locked
//	handler.go, interrupted.go      what the error of a handler asks for, and one of a database that went away
//	statement.go                    queues that say in SQL what to run
//	ending.go, arrays.go            the endings, a constructor for each verb; the arrays in which statements take them
//	settle.go, callback.go          the transaction that records endings of all verbs; the callback that is part of it
//	unlock.go                       the end of a lock: its key is ready again where it has more entries
//	progress.go, output.go          progress, checkpoints and streamed output, under the same fence
//	charge.go, limit.go             what a run used of a shared resource; refunds of token buckets
//	throttle.go, pause.go, weight.go  throttles of a queue or a flow; the settings that nodes apply
//	node.go, hint.go, listen.go     heartbeats and their orders; wake-ups with commits and after them
//	nextwork.go                     when a queue has entries to promote, to expire, to cancel or to fail
//	misdated.go                     entries that were retried while the database's clock was ahead
//	outcome.go, entrywatch.go       the outcome of an entry, and clients that wait for it
//	retention.go, trace.go          partitions, and rows without a purpose; the trace of an entry
//
// The functions of operators (pauses, limits, bulk operations, explain) are in pkg/operator.
//
// # Locking and waiting
//
// Claims and sweeps skip rows that other transactions have locked. Endings lock records in key
// order (finishes of solo entries alone in the order of the disk), and wait only for a sweep, a checkpoint or an
// operator that holds one of them FOR KEY SHARE; none of these waits for an ending. A push locks at most one ready row
// of a key and waits only for an uncommitted push with the same idempotency or unique key.
package invalidation
