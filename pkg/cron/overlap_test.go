package cron

import (
	"encoding/json"
	"testing"
	"time"
)

// The runs of two jobs with one lock key follow one another, each with its own payload.
func TestEntriesOfJobsAreNotMerged(t *testing.T) {
	b := newBed(t)
	b.exec(`SELECT penstock.alter_queue('reports', '{"mergeable": true}')`)
	for _, name := range []string{"a", "b"} {
		b.job(Job{
			Name: name, Schedule: Schedule{Spec: "@hourly"}, LockKey: "shared",
			Payload: json.RawMessage(`{"job": "` + name + `"}`),
		})
	}
	b.at(noon)
	b.at(noon.Add(time.Hour))
	if n := b.count(`SELECT penstock.compact('reports', 'shared')`); n != 0 {
		t.Errorf("%d entries of a job were merged into that of another one", n)
	}
	const ours = `SELECT count(*) FROM penstock.entry WHERE payload->>'job' = name AND status = 'pending'`
	if n := b.count(ours); n != 2 {
		t.Errorf("%d jobs have an entry with their payload, want 2", n)
	}
}
