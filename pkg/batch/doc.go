// Package batch works through a set in parts: the items of a list, or the rows of a query.
//
//	          split                  feed: at most Window parts at a time
//	a set ───────────► parts, waiting ─────────► entries of the queue ──Map──► part results ──Reduce──► result
//	                        ▲                          │
//	                        └──── pause, release ──────┘
//
// # Parts of the program
//
//	schema    its functions create, pause, resume, cancel and retry batches; clients and operators call them
//	Handler   task nodes: runs the entries of a batch queue with the user's Work
//	Stepper   the elected leader: pushes parts as entries, records their ends, completes batches
//
// # Guarantees
//
// A part's result is recorded under the token of its entry, before the entry itself ends. A part
// whose result was recorded is not run again, even if its node dies before the entry ends; any
// other part is run again, as any entry is.
//
// The end of a part writes the part's own row and no other. The number of parts left is counted
// when it is read: a counter would be a row for which the ends of all parts compete.
//
// The completion entry is pushed once, when no part is left, in the transaction that records it in
// the batch's row. It is pushed for each outcome of a batch, and names the outcome. Where its queue
// has the same Handler, it runs Reduce over the results, in the order of the parts, if all parts
// are done. A retry runs the failed parts again and leads to another completion entry.
package batch
