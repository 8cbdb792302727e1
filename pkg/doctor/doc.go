// Package doctor checks a database and the processes on it, and gives advice for each problem. It
// only reads.
//
// Examine runs the checks of a table (checks.go), each with a timeout and independent of the
// others: a check that fails, for lack of a right or because the database is busy, is a finding of
// its own.
package doctor
