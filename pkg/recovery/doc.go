// Package recovery holds the duties of the elected leader that keep a queue healthy: it frees the
// locks of dead nodes, promotes and expires entries, drops rows past their retention, and counts.
//
//	duty        work                                                      delay
//	Locks       frees locks that no node will settle; removes dead nodes  within 2 s after the lease lapsed
//	Deadlines   promotes due entries, expires late ones, carries out      due: at once; late: within 2 s
//	            requested cancels, fails entries whose model has
//	            no instance
//	Operations  carries out bulk operations                               as throttled
//	Retention   makes and drops partitions, deletes rows left over        minutes
//	Compaction  merges waiting entries of mergeable queues that fall      10 s
//	            behind
//	Statistics  counts the depth of bounded queues                        about every second
//	Samples     records the state of each queue, for status pages         about every five seconds
//	Brake       refuses pushes where there is nearly no room              within seconds
//
// Each is a Run(ctx) error that blocks until ctx ends, or until its passes have failed for so long
// that another leader should try. A duty writes through a Fence only: its writes commit within the
// term for which it was started.
//
// # Stuck locks
//
//	locks ──┐
//	        ├─► Diagnose ──► stuck ──► (suspended?) ──► free under fence, a bounded number each pass
//	nodes ──┘
//
// A lock is stuck when its node is dead or unknown, or when a node that is alive has left it out of
// two heartbeats in a row. A lock that its node lists is not freed, however old it is: there is no
// limit on how long an entry runs.
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
// trouble. So recovery suspends itself, see suspend.go.
package recovery
