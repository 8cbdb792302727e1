// Package machine measures how much time a machine withholds from a test because of others that
// use it.
//
// The promises of the product in seconds are for a machine that has time for it. A test that holds
// the product to such a promise watches the machine, and judges what passed without the time that
// was withheld: on an idle machine it is none.
//
// It also finds a free port for a program that a test starts, and ends a test that needs a program which
// the machine lacks.
package machine
