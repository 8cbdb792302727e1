package main

import (
	"slices"
	"testing"

	"github.com/penstock/penstock/chaos/judge"
)

// Leaders meet errors all the while under the usual faults: a long run may have no case of what takes seconds without
// one, and a release run has to.
func TestOnlyAReleaseRunNeedsCasesThatTakeCalmTime(t *testing.T) {
	for _, promise := range append(slices.Clone(inCalm), "nothing runs before it is due") {
		if !slices.ContainsFunc(judge.Invariants, func(i judge.Invariant) bool { return i.Name == promise }) {
			t.Errorf("no judge has the promise %q", promise)
		}
		for _, release := range []bool{false, true} {
			s := &site{cfg: config{faults: true, rate: 8, release: release}, policy: newPolicy(1, release)}
			list := s.missing(&judge.History{}, []judge.Finding{{Name: promise}}, longRun)
			got := slices.Contains(list, "no case of the promise: "+promise)
			if want := release || !slices.Contains(inCalm, promise); got != want {
				t.Errorf("%s: a run without a case is reported: %v, want %v (release: %v)", promise, got, want, release)
			}
		}
	}
}
