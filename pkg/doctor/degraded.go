package doctor

import (
	"context"

	"github.com/jackc/pgx/v5"
)

// degradedSQL lists the degradations of codes $1, which the leader's metrics and /readyz show as well.
const degradedSQL = `SELECT detail, critical FROM penstock.degradations() WHERE code = ANY ($1)`

func checkDeadSlots(ctx context.Context, tx pgx.Tx, _ Config) (Finding, error) {
	return judged(ctx, tx, degradedSQL, "no slot is held by a dead node", "models with slots that dead nodes hold: %d",
		"They come free when the worker's health reports fewer runs (active_jobs), or when the longest run that the "+
			"model allows is over. Where that takes too long, and the worker computes none of their calls: "+
			"penstock slot free MODEL --server SERVER --reason '...'.",
		[]string{"dead_slots"})
}

func checkInstances(ctx context.Context, tx pgx.Tx, _ Config) (Finding, error) {
	return judged(ctx, tx, degradedSQL, "every model with instances has one that takes calls",
		"models without an instance that takes calls: %d",
		"See the logs of the workers named here. A quarantine ends once probes succeed, or by penstock instance "+
			"register; if one entry is the cause, disable it.",
		[]string{"quarantined", "no_instance"})
}

func checkHints(ctx context.Context, tx pgx.Tx, _ Config) (Finding, error) {
	return judged(ctx, tx, degradedSQL, "every live node hears hints, or is told not to",
		"nodes that hear no hints: %d",
		"Entries start later by a poll (250 ms). Behind a pooler set database.direct_url to the address of Postgres "+
			"itself; where there is "+
			"none, start nodes with --hints=false.",
		[]string{"no_hints"})
}

func checkRoom(ctx context.Context, tx pgx.Tx, _ Config) (Finding, error) {
	return judged(ctx, tx, degradedSQL, "pushes are taken", "pushes are refused for want of room: %d",
		"Entries that wait are run, and pushes are taken again when there is room: add disk, keep results, failures "+
			"for less long, start nodes, or raise leader.brake. A queue with a capacity of its own goes by that.",
		[]string{"storage_full", "queue_full"})
}

func checkBlockedKeys(ctx context.Context, tx pgx.Tx, _ Config) (Finding, error) {
	return judged(ctx, tx, degradedSQL, "no lock key is blocked by a failure", "queues with blocked lock keys: %d",
		"Their entries wait, in their order. See the failure, mend its cause, then unblock: penstock group unblock "+
			"QUEUE --lock-key KEY, with --retry to run the failed entry first.",
		[]string{"blocked_keys"})
}

// cronJobsSQL lists jobs that cannot fire, and those that are silent since a clock that was ahead fired them, or ended
// their run. The cancel of a waiting entry handles a time to come as well, and leaves no such trace.
const cronJobsSQL = `
SELECT detail, critical FROM penstock.degradations() WHERE code = 'cron_broken'
 UNION ALL
SELECT format('cron job %s of queue %s fires nothing before %s, since the clock was ahead', j.name, q.name,
              to_char(j.handled_at AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS "UTC"')), false
  FROM penstock.cron_job j
  JOIN penstock.queue q ON q.id = j.queue_id
 WHERE j.handled_at > clock_timestamp() + interval '1 minute'
   AND (j.paused_at IS NULL OR NOT penstock.paused_until(j.paused_until))
   AND (greatest(j.fired_at, j.ended_at, j.catching_up_to) > clock_timestamp() + interval '1 minute'
        OR EXISTS (SELECT FROM penstock.cron_firing f WHERE f.job_id = j.id AND f.nominal_at = j.handled_at))`

func checkCronJobs(ctx context.Context, tx pgx.Tx, _ Config) (Finding, error) {
	return judged(ctx, tx, cronJobsSQL, "every cron job has a next run, or is paused or over",
		"cron jobs that are silent or without a next run: %d",
		"A schedule that cannot be read, or a job that is silent since the clock was ahead: penstock cron alter JOB "+
			"--set spec='...' --set zone=... --reason '...'. A push that is refused is tried again each minute: mend "+
			"what refuses it. For what was missed: penstock cron run JOB. A job that is of no use any more: penstock "+
			"cron drop JOB.")
}

func checkStandstills(ctx context.Context, tx pgx.Tx, _ Config) (Finding, error) {
	return judged(ctx, tx, degradedSQL, "no queue with work and nodes is at a standstill", "queues at a standstill: %d",
		"The causes are named behind each queue; where there is none, the nodes' logs say why they claim nothing. "+
			"penstock entry explain tells more of one entry.",
		[]string{"standstill"})
}
