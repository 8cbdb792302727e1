package duty

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

// clockTest reads a database's clock that is off by skew, once in ten seconds for so long.
func clockTest(t *testing.T, c *Clock, skew, lasts time.Duration) (refused int) {
	t.Helper()
	for end := time.Now().Add(lasts); time.Now().Before(end); time.Sleep(10 * time.Second) {
		if err := c.Check(time.Now().Add(skew)); errors.Is(err, ErrClock) {
			refused++
		} else if err != nil {
			t.Fatal(err)
		}
	}
	return refused
}

func TestAClockThatJumpsAheadIsBelievedOnceItHasLasted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c Clock
		if n := clockTest(t, &c, -time.Second, 2*time.Hour); n > 0 {
			t.Errorf("%d readings of a right clock were refused", n)
		}
		if n := clockTest(t, &c, 5*time.Hour, 4*time.Minute); n != 24 {
			t.Errorf("%d of 24 readings of a jump of four minutes were refused", n)
		}
		if n := clockTest(t, &c, 0, time.Hour); n > 0 {
			t.Errorf("%d readings after a jump were refused", n)
		}
		if n := clockTest(t, &c, 5*time.Hour, time.Hour); n != 30 {
			t.Errorf("%d readings of a clock that was set ahead were refused, want those of five minutes: 30", n)
		}
		if n := clockTest(t, &c, -5*time.Hour, time.Hour); n > 0 {
			t.Errorf("%d readings of a clock that was set back were refused", n)
		}
	})
}

// A process that is stopped between a reading and its Check is late with it, and with those of its other duties.
func TestReadingsThatComeLateAreNoClockThatWasSetBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c Clock
		clockTest(t, &c, 0, time.Hour)
		for range 3 {
			if err := c.Check(time.Now().Add(-2 * time.Minute)); err != nil {
				t.Errorf("a late reading: %v", err)
			}
		}
		time.Sleep(10 * time.Second)
		if n := clockTest(t, &c, 0, time.Hour); n > 0 {
			t.Errorf("%d right readings after late ones were refused", n)
		}
	})
}

func TestAClockIsComparedWithOneThatWasSetBackOnceThatHasLasted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c Clock
		clockTest(t, &c, 0, time.Hour)
		clockTest(t, &c, -time.Hour, 5*time.Minute)
		if n := clockTest(t, &c, 0, time.Hour); n != 30 {
			t.Errorf("%d readings of a clock that was set ahead again were refused, want those of five minutes: 30", n)
		}
	})
}

// A second jump has to last as well, and one that goes on growing is never believed.
func TestAJumpHasToLastAtOneTime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c Clock
		clockTest(t, &c, 0, time.Minute)
		for jump := range 12 {
			if n := clockTest(t, &c, time.Duration(jump+1)*time.Hour, time.Minute); n != 6 {
				t.Fatalf("%d of 6 readings of jump %d were refused", n, jump)
			}
		}
	})
}

func TestTheFirstReadingIsComparedWithTheClockOfTheProcess(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c Clock
		if err := c.Check(time.Now().Add(3 * time.Hour)); !errors.Is(err, ErrClock) {
			t.Errorf("a first reading three hours ahead: %v", err)
		}
		var other Clock
		if err := other.Check(time.Now().Add(-3 * time.Hour)); err != nil {
			t.Errorf("a first reading three hours behind: %v", err)
		}
		if err := other.Check(time.Now()); !errors.Is(err, ErrClock) {
			t.Errorf("a reading three hours ahead of the first one: %v", err)
		}
	})
}

// Clocks drift apart by a second in a quarter of an hour, over a week.
func TestDriftIsNoJump(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var c Clock
		for i := range 7 * 24 * 60 {
			if err := c.Check(time.Now().Add(time.Duration(i) * time.Minute / 900)); err != nil {
				t.Fatalf("after %d minutes: %v", i, err)
			}
			time.Sleep(time.Minute)
		}
	})
}
