// Package worker speaks the protocols of inference servers over HTTP. It knows
// neither a database nor a queue: a Call and an Instance are all that it needs.
//
// The life of a call:
//
//	Submit ──▶ Done(result)        the worker answered
//	   │  ├──▶ Accepted(remote)    the worker runs it: store the remote id, then Follow
//	   │  ├──▶ Busy, NotReady      nothing ran: another instance may take it, no attempt is spent
//	   │  ├──▶ Rejected            the worker refuses this entry for good
//	   │  ├──▶ Failed(class)       it ran and failed: an attempt is spent
//	   │  ├──▶ Cancelled           the worker is known to have stopped it
//	   │  └──▶ Unknown             it may have run: the model's declared policy decides
//	   ▼
//	Follow ──▶ any of the above, or Accepted again when the run must be handed over
//
// An outcome never says more than the worker said: a connection that broke
// after the request was sent is Unknown, not Failed, because the work may be
// done. Outcome.MaybeRunning tells apart whether the worker is free again.
//
// # Files
//
//	adapter.go, outcome.go     the interface that each protocol implements, and what a call can come to
//	model.go, header.go, template.go
//	                           how the instances of a model are spoken to
//	generic.go, cog.go, oip.go, oipgenerate.go, openai.go, openaiprobe.go
//	                           the protocols; oipbatch.go, embeddings.go and codec.go put several entries into one
//	                           call, and choices.go counts the sequences that a generation computes
//	transport.go, classify.go  one HTTP exchange, and what an answer that is no success means
//	address.go                 addresses at which no worker can be
//	online.go                  both for callers that exchange bytes with a worker themselves, such as the gateway
//	secret.go                  keys by reference: an environment variable or a file
//	stream.go, assembly.go, chunks.go
//	                           server-sent events: read, put together, written to a log
//	follow.go, report.go       accepted runs: followed by polls, ended by reports
//	load.go                    the load figures that workers report
//	backoff.go                 how long an instance that had no room gets no calls
//
// Everything that decides (classes, limits of a run) is pure and takes now. Everything that talks
// HTTP is in transport.go and the protocol's own file.
package worker
