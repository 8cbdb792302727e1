// Package api is Penstock over HTTP.
//
//	POST /v1/queues/{queue}/entries   accept one entry or many      201, or 200 where nothing new came of it
//	GET  /v1/entries/{id}             state and reasons, or outcome 200
//	GET  /livez                       the process runs              200
//	GET  /readyz                      it can serve, or why not      200 or 503
//	GET  /metrics                     for Prometheus                200
//
// Every leader serves all of it, elected or not. An error is a problem document (RFC 9457, application/problem+json);
// one table, problem.go, says which error has which status and code.
//
// A client that got no answer to a push sends it again with the same Idempotency-Key header: the same body gets the
// entries of the first push, another body is refused.
package api
