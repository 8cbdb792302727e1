package operator

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
)

// Verb is a change of one thing that needs to know nothing but which: the function of the schema of that name.
type Verb string

// The verbs, and what names the thing.
const (
	PauseQueue      Verb = "pause_queue"      // by name: stops claims; what runs goes on
	ResumeQueue     Verb = "resume_queue"     // ends the pause
	DisableQueue    Verb = "disable_queue"    // takes it out of service; it still accepts entries
	EnableQueue     Verb = "enable_queue"     // puts it back into service
	DisableEntry    Verb = "disable_entry"    // by id: takes it out of line; one that runs ends its run
	EnableEntry     Verb = "enable_entry"     // puts it back where it stood
	RetryFailure    Verb = "retry_failure"    // by the entry's id: puts it back into its queue, no attempts spent
	DiscardFailure  Verb = "discard_failure"  // forgets it; only the audit remembers
	CancelOperation Verb = "cancel_operation" // by id; what it has changed stays changed
	DrainNode       Verb = "drain_node"       // by id: it claims nothing more, finishes, hands back the rest and exits
	PauseCronJob    Verb = "pause_cron_job"   // by name: keeps it from firing
	ResumeCronJob   Verb = "resume_cron_job"  // its catch-up policy says what becomes of the times that it missed
	RunCronJob      Verb = "run_cron_job_now" // asks for a run beside the schedule; the elected leader starts it
	DropCronJob     Verb = "drop_cron_job"    // a run goes on
	PauseBatch      Verb = "pause_batch"      // by id: takes the parts that do not run out of the queue
	ResumeBatch     Verb = "resume_batch"     // ends the pause
	CancelBatch     Verb = "cancel_batch"     // parts that run are asked to end
	RetryBatch      Verb = "retry_batch"      // runs the parts again that did not end done
	RemoveModel     Verb = "remove_model"     // by name: forgets it; its queue stays
)

// String is the verb in words: pause cron job.
func (v Verb) String() string {
	return strings.TrimSuffix(strings.ReplaceAll(string(v), "_", " "), " now")
}

// Pauses says whether the verb takes a time at which its effect ends by itself.
func (v Verb) Pauses() bool { return strings.HasPrefix(string(v), "pause_") }

// Do carries out a verb on the thing of a name (string) or an id (int64). A time that is not zero is when a pause ends by
// itself; other verbs take none.
func (d *Database) Do(ctx context.Context, v Verb, thing any, by invalidation.By, until time.Time) error {
	sql, rest := `SELECT penstock.`+string(v)+`($3, $1, coalesce($2, current_user::text))`, []any{thing}
	if v.Pauses() {
		sql, rest = strings.TrimSuffix(sql, ")")+`, $4)`, append(rest, given(until))
	}
	return d.change(ctx, fmt.Sprintf("%s %v", v, thing), sql, by, rest...)
}
