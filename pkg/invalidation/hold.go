package invalidation

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/penstock/penstock/internal/postgres"
)

// The scopes of a pause beside ByName and ByLockKey, which are those of one queue.
const (
	ByFlow        Scope = "flow"        // of one queue or of all
	ByModel       Scope = "model"       // queues of the model
	ByApplication Scope = "application" // queues of the application
	ByNode        Scope = "node"        // a node, by name or id
)

// Subject is what to pause beside a whole queue (PauseQueue). Queue is needed for names and lock keys, and may be given for a flow.
type Subject struct {
	Scope Scope
	Value string
	Queue string
}

func (s Subject) String() string { return fmt.Sprintf("%s %q", s.Scope, s.Value) }

// Pause stops claims of the subject until somebody resumes it, or until a time to come if that is not zero. What runs
// goes on. Every node goes by it within one heartbeat. Pausing again changes reason and end.
func Pause(ctx context.Context, db postgres.DB, s Subject, by By, until time.Time) error {
	const sql = `SELECT penstock.pause($1, $2, $3, $4, coalesce($5, current_user::text), $6)`
	return control(ctx, db, "pause "+s.String(), sql, s.Scope, s.Value, given(s.Queue), by.Reason, given(by.Actor), givenTime(until))
}

// Resume ends a pause. ErrState says that there is none.
func Resume(ctx context.Context, db postgres.DB, s Subject, by By) error {
	const sql = `SELECT penstock.resume($1, $2, $3, $4, coalesce($5, current_user::text))`
	return control(ctx, db, "resume "+s.String(), sql, s.Scope, s.Value, given(s.Queue), by.Reason, given(by.Actor))
}

// EndPauses ends the pauses whose time is over and returns how many. The elected leader calls it about every second.
func EndPauses(ctx context.Context, db postgres.DB) (int, error) {
	var n int
	if err := db.QueryRow(ctx, `SELECT penstock.end_pauses()`).Scan(&n); err != nil {
		return 0, fmt.Errorf("end pauses: %w", err)
	}
	return n, nil
}

// SetQuota bounds what an application uses over all its queues, those to come as well. Nil removes the bound.
func SetQuota(ctx context.Context, db postgres.DB, application string, l *Limit, by By) error {
	const sql = `SELECT penstock.set_quota($1, $2, $3, coalesce($4, current_user::text))`
	return control(ctx, db, "set quota of application "+application, sql, application, l, by.Reason, given(by.Actor))
}

// hold is a pause that concerns the whole queue, or one of its flows.
type hold struct {
	scope   Scope
	value   string
	control Control
}

// readHolds reads what penstock.queue_pauses writes. Ends are counted on this process's clock from now on.
func readHolds(text []byte) ([]hold, error) {
	var rows []struct {
		Scope         Scope
		Value         string
		Actor, Reason string
		At            time.Time
		Left          *float64
	}
	if err := json.Unmarshal(text, &rows); err != nil {
		return nil, fmt.Errorf("read pauses: %w", err)
	}
	holds := make([]hold, len(rows))
	for i, r := range rows {
		holds[i] = hold{r.Scope, r.Value, Control{At: r.At, Actor: r.Actor, Reason: r.Reason}}
		if r.Left != nil {
			holds[i].control.Until = time.Now().Add(time.Duration(*r.Left * float64(time.Second)))
		}
	}
	return holds, nil
}

// Held says by which pause nothing of a flow may be claimed now, as of when the queue was read: a pause of the queue,
// its model, its application or the flow. It looks at no database.
func (q *Queue) Held(flow string, now time.Time) (Control, bool) {
	lasts := func(c Control) bool { return c.Until.IsZero() || now.Before(c.Until) }
	if p := q.Config.Paused; p != nil && lasts(*p) {
		return *p, true
	}
	for _, h := range q.holds {
		if (h.scope != ByFlow || h.value == flow) && lasts(h.control) {
			return h.control, true
		}
	}
	return Control{}, false
}
