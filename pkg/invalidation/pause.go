package invalidation

import (
	"context"
	"fmt"
	"time"

	"github.com/penstock/penstock/internal/postgres"
)

// By says who does something and why; both go into the audit. An empty Actor stands for the database user.
type By struct {
	Actor  string
	Reason string
}

// PauseQueue stops claims from a queue until somebody resumes it, or until a time to come if that is not zero.
// What runs goes on.
func PauseQueue(ctx context.Context, db postgres.DB, queue string, by By, until time.Time) error {
	const sql = `SELECT penstock.pause_queue($1, $2, $3, $4)`
	return control(ctx, db, "pause queue "+queue, sql, queue, by.Reason, given(by.Actor), givenTime(until))
}

// ResumeQueue ends a pause.
func ResumeQueue(ctx context.Context, db postgres.DB, queue string, by By) error {
	return control(ctx, db, "resume queue "+queue, `SELECT penstock.resume_queue($1, $2, $3)`, queue, by.Reason, given(by.Actor))
}

// DisableQueue takes a queue out of service until somebody enables it. It still accepts entries.
func DisableQueue(ctx context.Context, db postgres.DB, queue string, by By) error {
	return control(ctx, db, "disable queue "+queue, `SELECT penstock.disable_queue($1, $2, $3)`, queue, by.Reason, given(by.Actor))
}

// EnableQueue puts a disabled queue back into service.
func EnableQueue(ctx context.Context, db postgres.DB, queue string, by By) error {
	return control(ctx, db, "enable queue "+queue, `SELECT penstock.enable_queue($1, $2, $3)`, queue, by.Reason, given(by.Actor))
}

// DrainNode asks a node to claim nothing more, finish, hand back the rest and exit. It hears of it at its next
// heartbeat. ErrNotFound says that no such node is registered.
func DrainNode(ctx context.Context, db postgres.DB, node NodeID, by By) error {
	return control(ctx, db, fmt.Sprintf("drain node %d", node), `SELECT penstock.drain_node($1, $2, $3)`, node, by.Reason, given(by.Actor))
}

// control runs a function of the schema that returns nothing.
func control(ctx context.Context, db postgres.DB, what, sql string, args ...any) error {
	if _, err := db.Exec(ctx, sql, args...); err != nil {
		return fmt.Errorf("%s: %w", what, translate(err))
	}
	return nil
}
