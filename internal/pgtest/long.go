package pgtest

import "os"

// Long returns full where PENSTOCK_LONG=1 asks for the whole length of tests of random schedules,
// as `make race-all` does, and usual elsewhere: how long such a test goes on, or how often it
// tries.
func Long[T any](usual, full T) T {
	if os.Getenv("PENSTOCK_LONG") == "1" {
		return full
	}
	return usual
}
