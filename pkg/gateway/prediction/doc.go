// Package prediction serves Replicate's predictions: each is an entry of the queue of its model, and a row that
// has what clients of Replicate want to read of it.
//
//	POST /v1/predictions ──► row + entry, one transaction ──► runs as every entry ──► output, webhook
//	          └── Prefer: wait: until the entry has ended, at most 60 s
//
//	routes.go    what clients may ask for, and errors as problem details (RFC 9457)
//	store.go     the rows, joined with what is known of their entries
//	view.go      a prediction as clients see it
//	payload.go   input to payload and result to output, for each protocol of workers
//	wait.go      requests that wait
//	stream.go    output as server-sent events, for one client
//	follow.go    pieces of output to events, from any event on
//	beat.go      one statement for the output of all streams
//	webhook.go   deliveries, pushed once for each prediction that has ended
//	sweep.go     removes predictions whose outcome the queue no longer keeps
//	duty.go      the duties of the service, and how they rest while no request needs them
//
// A prediction is known as long as the queue of its model keeps the outcome.
package prediction
