package inference

import (
	"testing"
	"time"
)

func TestRemainingTimeIsTheMeanOfCallsThatTookLonger(t *testing.T) {
	var d durations
	if left := d.remaining(time.Minute); left != time.Minute {
		t.Errorf("without history a call of a minute takes another %v", left)
	}
	for range durationsMax {
		d.add(time.Hour) // forgotten
	}
	for i := range durationsMax {
		d.add(time.Duration(1+i%2*9) * time.Second) // 1 s or 10 s
	}
	for age, want := range map[time.Duration]time.Duration{
		0: 5500 * time.Millisecond, 2 * time.Second: 8 * time.Second, 9 * time.Second: time.Second, 20 * time.Second: 20 * time.Second,
	} {
		if left := d.remaining(age); left != want {
			t.Errorf("a call of %v takes another %v, want %v", age, left, want)
		}
	}
}

// A node tells of each instance how long its calls will take yet, and whether it has something loaded.
func TestReportsTellWhatRunsAndWhatIsLoaded(t *testing.T) {
	now := time.Now()
	after := func(s float64) time.Time { return now.Add(time.Duration(s * float64(time.Second))) }
	l := newSlotLedger()
	for instance := range int32(3) {
		l.add(slotAt(instance+1, 0, int64(instance)), now)
	}
	l.unassigned = 3
	everywhere := func(int32) bool { return true }
	first, _, _ := l.assign(now, slotRequest{affinity: "lora", exclude: map[int32]bool{2: true, 3: true}}, everywhere)
	l.finish(first, after(10), false)
	second, _, _ := l.assign(after(10), slotRequest{exclude: map[int32]bool{1: true, 3: true}}, everywhere)
	if second == nil || second.Instance != 2 {
		t.Fatalf("the second call has slot %+v", second)
	}
	got := map[int32]InstanceReport{}
	for _, r := range l.report(after(14)) {
		got[r.ID] = r
	}
	want := map[int32]InstanceReport{1: {ID: 1, LoadedMS: 14000}, 2: {ID: 2, InFlight: 1, RemainingMS: 6000}}
	if len(got) != 2 || got[1] != want[1] || got[2] != want[2] {
		t.Errorf("reported: %+v, want %+v", got, want)
	}
}
