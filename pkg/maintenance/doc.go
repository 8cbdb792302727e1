// Package maintenance has the duties of the elected leader that keep queues in order: due entries are promoted, late
// ones expire, operations of operators are carried out, old rows go, and pushes are refused before there is no room.
// Locks of dead nodes are the subject of pkg/recovery, schedules that of pkg/cron.
//
// Each duty is a Run(ctx) error that blocks until ctx ends, or until its passes have failed for so long
// that another leader should try. A duty writes through a Fence only: its writes commit within the
// term for which it was started. Duties share no memory but the newest sampling, which Brake takes from Samples.
//
//	duty        a pass is made          reads                            writes
//	Deadlines   when the next work is   of each queue the first due      entry and ready (promoted), result (expired,
//	            due, and after 500 ms   time and deadline, requested     cancelled), failure (the model has no
//	            at the latest           cancels, outages of its model;   instance), model_outage
//	                                    locks past their deadline
//	Operations  each second; at once    operation, pause                 up to 500 entries or failures a step, the
//	            while one goes on                                        operation's progress; pauses that end
//	Retention   each minute; sooner     retentions and partitions;       makes partitions for a week and drops old
//	            while rows are left     pages of the tables of keys      ones; deletes old rows, firings of cron jobs
//	                                    and of firings                   too, and keys of entries that are gone
//	Compaction  every 10 s              of mergeable queues up to        one entry in place of those of a key, where
//	                                    10,000 entries, and locks        more than ten wait for each lock held
//	Depths      each second; for 1/20   the entries of queues with a     depth
//	            of the time at most     capacity
//	Samples     every 5 s; for 1/10     of each queue, for 10 s a pass   sample; each minute sample_minute
//	            of the time at most     in turn, counts up to 10,000,
//	                                    ages and reasons; the server,
//	                                    slots, degradations
//	Brake       every 2 s               the disk, each 15 s the size     queue.refusal
//	                                    of the database; the newest
//	                                    sampling, or its own counts
//
// A statement that the server refuses is logged, and the next pass tries it again: it would be refused under another
// leader as well. A pass fails where the database is unavailable or the term is over.
//
//	deadlines.go   promotes, expires, cancels and fails entries at their time
//	deadlines_read.go  reads when that is, however many queues there are and however slow the database is
//	overrun.go     reports entries that run long after their deadline
//	misdated.go    makes entries due in time that were retried while the clock was ahead
//	operations.go  steps bulk operations, and ends pauses
//	retention.go   makes and drops partitions, deletes rows without a purpose
//	compaction.go  merges entries of queues that fall behind
//	depths.go      counts queues with a capacity; pushes are admitted by the last count and two counters since
//	samples.go     records the state of each queue, for lists, the live view, metrics and the brake
//	brake.go       which pushes are refused, and why
//	brake_storage.go, brake_depths.go  what it knows of disk and database, and of queues without a capacity
//	pass.go        what duties share: the loop, the errors that end a pass, a long transaction within the term
//	config.go      their settings
package maintenance
