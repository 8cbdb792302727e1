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

// expiries are how many entries meet their deadline at a time after the faults, expiryIn is how long after their push,
// and expiryRounds is how often they are pushed at most.
const (
	expiries     = 5
	expiryIn     = time.Second
	expiryRounds = 10
)

// pushExpiring pushes entries that expire when all is quiet: they have a deadline, and are not due until long after it.
// It returns when the last deadline is. Under the faults of a release run no leader is left alone for as long as an
// entry may take to expire. Where the server's clock jumped nothing is pushed, for the time of an expiry is not known.
func (s *site) pushExpiring(ctx context.Context) (last time.Time, err error) {
	if s.cfg.clock {
		return time.Now(), nil
	}
	const sql = `SELECT penstock.push($1, jsonb_build_object('op', $2::bigint), finish_by => $3, due_at => $4)`
	for range expiries {
		p := judge.Push{Op: s.load.ops.Add(1), Queue: frailQueue, FailMax: frailAttempts, CrashMax: frailCrashes}
		p.Called = time.Now()
		p.FinishBy = p.Called.Add(expiryIn)
		p.Due, last = p.FinishBy.Add(probeMax), p.FinishBy
		if err := s.db.pool.QueryRow(ctx, sql, p.Queue, p.Op, p.FinishBy, p.Due).Scan(&p.Entry); err != nil {
			return last, fmt.Errorf("push an entry that expires: %w", err)
		}
		p.Told, p.Returned = true, time.Now()
		s.load.record(&p)
	}
	return last, nil
}

// probe pushes lone entries when all is quiet and no process is sent a notification, and waits until
// they have ended. Under load the hints of other entries stand in for those that are lost.
func (s *site) probe(ctx context.Context) ([]judge.Unhinted, error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Minute)
	defer cancel()
	for _, job := range s.cfg.timetable().jobs {
		if err := s.db.exec(ctx, `SELECT penstock.pause_cron_job($1, 'the probe needs quiet')`, job); err != nil {
			return nil, fmt.Errorf("pause schedule: %w", err)
		}
	}
	if s.db.clock == nil {
		s.paused = time.Now()
	}
	expired, err := s.pushExpiring(ctx)
	if err != nil {
		return nil, err
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
	return probes, s.awaitExpiries(ctx, expired)
}

// awaitExpiries returns when entries that met their deadline were left undisturbed for as long as they may take to
// expire, whether they took it or not: their promise has a case then. On a machine that is busy otherwise Postgres is
// slow, or no node is heard, for moments of that time: others are pushed then.
func (s *site) awaitExpiries(ctx context.Context, expired time.Time) error {
	if s.cfg.clock {
		return nil // none were pushed
	}
	for round := 1; ; round++ {
		until := expired.Add(judge.ExpiryMax(s.cfg.lease, s.tolerance()))
		time.Sleep(time.Until(until))
		h, err := s.history(ctx)
		if err != nil || round == expiryRounds || judge.Undisturbed(h, expired, until) {
			return err
		}
		if expired, err = s.pushExpiring(ctx); err != nil {
			return err
		}
	}
}
