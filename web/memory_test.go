package web

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/operator"
)

// inMemory is a dashboard whose readings are given: its pages need no database.
func inMemory(t *testing.T, readings map[string]any) *Dashboard {
	t.Helper()
	d, err := New(operator.New(noDatabase{}), operator.New(noDatabase{}), Config{Open: true, Timetable: hourly})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(d.Drain)
	for key, value := range readings {
		now := time.Now()
		r := d.reads.of(key, now)
		r.value, r.at, r.tried, r.took, r.generation = value, now, now, time.Hour, d.reads.generation.Load()
	}
	return d
}

// noDatabase fails the statement of a reading that is not given.
type noDatabase struct{ postgres.DB }

var errNoDatabase = errors.New("this reading is not given")

func (noDatabase) Query(context.Context, string, ...any) (pgx.Rows, error) { return nil, errNoDatabase }

// fleetReadings are those of the pages of the fleet, with a text in the place of every name.
func fleetReadings(text string) map[string]any {
	now := time.Now()
	p99, entry, active := 12.0, int64(4711), int32(9)
	load, _ := json.Marshal(map[string]any{
		"version": text, "hints": text, "claims": 900, "claimed": 1200, "runs": 1100, "run_errors": 11, "claim_ms": 1800,
		"refusals": map[string]int{"memory_high": 12, text: 340},
		"governor": map[string]any{"levels": []map[string]any{
			{"resource": "cpu", "used": 0.97, "high": 0.9, "low": 0.75, "closed": true, "declared_only": true},
			{"resource": "memory", "used": 0.93, "high": 0.9, "low": 0.8, "closed": true},
		}},
	})
	nodes := []operator.Node{
		{ID: 7001, Name: text, Application: text, State: "live", LeaseSeconds: 10, SilentSeconds: 1, Threads: 16, Locks: 7, Queues: []string{text}, StartedAt: now, Load: load},
		{ID: 7002, Name: text + "2", State: "draining", DrainBy: text, DrainReason: text, LeaseSeconds: 10, SilentSeconds: 9, Threads: 4, Load: load},
		{ID: 7003, Name: "gone", State: "dead", Locks: 1, Load: []byte(`{}`)},
	}
	var locks []operator.Lock
	for i := range 7 {
		locks = append(locks, operator.Lock{
			Queue: text, LockKey: fmt.Sprint(text, i), Flow: text, Entries: 3, Token: int64(100 + i), NodeID: 7001, Node: text,
			ClaimedAt: now, AgeSeconds: float64(i * 5),
		})
	}
	locks = append(locks, operator.Lock{Queue: text, LockKey: "#4711", Token: 200, NodeID: 9, ClaimedAt: now})
	return map[string]any{
		"sampled queues": []operator.Queue{{Name: text, Kind: "task"}}, "nodes": nodes, "pauses": []operator.Pause{}, "leader": &operator.Leader{Holder: text, Live: true},
		"degradations":     []operator.Degradation{},
		keyOf("locks", ""): locks,
		"suspects":         []operator.Suspect{{Queue: text, LockKey: text, Token: 101, Node: text, Problem: text}},
		keyOf("blocked keys", ""): []operator.BlockedKey{
			{Queue: text, LockKey: text, EntryID: 4711, Class: text, Error: text, BlockedAt: now, Waiting: 3},
		},
		keyOf("run times", []string{text}): []operator.RunTimes{{Queue: text, Runs: 500, P99: &p99}},
		"models":                           []operator.Model{{Name: text, Protocol: text, Queue: text, Override: []byte(`{}`), Instances: 2, Usable: 1, Slots: 8, Held: 3}},
		"instances": []operator.Instance{
			{Model: text, Server: "gpu-1", Endpoint: text, State: "ready", Usable: true, Slots: 8, Held: 3, Doubtful: 1, Active: &active, CheckedAt: &now},
			{Model: text, Server: "gpu-2", Endpoint: text, State: "unhealthy", Slots: 600, Reason: text, QuarantinedUntil: &now},
		},
		"slots": []operator.Slot{
			{Model: text, Server: "gpu-1", Number: 0, NodeID: 7001, LeasedAt: now, EntryID: &entry},
			{Model: text, Server: "gpu-1", Number: 3, NodeID: 7001, LeasedAt: now, DoubtAt: &now, Doubt: text},
		},
		"instance times":     []operator.InstanceTimes{{Model: text, Server: "gpu-1", Calls: 500, P95: &p99, ColdStarts: 4}},
		"pools":              []operator.PoolShare{{Model: text, Slots: 8, Reserved: 1, Policy: []byte(`{}`)}},
		"flow criticalities": []operator.FlowCriticality{{Flow: text, Criticality: text}},
		"deployments": []operator.Deployment{{
			Name: text, Model: text, Backend: text, Mode: text, Decides: true, State: &operator.ScaleState{Desired: 3, Why: text},
		}},
		"scale settings":                        []operator.ScaleSetting{{Name: text, Value: []byte(`true`), Actor: text, Reason: text}},
		keyOf("scale minutes", text, time.Hour): []operator.ScaleMinute{{Minute: now, Metric: 3, Raw: 2, Desired: 2}},
		keyOf("scale decisions", text):          []operator.ScaleDecision{{At: now, Model: text, Before: 1, Desired: 2, Why: text}},
		"usage": []operator.Usage{
			{Queue: text, Application: "a", Flow: text, Locks: 3, Slots: 3, Weight: 1}, {Queue: text, Application: "a", Flow: "blue", Slots: 1, Weight: 1},
		},
		keyOf("cron", "", ""): []operator.CronSchedule{
			{
				CronJob: operator.CronJob{Name: text, Queue: text, State: "paused", Spec: text, Zone: text, PausedBy: text, PausedReason: text},
				Firings: []byte(`[{"nominal_at": "2026-03-01T10:00:00Z", "fired_at": "2026-03-01T10:00:12Z", "entry_id": 4711}]`),
			},
			{CronJob: operator.CronJob{Name: "broken", State: "broken", Problem: text}, Firings: []byte(`[]`)},
		},
		keyOf("batches", "", int64(0)): []operator.Batch{
			{ID: 1, Name: text, Queue: text, State: "paused", Parts: 400, Done: 260, Bad: 8, Queued: 32, PausedReason: text, Problem: text, Actor: text},
			{ID: 2, Name: text, Queue: text, State: "failed", Parts: 4, Done: 1, Bad: 3},
		},
		keyOf("operations", "", int64(0)): []operator.Operation{
			{ID: 3, Queue: text, Verb: "retry_failures", Filter: map[string]any{"name": text}, Status: "running", Matched: 100, Changed: 40, Actor: text, Reason: text, FailedSteps: 4, FailedAt: &now, Error: text},
		},
	}
}

func draw(t *testing.T, d *Dashboard, path string) (int, string) {
	t.Helper()
	w := httptest.NewRecorder()
	r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/ui/"+path, nil)
	d.ServeHTTP(w, r)
	return w.Code, w.Body.String()
}

func TestPagesOfTheFleetAreDrawnFromTheirReadings(t *testing.T) {
	d := inMemory(t, fleetReadings("acme"))
	for path, texts := range map[string][]string{
		"locks":      {"Locks of acme", "pic-a-bad", "pic-a-4", "not registered", "Unlock…", `href="/ui/entries/4711"`},
		"nodes":      {"97 %, closed until 75 % to queues with declared cores", "93 %, closed until 80 %<", "memory is above its mark", "340", "Drain…"},
		"models":     {"gpu-1", "quarantined", "in doubt", "more than leased", "and 472 slots more", "Register again…", "4 cold starts"},
		"fairness":   {"75 %", "now 0.800", "Weight…"},
		"cron":       {"every hour", "12 s late", "Resume…", "broken"},
		"operations": {"260 of 400 done (65 %), 8 failed", "40 of 100 done", "failed 4 times", "Retry…", "Resume…"},
	} {
		status, text := draw(t, d, path)
		if status != http.StatusOK {
			t.Errorf("%s: %d: %s", path, status, text)
		}
		for _, want := range texts {
			if !strings.Contains(text, want) {
				t.Errorf("%s has no %q: %s", path, want, text)
			}
		}
		for _, bad := range []string{" style=", "ZgotmplZ", "%!"} {
			if strings.Contains(text, bad) {
				t.Errorf("%s has %q", path, bad)
			}
		}
	}
}

func TestHostileNamesOfTheFleetStayTexts(t *testing.T) {
	for _, hostileText := range hostile {
		d := inMemory(t, fleetReadings(hostileText))
		for _, path := range fleetPages {
			status, text := draw(t, d, path)
			if status != http.StatusOK {
				t.Errorf("%s with %.30q: %d", path, hostileText, status)
			}
			if found := active.FindString(quoted.ReplaceAllString(text, `""`)) + outward.FindString(text); found != "" {
				t.Errorf("%s with %.30q has the active text %q", path, hostileText, found)
			}
			if strings.Contains(text, "ZgotmplZ") {
				t.Errorf("%s with %.30q has a value that a template refused", path, hostileText)
			}
		}
	}
}
