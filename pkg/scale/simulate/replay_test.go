package simulate

import (
	"context"
	"errors"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/scale"
)

func TestAgainAnswersWhatAPolicyWouldHaveDone(t *testing.T) {
	first := time.Date(2026, 1, 1, 12, 0, 0, 0, time.UTC)
	var minutes []Minute
	for i := range 60 {
		m := Minute{Minute: first.Add(time.Duration(i) * time.Minute), Arrived: 60, Calls: 60, Busy: 120, Desired: 6, Ready: 6}
		if i >= 20 && i < 25 {
			m.Arrived, m.Calls, m.Busy = 600, 600, 1200
		}
		minutes = append(minutes, m)
	}
	policy := scale.Policy{Slots: 4, Max: 12}
	replay, err := Again(t.Context(), minutes, policy, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	if replay.Score.Requests != 55*60+5*600 || replay.Recorded != 6 || len(replay.Minutes) != 60 {
		t.Errorf("%d requests, %g recorded hours, %d minutes", replay.Score.Requests, replay.Recorded, len(replay.Minutes))
	}
	if before, peak := replay.Minutes[19].Desired, replay.Minutes[24].Desired; before >= peak || peak < 5 {
		t.Errorf("before the peak of 20 busy slots %d are desired, at its end %d", before, peak)
	}
	policy.Min = 12
	more, err := Again(t.Context(), minutes, policy, time.Minute)
	if err != nil {
		t.Fatal(err)
	}
	if more.Score.GPUHours <= replay.Score.GPUHours || more.Score.Late > replay.Score.Late {
		t.Errorf("twelve instances: %g hours, %d late; the policy alone: %g, %d", more.Score.GPUHours, more.Score.Late,
			replay.Score.GPUHours, replay.Score.Late)
	}
	if _, err := Again(t.Context(), nil, policy, time.Minute); !errors.Is(err, ErrReplay) {
		t.Errorf("no minutes: %v", err)
	}
	for _, large := range []scale.Policy{{Slots: 1e10}, {Slots: 1000, Max: 1400}} { // would take the memory of the machine
		if _, err := Again(t.Context(), minutes, large, time.Minute); !errors.Is(err, ErrReplay) {
			t.Errorf("%d slots of %d instances: %v", large.Slots, large.Max, err)
		}
	}
	minutes[0].Arrived = 3e6
	if _, err := Again(t.Context(), minutes, policy, time.Minute); !errors.Is(err, ErrReplay) {
		t.Errorf("too many requests: %v", err)
	}
}

func TestPoliciesArePlayedOneAtATimeAndNoLongerThanTheirRequest(t *testing.T) {
	leave, err := Enter(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	over, cancel := context.WithTimeout(t.Context(), 0)
	defer cancel()
	<-over.Done()
	if _, err := Enter(over); !errors.Is(err, ErrBusy) {
		t.Errorf("a second policy: %v", err)
	}
	leave()
	if leave, err = Enter(t.Context()); err != nil {
		t.Fatal(err)
	}
	leave()
	minutes := []Minute{{Arrived: 60, Calls: 60, Busy: 60}, {Minute: time.Time{}.Add(24 * time.Hour)}}
	if _, err := Again(over, minutes, scale.Policy{Slots: 4, Max: 12}, time.Minute); !errors.Is(err, context.DeadlineExceeded) {
		t.Errorf("played for a request that had ended: %v", err)
	}
}
