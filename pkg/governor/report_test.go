package governor

import (
	"log/slog"
	"testing"
	"testing/synctest"
	"time"
)

func TestLevelsAreThoseOfTheLastReadingUntilItIsStale(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		g, err := New(Config{}, nil, slog.New(slog.DiscardHandler))
		if err != nil {
			t.Fatal(err)
		}
		if got := g.Report().Levels; got != nil {
			t.Errorf("before the first reading: got %+v", got)
		}
		g.sample = Measurement{At: time.Now(), Cores: 4, CPUUsed: 0.5, MemoryLimitBytes: 100, MemoryUsedBytes: 95}
		g.state.Memory.Closed = true
		got := g.Report().Levels
		if len(got) != 2 || got[0] != (GateLevel{"cpu", 0.5, 0.90, 0.75, false, true}) || got[1] != (GateLevel{"memory", 0.95, 0.90, 0.80, true, false}) {
			t.Errorf("got %+v", got)
		}
		time.Sleep(6 * time.Second)
		if got := g.Report().Levels; got != nil {
			t.Errorf("of a stale reading: got %+v", got)
		}
	})
}
