// Package operator is the control plane: the reads and changes of operators, directly on the
// database, so that they work while no leader runs. The API uses it, and through the API the CLI. Every
// struct has JSON names, durations are in seconds.
//
// # Reads
//
// Lists go through the views of the schema or through an index, are bounded by a limit, and page by key
// (after, before): none counts a table or grows with the backlog. Explain (explain.go) evaluates the
// conditions of the claim for one entry.
//
// # Verbs
//
// A verb is a function of the schema, so that psql has the same ones. Each takes an
// invalidation.By, the actor and the reason, which are written to the audit. Verbs that need only
// the name or id of their object are in verb.go; pauses of flows, names, keys, models, applications
// and nodes in pause.go; operations on many entries or failures in operation.go; limits and weights
// in limit.go and usage.go. Other verbs are in the file of their object. Owner and Locked (object.go) are for
// callers that check rights, or change settings only as they were read.
package operator
