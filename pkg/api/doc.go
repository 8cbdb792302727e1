// Package api is Penstock over HTTP. A file a noun; New lists them.
//
// An address is one call of add (bodies described by types, checked before the handler runs) or of raw (reads
// and writes by itself), and says in its route which scope a token needs and whose queue it is about: guard
// asks for both before anything else is looked at. access_test.go has every address a second time, with the
// roles that it lets in; routes_test.go has a story in which each one is called; docs/openapi.yaml is written
// by go test -run Description -update.
//
// Every leader serves all of it, elected or not. An error is a problem document (RFC 9457, application/problem+json);
// one table, problem.go, says which error has which status and code. What the CLI can do, the API does by the same
// functions: those of pkg/operator. docs/api.md is for users.
//
// A client that got no answer to a push sends it again with the same Idempotency-Key header: the same body gets the
// entries of the first push, another body is refused.
package api
