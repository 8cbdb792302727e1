package duty

import (
	"bytes"
	"log/slog"
	"maps"
	"strings"
	"testing"
)

func TestErrorsInTheLogOfADutyAreCounted(t *testing.T) {
	var e Errors
	var text bytes.Buffer
	log := slog.New(slog.NewTextHandler(&text, &slog.HandlerOptions{Level: slog.LevelInfo}))
	retention, depths := e.Log("retention", log), e.Log("depths", log)
	retention.Warn("waits")
	retention.With("queue", "mails").Error("refused", "error", "timeout")
	e.Log("retention", log.With("term", 2)).WithGroup("rows").Error("refused")
	depths.Debug("counted")
	if want := map[string]int64{"retention": 2, "depths": 0}; !maps.Equal(e.Counts(), want) {
		t.Errorf("counted %v, want %v", e.Counts(), want)
	}
	if n := strings.Count(text.String(), "duty=retention"); n != 3 || strings.Contains(text.String(), "counted") {
		t.Errorf("written: %s", text.String())
	}
	e.Log("depths", slog.New(slog.DiscardHandler)).Error("lost")
	if n := e.Counts()["depths"]; n != 1 {
		t.Errorf("%d errors counted that nothing writes, want 1", n)
	}
}
