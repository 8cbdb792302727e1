// Package openaibatch serves OpenAI's files and batches: a batch is the lines of a file, each an entry of the
// queue of its model, with one progress, and two files in which the answers and the errors lie at the end.
//
//	POST /v1/files ──► chunks ──validate──► lines ──feed──► entries of the queue ──collect──► output and error file
//	                                          │     (at most windowLines at a time)                  │
//	                                          └────────────── cancel, expiry ────────────────────────┘
//
// # Parts of the program
//
//	file.go      files in the database, in chunks: no file is held in memory
//	upload.go    the routes of files
//	quota.go     what an owner may have
//	batch.go     batches as clients see them
//	routes.go    the routes of batches
//	line.go      reads the lines of an input file
//	worker.go    takes turns at batches; any number of gateways may run it
//	sweep.go     removes old batches and expired files
//	validate.go  feed.go  collect.go  finish.go    the steps of a turn
//
// # Guarantees
//
// A turn is one transaction under the lock of its batch: a gateway that dies in it leaves nothing of it, and
// another one takes the turn again. So each line becomes one entry, and each entry one line of one of the two
// files. Entries run at least once, as all entries do.
//
// A line whose entry has not begun when the batch expires ends as batch_expired; one that runs then may end.
// A cancelled batch keeps what had ended.
package openaibatch
