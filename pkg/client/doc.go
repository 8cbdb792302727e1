// Package client speaks Penstock's HTTP API from Go. It links nothing else of Penstock, and nothing but the
// standard library.
//
// Requests that can be sent twice without harm are sent again where there is no answer, or one that
// asks for it: reads, and pushes, each of which carries an idempotency key, made here where
// Push.IdempotencyKey is empty. Retry-After is honoured, with jitter. An error of the API is an *Error, and errors.Is
// compares it with a Code.
package client
