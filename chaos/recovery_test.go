package main

import (
	"slices"
	"testing"
	"time"
)

func TestATimeIsChargedToTheFirstCauseThatHolds(t *testing.T) {
	at := func(second int) time.Time { return time.Unix(int64(1000+second), 0) }
	causes := [][]span{
		{{at(-20), at(-10)}, {at(-5), at(4)}},
		{{at(2), at(6)}, {at(6), at(6)}, {at(40), at(50)}},
		{{at(9), at(30)}},
	}
	got := charge(span{at(0), at(10)}, causes)
	if want := []time.Duration{4 * time.Second, 2 * time.Second, time.Second, 3 * time.Second}; !slices.Equal(got, want) {
		t.Errorf("charged %v, want %v", got, want)
	}
}
