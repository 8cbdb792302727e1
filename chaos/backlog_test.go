package main

import (
	"slices"
	"testing"
	"time"

	"github.com/penstock/penstock/chaos/judge"
)

// A backlog that hangs without faults is the product's failure, and not one of the harness: the judges report it.
func TestWhatHangsWithoutFaultsIsReportedByTheJudges(t *testing.T) {
	h := &judge.History{DrainMax: time.Minute, Drained: time.Second}
	h.Unfinished, h.FaultFree = faultFree([]string{"work: entry 7, initial, attempt 0"}, 2*time.Minute)
	for _, f := range judge.Judge(h) {
		if f.Name != "all is terminal soon after the faults" {
			continue
		}
		if want := []string{"without faults: work: entry 7, initial, attempt 0"}; !slices.Equal(f.Examples, want) {
			t.Errorf("%q, want %q", f.Examples, want)
		}
		return
	}
	t.Error("it is not judged")
}

func TestABacklogThatEndsWithoutFaultsIsTimed(t *testing.T) {
	if left, took := faultFree(nil, 3*time.Second); len(left) != 0 || took != 3*time.Second {
		t.Errorf("%q after %v", left, took)
	}
}
