package web

import (
	"encoding/json"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/operator"
	"github.com/penstock/penstock/web/picture"
)

// The end of an entry that failed or expired has the colour of failed runs, and so has a callback that was not delivered.
func TestABadEndHasTheColourOfFailedRuns(t *testing.T) {
	t.Parallel()
	at := time.Unix(1000, 0)
	for outcome, want := range map[string]picture.PhaseKind{
		"done": picture.PhaseFinish, "cancelled": picture.PhaseFinish,
		"failed": picture.PhaseFailed, "expired": picture.PhaseFailed,
	} {
		v := entryView{EntryDetail: operator.EntryDetail{Ended: &operator.EntryOutcome{Outcome: outcome, Accepted: at, At: at.Add(time.Second)}}}
		v.Callbacks = []callbackRow{{State: "done", Ended: at.Add(2 * time.Second)}, {State: "failed", Ended: at.Add(2 * time.Second)}}
		phases := waterfall(v, nil, at.Add(time.Minute)).Phases
		last := phases[len(phases)-3:]
		if last[0].Kind != want || last[1].Kind != picture.PhaseCallback || last[2].Kind != picture.PhaseFailed {
			t.Errorf("the end of an entry that is %s is drawn as %q, its callbacks as %q and %q", outcome, last[0].Kind, last[1].Kind, last[2].Kind)
		}
	}
}

func TestSettingsAreWrittenInWords(t *testing.T) {
	t.Parallel()
	facts := settingsOf(json.RawMessage(`{"no_instance_timeout": "00:01:00", "payload_limit": 262144, "result_retention": "1 day", "run_timeout": null}`))
	want := []fact{{"no instance timeout", "1 min"}, {"payload limit", "262,144"}, {"result retention", "1 day"}}
	if len(facts) != len(want) {
		t.Fatalf("%+v", facts)
	}
	for i := range want {
		if facts[i] != want[i] {
			t.Errorf("setting %d is %+v, want %+v", i, facts[i], want[i])
		}
	}
}
