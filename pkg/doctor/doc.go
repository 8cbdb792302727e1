// Package doctor examines a database and what runs on it, and says what to do about each thing it finds. It only reads.
//
// Examine runs the checks of a table (checks.go), each bounded in time and apart from the others: one that fails, for
// want of a right or because the database is busy, is a finding of its own.
package doctor
