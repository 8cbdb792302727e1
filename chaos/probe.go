package main

import (
	"context"
	"fmt"
	"time"

	"github.com/penstock/penstock/chaos/judge"
)

// probeMax is how long an entry may take to be found without a hint. Nodes poll four times a second;
// the rest is for a machine that is busy.
const probeMax = 30 * time.Second

// probe pushes lone entries when all is quiet and no process is sent a notification, and waits until
// they have ended. Under load the hints of other entries stand in for those that are lost.
func (s *site) probe(ctx context.Context) ([]judge.Unhinted, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Minute)
	defer cancel()
	for _, job := range s.cfg.timetable().jobs {
		if err := s.db.exec(ctx, `SELECT penstock.pause_cron_job($1, 'the probe needs quiet')`, job); err != nil {
			return nil, fmt.Errorf("pause schedule: %w", err)
		}
	}
	if s.db.clock == nil {
		s.paused = time.Now()
	}
	time.Sleep(s.cfg.lease / 2) // hints of what was fired before
	for _, p := range s.all() {
		p.link.Deaf(true)
		defer p.link.Deaf(false)
	}
	var probes []judge.Unhinted
	for _, queue := range []string{"solo", "keyed", "limited", "work"} {
		u := judge.Unhinted{Queue: queue, Max: probeMax}
		var key *string
		if queue == "keyed" {
			key = &queue
		}
		const sql = `SELECT penstock.push($1, '{"op": 0, "ms": 1}', $2)`
		if err := s.db.pool.QueryRow(ctx, sql, queue, key).Scan(&u.Entry); err != nil {
			return nil, fmt.Errorf("push to %s: %w", queue, err)
		}
		probes = append(probes, u)
	}
	began := time.Now()
	for i := range probes {
		u := &probes[i]
		for ended := false; !ended; time.Sleep(20 * time.Millisecond) {
			const sql = `SELECT EXISTS (SELECT FROM judge.event WHERE what = 'end' AND entry_id = $1)`
			if err := s.db.pool.QueryRow(ctx, sql, u.Entry).Scan(&ended); err != nil {
				return nil, fmt.Errorf("read the result of a probe: %w", err)
			}
			if u.Took = min(time.Since(began), u.Max); u.Took == u.Max {
				break
			}
		}
	}
	return probes, nil
}
