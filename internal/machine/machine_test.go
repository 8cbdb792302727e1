package machine

import (
	"testing"
	"time"
)

func TestTimeWithheldIsThatOfLateProbesBetweenTwoMoments(t *testing.T) {
	t.Parallel()
	at := func(ms int) time.Time { return time.UnixMilli(int64(ms)) }
	m := &Machine{
		delayed: []delay{
			{at(0), at(130), 100 * time.Millisecond},
			{at(200), at(280), 50 * time.Millisecond},
			{at(500), at(600), 70 * time.Millisecond},
		},
		used: []usage{{at: at(0)}, {at: at(2000), others: 2 * time.Second}},
	}
	for _, c := range []struct{ from, to, want int }{
		{0, 1000, 220},
		{130, 200, 0},
		{100, 300, 80},
		{210, 550, 100},
		{540, 550, 10},
	} {
		if got := m.Withheld(at(c.from), at(c.to)); got != time.Duration(c.want)*time.Millisecond {
			t.Errorf("between %d and %d ms: %v, want %d ms", c.from, c.to, got, c.want)
		}
	}
}

// A product that keeps every probe waiting, on a machine that nobody else uses, has its bounds as they are written.
func TestABusyProductDoesNotWidenItsBounds(t *testing.T) {
	t.Parallel()
	at := func(ms int) time.Time { return time.UnixMilli(int64(ms)) }
	late := []delay{{at(0), at(1000), 900 * time.Millisecond}, {at(1000), at(2000), 900 * time.Millisecond}}
	for _, c := range []struct {
		used []usage
		want int
	}{
		{nil, 0},
		{[]usage{{at(0), 0}, {at(2000), 0}}, 0},
		{[]usage{{at(0), 0}, {at(1000), 0}, {at(2000), 80 * time.Millisecond}}, 40},
		{[]usage{{at(0), 0}, {at(1000), 800 * time.Millisecond}, {at(2000), 1600 * time.Millisecond}}, 800},
		{[]usage{{at(0), 0}, {at(2000), time.Hour}}, 1000},
	} {
		m := &Machine{delayed: late, used: c.used}
		if got := m.Withheld(at(500), at(1500)); got != time.Duration(c.want)*time.Millisecond {
			t.Errorf("others took %v: %v withheld, want %d ms", c.used, got, c.want)
		}
	}
}
