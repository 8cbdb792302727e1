package invalidation

import (
	"encoding/json"
	"fmt"
	"time"
)

// By is the actor and the reason of a change, for the audit. An empty Actor means the database user.
type By struct {
	Actor  string
	Reason string
}

// pause is one that concerns the whole queue (its model or its application), or one of its flows.
type pause struct {
	scope   string // flow, model or application
	value   string
	control Control
}

// readPauses reads the answer of penstock.queue_pauses. Ends are counted on this process's clock from now on.
func readPauses(text []byte) ([]pause, error) {
	if text == nil {
		return nil, nil
	}
	var rows []struct {
		Scope, Value  string
		Actor, Reason string
		At            time.Time
		Left          *float64 // seconds
	}
	if err := json.Unmarshal(text, &rows); err != nil {
		return nil, fmt.Errorf("read pauses: %w", err)
	}
	pauses := make([]pause, len(rows))
	for i, r := range rows {
		c := Control{At: r.At, Until: endOfPause(r.Left), Actor: r.Actor, Reason: r.Reason}
		pauses[i] = pause{r.Scope, r.Value, c}
	}
	return pauses, nil
}

// endOfPause is the end of a pause that lasts so many seconds from now on, by the database's clock; nil: until it is
// resumed. A Duration has 292 years; a pause may have more.
func endOfPause(left *float64) time.Time {
	const century = 100 * 365 * 24 * 3600
	if left == nil {
		return time.Time{}
	}
	return time.Now().Add(time.Duration(min(*left, century) * float64(time.Second)))
}

// Paused returns the pause that keeps entries of a flow from being claimed at now: one of the queue, its model, its
// application or the flow. It knows the pauses of the moment when the queue was read, and asks no database.
func (q *Queue) Paused(flow string, now time.Time) (Control, bool) {
	lasts := func(c Control) bool { return c.Until.IsZero() || now.Before(c.Until) }
	if p := q.paused; p != nil && lasts(*p) {
		return *p, true
	}
	for _, pauses := range [][]pause{q.pauses, q.everywhere.pauses} {
		for _, p := range pauses {
			if (p.scope != "flow" || p.value == flow) && lasts(p.control) {
				return p.control, true
			}
		}
	}
	return Control{}, false
}
