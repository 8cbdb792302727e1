package main

import (
	"math"
	"testing"
)

func TestSharesCountTheTimeBetweenTwoMoments(t *testing.T) {
	events := []event{
		{At: 0, Event: "begin", Key: 1, User: "long"},
		{At: 8, Event: "begin", Key: 2, User: "short"},
		{At: 9, Event: "end", Key: 2, User: "short"}, // before the first moment
		{At: 11, Event: "begin", Key: 3, User: "short"},
		{At: 12, Event: "end", Key: 3, User: "short"},
		{At: 15, Event: "end", Key: 1, User: "long"},
		{At: 19, Event: "begin", Key: 4, User: "short"},
		{At: 25, Event: "stop", Key: 4, User: "short"}, // after the second one
	}
	spent, runs := shares(events, 10, 20)
	if math.Abs(spent["long"]-5) > 1e-9 || math.Abs(spent["short"]-2) > 1e-9 {
		t.Errorf("got %v seconds, want 5 of long and 2 of short", spent)
	}
	if runs["long"] != 1 || runs["short"] != 1 {
		t.Errorf("got %v runs that ended, want one of each", runs)
	}
}
