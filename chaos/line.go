package main

import (
	"context"
	"fmt"
	"time"

	"github.com/penstock/penstock/chaos/judge"
)

// lineEntries are as many as several claims take.
const lineEntries = 300

// lineUp keeps entries in line, by a pause of their queue, for three times as long as they may be overtaken without a
// disturbance, and returns what has not ended some time after the pause. A release run whose queues do not fall behind
// has no other entry that was in line for so long.
func (s *site) lineUp(ctx context.Context) (left []string, err error) {
	if err := s.db.exec(ctx, `SELECT penstock.pause_queue('solo', 'entries have to line up')`); err != nil {
		return nil, fmt.Errorf("pause the queue of a line: %w", err)
	}
	const push = `SELECT penstock.push('solo', '{"op": 0, "ms": 1}') FROM generate_series(1, $1::int)`
	if err := s.db.exec(ctx, push, lineEntries); err != nil {
		return nil, fmt.Errorf("push a line: %w", err)
	}
	select {
	case <-time.After(3 * (judge.OvertakenMax + s.tolerance())):
	case <-ctx.Done():
		return nil, ctx.Err()
	}
	if err := s.db.exec(ctx, `SELECT penstock.resume_queue('solo')`); err != nil {
		return nil, fmt.Errorf("resume the queue of a line: %w", err)
	}
	return s.drain(ctx, "drain-line.txt").left, nil
}
