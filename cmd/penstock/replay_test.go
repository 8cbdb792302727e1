package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
)

const recorded = `created,tenant,tokens
2026-01-01 10:00:00.000,acme,100
2026-01-01 10:00:00.000,zeta,
2026-01-01 10:00:30.000,acme,7.5
2026-01-01 10:00:20.000,acme,"a, b"
2026-01-01 10:01:00.000,,9
`

func TestReplayKeepsTheRecordedPace(t *testing.T) {
	for speed, want := range map[float64][]time.Duration{1: {0, 30 * time.Second, time.Minute}, 10: {0, 3 * time.Second, 6 * time.Second}, 0: {0}} {
		synctest.Test(t, func(t *testing.T) {
			start := time.Now()
			var at []time.Duration
			var all []invalidation.Push
			report, err := trace{at: "created", flow: "tenant", speed: speed}.replay(t.Context(), bufio.NewReader(strings.NewReader(recorded)),
				func(_ context.Context, pushes ...invalidation.Push) error {
					at, all = append(at, time.Since(start)), append(all, pushes...)
					return nil
				})
			if err != nil || report.Entries != 5 || report.Flows != 3 || report.RecordedSeconds != 60 || len(all) != 5 {
				t.Fatalf("%+v, %v", report, err)
			}
			if len(at) != len(want) {
				t.Fatalf("at speed %g pushes came at %v, want %v", speed, at, want)
			}
			for i := range at {
				// What is due together goes when the next row shows that it is complete: before it waits for that row.
				if at[i] != want[i] {
					t.Errorf("at speed %g push %d came after %s, want %s", speed, i, at[i], want[i])
				}
			}
			if all[0].Flow != "acme" || string(all[1].Payload) != `{"created":"2026-01-01 10:00:00.000","tenant":"zeta","tokens":null}` ||
				!strings.Contains(string(all[3].Payload), `"a, b"`) {
				t.Errorf("pushed %s %s", all[1].Payload, all[3].Payload)
			}
		})
	}
}

func TestReplayReadsLinesOfJSON(t *testing.T) {
	var got []invalidation.Push
	text := `{"at": 1700000000.5, "key": "k", "weight": 3}` + "\n" + `{"at": "2023-11-14T22:13:21Z"}`
	report, err := trace{at: "at", lockKey: "key", cost: "weight"}.replay(t.Context(), bufio.NewReader(strings.NewReader(text)),
		func(_ context.Context, pushes ...invalidation.Push) error { got = append(got, pushes...); return nil })
	if err != nil || report.RecordedSeconds != 0.5 || got[0].LockKey != "k" || got[0].Cost != 3 || !json.Valid(got[0].Payload) {
		t.Errorf("%+v %+v, %v", report, got, err)
	}
}

func TestReplayNamesTheRowThatCannotBeRead(t *testing.T) {
	for text, want := range map[string]string{
		"":                        "empty",
		"at\nyesterday\n":         "row 1: column at",
		"when\n2026-01-01\n":      "--at names the column",
		"at,x\n1,2\n1\n":          "row 2",
		`{"at": 1}` + "\n" + `{x`: "row 2",
	} {
		_, err := trace{at: "at", speed: 1}.replay(t.Context(), bufio.NewReader(strings.NewReader(text)),
			func(context.Context, ...invalidation.Push) error { return nil })
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v, want %q", text, err, want)
		}
	}
	if _, errs, code := command(t, &fake{}, "replay", "mails", "nowhere.csv", "--dry-run"); code != exitUsage {
		t.Errorf("a file that is not there: exit %d, %s", code, errs)
	}
}

// An error says once how many entries were pushed before it, and nothing of it where none were.
func TestReplaySaysHowManyEntriesWerePushedBeforeAnError(t *testing.T) {
	flawed := filepath.Join(t.TempDir(), "trace.csv")
	text := "at\n" + strings.Repeat("2026-01-01T10:00:00Z\n", pushBatch+1) + "yesterday\n"
	if err := os.WriteFile(flawed, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, test := range []struct {
		flags []string
		want  int // times that the error tells of pushed entries
	}{{nil, 1}, {[]string{"--dry-run"}, 0}} {
		_, errs, code := command(t, &fake{}, append([]string{"replay", "mails", flawed}, test.flags...)...)
		if code != exitUsage || !strings.Contains(errs, "row 1002: ") || strings.Count(errs, "were pushed") != test.want {
			t.Errorf("replay %v: exit %d, want %d and %d times how many were pushed: %s", test.flags, code, exitUsage,
				test.want, errs)
		}
	}
}

// Whatever a trace has in it, it is read to its end or to the first row that cannot be, and what is read can be pushed.
func FuzzTrace(f *testing.F) {
	f.Add([]byte(recorded))
	f.Add([]byte(`{"created": "2026-01-01T10:00:00Z", "tenant": 5, "tokens": 1e400}` + "\n{"))
	f.Add([]byte("created\n\"a"))
	f.Fuzz(func(t *testing.T, text []byte) {
		next, err := rows(bufio.NewReader(bytes.NewReader(text)))
		if err != nil {
			return
		}
		for {
			row, err := next()
			if err != nil {
				return
			}
			p, _, err := trace{at: "created", flow: "tenant", cost: "tokens"}.read(row)
			if err == nil && !json.Valid(p.Payload) {
				t.Errorf("%v became %q", row, p.Payload)
			}
		}
	})
}
