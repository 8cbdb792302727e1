package main

import "testing"

// One keyed run in ten is long enough for every overlap to be seen, and the keys are not in use all the time.
func TestOneKeyedRunInTenIsLong(t *testing.T) {
	long, sum, all := 0, 0, 0
	for roll := 20; roll < 42; roll++ {
		for again := range 5 {
			for ms := 5; ms < 65; ms++ {
				took := keyedMS(ms, roll, again)
				all, sum = all+1, sum+took
				switch {
				case took >= 2000 && took <= 3000:
					long++
				case took > 32:
					t.Fatalf("a run takes %d ms", took)
				}
			}
		}
	}
	if 10*long != all {
		t.Errorf("%d of %d runs are long, want one in ten", long, all)
	}
	// 22 of 100 operations, 25 in a second, are of six keys.
	if share := 25 * 0.22 / 6 * float64(sum) / float64(all) / 1000; share > 0.3 {
		t.Errorf("at the usual rate each key is in use for %.2f of the time", share)
	}
}
