package election

import (
	"bytes"
	"context"
	"log/slog"
	"strings"
	"testing"
	"testing/synctest"
	"time"
)

// A line each second told nothing that the first one had not, and hid the one with the outcome.
func TestALeaseThatCannotBeRenewedHasALineAtTheBeginAndOneWithTheOutcome(t *testing.T) {
	for what, c := range map[string]struct {
		away time.Duration
		want []string
	}{
		"answers in time": {1900 * time.Millisecond, []string{
			`msg="a step failed; trying again" election=leader term=1 step="renew the lease" error="database is away" ` +
				`renewed_ago=2s lease_ends_in=2s`,
			`msg="a step works again" election=leader term=1 step="renew the lease" after=`,
		}},
		"stays away": {time.Minute, []string{
			`msg="a step failed; trying again" election=leader term=1 step="renew the lease" error="database is away" ` +
				`renewed_ago=2s lease_ends_in=2s`,
			`msg="term ended" election=leader term=1 reason="trust window closed"`,
			`msg="a step failed; trying again" election=leader step="read the election" error="database is away"`,
			`msg="a step works again" election=leader step="read the election" after=`,
		}},
	} {
		t.Run(what, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, stop := context.WithCancel(t.Context())
				var text bytes.Buffer
				row := &fakeRow{lease: testLease}
				_, ended := run(ctx, row, Config{Log: slog.New(slog.NewTextHandler(&text, nil))}, untilDone)
				time.Sleep(testLease/4 + time.Millisecond) // behind the first renewal
				synctest.Wait()
				begun := text.Len()
				row.setAway(true)
				time.Sleep(c.away)
				row.setAway(false)
				time.Sleep(10 * time.Second)
				stop()
				<-ended
				var lines []string
				for line := range strings.Lines(text.String()[begun:]) {
					if !strings.Contains(line, "msg=elected") && !strings.Contains(line, "cannot resign") {
						lines = append(lines, line)
					}
				}
				if len(lines) != len(c.want) {
					t.Fatalf("%d lines, want %d: %s", len(lines), len(c.want), lines)
				}
				for i, want := range c.want {
					if !strings.Contains(lines[i], want) {
						t.Errorf("line %d is %s, want %s in it", i, lines[i], want)
					}
				}
			})
		})
	}
}
