// Package operator is what operators see and do, straight on the database: no leader need run. The CLI works through
// it, and what it reads is meant for people and for programs alike: every struct has JSON names, durations are in
// seconds.
//
// Reads go through the views of the schema or through an index, are bounded by a limit, and page by key (after, before):
// none counts a table or grows with the backlog. Verbs are the functions of the schema, so that an operator who has only
// psql has the same levers; those that change behaviour take an invalidation.By, which ends up in the audit.
package operator
