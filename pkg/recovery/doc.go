// Package recovery holds the duties of the elected leader that keep a queue healthy: it frees the locks of dead
// nodes, keeps due times and deadlines, removes what its retention has passed, and counts.
//
//	duty        what it does                                              how soon
//	Locks       frees locks that nobody will settle; removes dead nodes   within 2 s after the lease lapsed
//	Deadlines   promotes due entries, expires late ones                   due: at once; late: within 2 s
//	Operations  carries out bulk operations                               as throttled
//	Retention   makes and drops partitions, sweeps what is left over      minutes
//	Compaction  merges waiting entries of mergeable queues that fall behind  10 s
//	Statistics  counts the depth of bounded queues                        about every second
//	Samples     writes down how each queue stands, for all who show it    about every five seconds
//
// Each is a Run(ctx) error that blocks until ctx ends, or until its passes have failed for so long that another
// leader should try. Whatever a duty writes, it writes through a Fence: within the term for which it was started.
//
// # Stuck locks
//
//	locks ──┐
//	        ├─► Diagnose ──► stuck ──► (suspended?) ──► free under fence, a bounded number each pass
//	nodes ──┘
//
// A lock is stuck when its node is dead or unknown, or when a node that is alive has left it out of two heartbeats
// in a row. A lock that its node lists is left alone, however old it is: there is no limit on how long a task runs.
//
// # Crashes and poison
//
// An entry that was running when its node died counts a crash. Which entries were running the last heartbeat says; where
// fewer ran than the node has threads, those that can have begun since are counted as well. An entry with as many crashes
// as the crash limit of its queue is dead-lettered as poison. A node that is heard again after its lease had lapsed was
// stopped or cut off and did not die: the crashes that were counted then are taken back (penstock.take_back_crashes).
// An entry that one more crash makes poison is a suspect: nodes run one of them at a time, so that the next death tells.
//
// A lapsed lease is evidence against the node only if the node could have renewed it. When the database was slow,
// restarted or out of reach, or when its clock jumped, nodes look dead that are well, and to free their locks would
// run everything twice just when the database can bear it least. So recovery suspends itself, see suspend.go.
package recovery
