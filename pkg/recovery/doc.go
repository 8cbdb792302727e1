// Package recovery is the duty of the elected leader that frees the locks of dead nodes, so that their entries run
// elsewhere. No lock that a live node lists is freed.
//
// # A pass
//
// A pass is made every 500 ms, and at once after one that left stuck locks over. Whether a lease has lapsed is judged
// by the database's clock: by what a pass read, and once more in each write.
//
//	read             judge (pure)                                  write, within the term
//	locks, nodes ──► Diagnose ──► stuck locks ──► Begun.Mark ──┐
//	nodes ─────────► Heard.Overdue ────────────────────────────┼─► lapse, free, take back, remove nodes
//	clocks, nodes ─► Suspender.Judge ──► suspended? ───────────┘   (nothing while suspended)
//
//	step          reads                         writes
//	read          all rows of lock and node;    nothing
//	              the database's clock, and
//	              since when it runs
//	lapse         nothing                       node.beat_at of a node that is not heard since the clock was set back
//	free          queues, if a lock is stuck    deletes lock records, puts ready rows back (Queue.Recover); crashes
//	                                            and may_have_run of entries; failures of poison; node.crashed_entries
//	take back     nothing                       the crashes of entries of a node that is heard again
//	remove nodes  nothing                       deletes rows of nodes that are dead for ten minutes and hold nothing
//
// The duty writes through a fence only: its writes commit within the term for which it was started. It returns if its
// passes have failed for so long that another leader should try.
//
//	locks.go     the duty: a pass, what it reads, and its counters
//	diagnose.go  pure: which locks are stuck, which entries can have begun, which nodes are not heard
//	suspend.go   pure: whether a lapsed lease is evidence that its node died
//	free.go      frees stuck locks in batches; one that cannot be freed is tried again later
//	nodes.go     corrects heartbeats, takes back the crashes of nodes that are heard again, removes dead nodes
//	config.go    the settings
//
// # Stuck locks
//
// A lock is stuck when its node is dead or unknown, or when a node that is alive has left it out of
// two heartbeats in a row. A lock that its node lists is not freed, however old it is: there is no
// limit on how long an entry runs. A pass frees a bounded number of locks; those of a dead node are free within 2 s
// after its lease has lapsed.
//
// # Crashes and poison
//
// An entry that was running when its node died counts a crash. The last heartbeat lists the running
// entries; if fewer ran than the node has threads, those that can have begun since are counted as
// well. An entry with as many crashes as the crash limit of its queue is dead-lettered as poison. A
// node that is heard again after its lease had lapsed was stopped or cut off and did not die: its
// crashes are taken back (penstock.take_back_crashes). That an entry may have run (Entry.MayHaveRun) does not go by
// this count: it is noted of all entries whose locks are freed, and stays. An entry that one more crash makes poison is
// a suspect: a node runs one suspect at a time, so that the next death has one cause.
//
// # Suspension
//
// A lapsed lease is evidence against the node only if the node could have renewed it. When the
// database was slow, restarted or out of reach, or when its clock jumped, leases of healthy nodes
// lapse. To free their locks would run all their entries twice while the database is already in
// trouble. So recovery suspends itself: the comment of Suspender has the rules.
package recovery
