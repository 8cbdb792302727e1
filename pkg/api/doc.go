// Package api is Penstock over HTTP. It translates requests into calls of pkg/operator, pkg/invalidation and
// pkg/doctor, and has no statements of its own. A file has the name of a noun, such as queue.go or cron.go, and New
// lists their routes. The other files are about all requests:
//
//	route.go, decode.go, body.go, page.go    from a request to the input of a handler, and pages of lists
//	access.go, rate.go, budget.go            who may do what, and how much of it
//	change.go                                reasons of changes, and changes of configuration on a condition (ETag)
//	key.go                                   the key under which a push is accepted once
//	problem.go                               from an error to a status and a problem document
//	lists.go, sharedmemory.go                what all requests together may use
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
