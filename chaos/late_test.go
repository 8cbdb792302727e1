package main

import (
	"strings"
	"testing"
	"time"
)

// A run on a machine that was too slow says so. How late the harness was is tolerated up to a third of a lease.
func TestARunThatWasTooLateToJudgeTimesSaysSo(t *testing.T) {
	for late, c := range map[time.Duration]struct {
		tolerance time.Duration
		says      string
	}{
		0:                      {400 * time.Millisecond, ""},
		600 * time.Millisecond: {time.Second, ""},
		700 * time.Millisecond: {time.Second, "late by up to 700ms, of which 600ms are tolerated"},
	} {
		s := &site{cfg: config{lease: 3 * time.Second}, lateness: late}
		var out strings.Builder
		s.reportLateness(&out)
		if got := s.tolerance(); got != c.tolerance {
			t.Errorf("late by %v: %v are tolerated, want %v", late, got, c.tolerance)
		}
		if text := out.String(); (text == "") != (c.says == "") || !strings.Contains(text, c.says) {
			t.Errorf("late by %v: the report says %q", late, text)
		}
	}
}
