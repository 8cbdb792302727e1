package operator

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
)

// Verb is a change of one object that needs only its name or id: the function of the schema of that
// name.
type Verb string

// The verbs, and the name or id of their objects.
const (
	PauseQueue      Verb = "pause_queue"      // by name: stops claims; runs go on
	ResumeQueue     Verb = "resume_queue"     // ends the pause
	DisableQueue    Verb = "disable_queue"    // takes it out of service; it still accepts entries
	EnableQueue     Verb = "enable_queue"     // puts it back into service
	DisableEntry    Verb = "disable_entry"    // by id: it is not claimed; a run goes on to its end
	EnableEntry     Verb = "enable_entry"     // puts it back at its position
	RetryFailure    Verb = "retry_failure"    // by the entry's id: puts it back into its queue, no attempts spent
	DiscardFailure  Verb = "discard_failure"  // deletes it; only the audit keeps a record
	CancelOperation Verb = "cancel_operation" // by id; changes already made stay
	// by id: it stops claiming, finishes its runs, releases the rest and exits
	DrainNode     Verb = "drain_node"
	PauseCronJob  Verb = "pause_cron_job"   // by name: keeps it from firing
	ResumeCronJob Verb = "resume_cron_job"  // its catch-up policy applies to the missed times
	RunCronJob    Verb = "run_cron_job_now" // requests a run beside the schedule; the elected leader starts it
	DropCronJob   Verb = "drop_cron_job"    // a run goes on
	PauseBatch    Verb = "pause_batch"      // by id: releases parts that do not run from the queue
	ResumeBatch   Verb = "resume_batch"     // ends the pause
	CancelBatch   Verb = "cancel_batch"     // requests the cancel of running parts
	RetryBatch    Verb = "retry_batch"      // runs the parts again that are not done
	RemoveModel   Verb = "remove_model"     // by name: deletes it; its queue stays
	// by id: a gateway cancels the lines that have not ended
	CancelRequestBatch Verb = "cancel_request_batch"
)

// String is the verb in words: pause cron job.
func (v Verb) String() string {
	return strings.TrimSuffix(strings.ReplaceAll(string(v), "_", " "), " now")
}

// Pauses reports whether the verb takes a time at which its effect ends by itself.
func (v Verb) Pauses() bool { return strings.HasPrefix(string(v), "pause_") }

// Do applies a verb to the object of a name (string) or an id (int64). A time that is not zero is
// the end of a pause; other verbs take none. It returns the pause that was in force before, if the verb pauses.
func (d *Database) Do(ctx context.Context, v Verb, thing any, by invalidation.By, until time.Time) (*Replaced, error) {
	sql := `SELECT penstock.` + string(v) + `($3, $1, coalesce($2, current_user::text)`
	does := fmt.Sprintf("%s %v", v, thing)
	if v.Pauses() {
		return d.pausing(ctx, does, sql+`, $4)`, by, thing, given(until))
	}
	return nil, d.change(ctx, does, sql+`)`, by, thing)
}
