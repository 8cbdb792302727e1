package main

import (
	"context"
	"fmt"
	"time"

	"github.com/penstock/penstock/chaos/judge"
)

// doubtfulSQL lists the slots that no call can use: those in doubt, and those of nodes that died; and, if $1 is true,
// those of task nodes, which keep none for longer than a second once nothing is left to do.
const doubtfulSQL = `
SELECT 'a slot of instance ' || s.instance_id || ' of ' || i.model
       || CASE WHEN s.doubt_at IS NOT NULL THEN ' is in doubt: ' || s.doubt
               WHEN penstock.node_lives(s.node_id) THEN ' is held, and nothing runs, by node ' || s.node_id
               ELSE ' is of node ' || s.node_id || ', which died' END
  FROM penstock.slot s JOIN penstock.instance i ON i.id = s.instance_id
 WHERE $1::boolean AND NOT penstock.node_online(s.node_id)
    OR s.doubt_at IS NOT NULL OR NOT penstock.node_lives(s.node_id)`

// doubtsOf are the times for which slots were in doubt.
func doubtsOf(events []event) (doubts []judge.Doubt) {
	open := map[int64]int{} // by token
	for _, e := range events {
		switch e.What {
		case "doubt":
			open[e.Token] = len(doubts)
			doubts = append(doubts, judge.Doubt{
				Slot: e.Key, Token: e.Token, Entry: e.Entry, Reason: e.Class, From: e.At,
			})
		case "certain":
			if i, known := open[e.Token]; known {
				doubts[i].To = e.At
			}
		}
	}
	return doubts
}

// doubtsAfter are the times for which slots were in doubt once the faults were over, a line for each.
func doubtsAfter(h *judge.History) (text []byte) {
	for _, d := range h.Doubts {
		if d.To.IsZero() || d.To.After(h.FaultsOver) {
			text = fmt.Appendf(text, "slot %s, token %d, entry %d from %v to %v, %v after the faults: %s\n", d.Slot,
				d.Token, d.Entry, d.From.UTC(), d.To.UTC(), d.To.Sub(h.FaultsOver), d.Reason)
		}
	}
	return text
}

// breakOff breaks one call off when all is quiet, waits until its slot must be free again, and returns the slots that
// no call can use then; idle says that all other work has ended, so that task nodes hold none. Whether a slot is in
// doubt when the faults end is up to chance, and to the backlog of recovery.
func (s *site) breakOff(ctx context.Context, idle bool) (unusable []string, err error) {
	p := judge.Push{Op: s.load.ops.Add(1), Queue: "solo", FailMax: attemptsMax, CrashMax: crashesMax}
	p.Called = time.Now()
	s.recorder.behave(dying, 100)
	defer s.recorder.behave(honest, 0)
	const push = `SELECT penstock.push($1, jsonb_build_object('op', $2::bigint, 'ms', 5))`
	if err := s.db.pool.QueryRow(ctx, push, p.Queue, p.Op).Scan(&p.Entry); err != nil {
		return nil, fmt.Errorf("push an entry whose call is broken off: %w", err)
	}
	p.Told, p.Returned = true, time.Now()
	s.load.record(&p)
	if err := s.await(ctx, "doubt", p.Entry); err != nil {
		return nil, err
	}
	s.recorder.behave(honest, 0)
	if err := s.await(ctx, "end", p.Entry); err != nil {
		return nil, err
	}
	for free := time.Now().Add(doubtMax + s.tolerance()); ; time.Sleep(100 * time.Millisecond) {
		unusable = s.list(ctx, doubtfulSQL, idle)
		if len(unusable) == 0 || time.Now().After(free) {
			return unusable, nil
		}
	}
}

// await returns when an event of an entry is recorded, or probeMax is over: the judges say what is missing then.
func (s *site) await(ctx context.Context, event string, entry int64) error {
	const sql = `SELECT EXISTS (SELECT FROM judge.event WHERE what = $1 AND entry_id = $2)`
	over := time.Now().Add(probeMax)
	for seen := false; !seen && time.Now().Before(over); time.Sleep(20 * time.Millisecond) {
		if err := s.db.pool.QueryRow(ctx, sql, event, entry).Scan(&seen); err != nil {
			return fmt.Errorf("read whether entry %d has event %q: %w", entry, event, err)
		}
	}
	return nil
}
