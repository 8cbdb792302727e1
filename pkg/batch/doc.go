// Package batch works through a set in parts: the items of a list, or the rows of a query.
//
//	          split                  feed: at most Window parts at a time
//	a set ───────────► parts, waiting ─────────► entries of the queue ──Map──► part results ──Reduce──► result
//	                        ▲                          │
//	                        └──── pause, release ──────┘
//
// # Who does what
//
//	schema    its functions make, pause, resume, cancel and retry batches for whoever asks
//	Handler   task nodes: runs the entries of a batch queue with a Work of the user's
//	Stepper   the elected leader: puts parts into the queue, notes which ended, completes
//
// # What holds
//
// A part's result is recorded under the token of its entry, apart from the entry's own end. So a part that was
// recorded is not run again, whatever dies afterwards; one that was not is run again, as any entry is.
//
// Whoever ends a part writes the part's own row and no other. What is left is counted from the parts when somebody
// asks; there is no counter on which they would meet.
//
// The completion entry is pushed once, when no part is left, in the transaction that notes it in the batch's row. It
// comes however the batch ended, and says how. Where its queue has the same Handler, it runs Reduce over the results,
// in the order of the parts, if all ended well. A retry, which runs the parts again that did not, leads to another one.
package batch
