// Package pgtest gives each test a database of its own, cloned from a migrated template.
//
// There is one private cluster per test binary. It starts at the first call and stops by itself when the binary ends,
// however it ends, so no TestMain is needed. It is a copy of a cluster that has the template already, which
// internal/devpostgres keeps in its cache for each version of Postgres and each state of migrations/ and of this
// package: the first test binary after a change of these makes it, and those that start meanwhile wait.
//
// PENSTOCK_TEST_DATABASE_URL names a server to use instead; its role must be allowed to create databases. Several test
// binaries may share it, and the first one makes the template.
//
// Where there are no binaries, the server is in a container (internal/pgtest/container). A test binary that was built
// with -tags=nocontainer, as make does where Postgres is installed, has no client for that.
//
// Where no Postgres can be had, the test fails with the reasons: a skipped database test proves nothing.
package pgtest
