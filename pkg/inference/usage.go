package inference

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"strconv"
	"time"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/usage"
	"github.com/penstock/penstock/pkg/worker"
)

// usageKey names a row of penstock.usage_hour.
type usageKey struct {
	hour        time.Time
	queue       int32
	model, flow string
}

func (k usageKey) compare(other usageKey) int {
	return cmp.Or(k.hour.Compare(other.hour), cmp.Compare(k.queue, other.queue), cmp.Compare(k.model, other.model),
		cmp.Compare(k.flow, other.flow))
}

// Used is the use of workers by calls.
type Used struct {
	Calls int64
	// GPU is how long slots were busy with them, times the GPUs of the instance and the sequences that a generation
	// asked for (n or best_of for each prompt); a batch's is divided.
	GPU    time.Duration
	Extra  time.Duration // of that, beyond the time of the slots: of further GPUs and sequences
	Wasted time.Duration // of GPU, for runs whose answer was not kept
	Runs   int64         // calls whose answer was kept
	Run    time.Duration // for how long these kept their slots
	Tokens worker.Tokens
}

// UsageMeter adds up the use of calls, and folds it into penstock.usage_hour every few seconds: a row for each flow and
// hour, which each node touches once in that time.
type UsageMeter = usage.Meter[usageKey, Used]

func newUsageMeter(db postgres.DB, t tuning, node func() invalidation.NodeID, log *slog.Logger) *UsageMeter {
	return usage.New(usage.Config[usageKey, Used]{
		DB: db, Node: node, Every: t.usageEvery, EndMax: t.exchangeMax, Step: "fold usage", Log: log,
		Compare: usageKey.compare, Add: (*Used).add, Times: (*Used).times, Send: foldUsage,
	})
}

func (u *Used) add(more Used) {
	u.Calls += more.Calls
	u.GPU += more.GPU
	u.Extra += more.Extra
	u.Wasted += more.Wasted
	u.Runs += more.Runs
	u.Run += more.Run
	u.Tokens.In += more.Tokens.In
	u.Tokens.Cached += more.Tokens.Cached
	u.Tokens.Out += more.Tokens.Out
}

func (u *Used) times() []*time.Duration { return []*time.Duration{&u.GPU, &u.Extra, &u.Wasted, &u.Run} }

// foldUsageSQL adds rows to the hours, unless it has done so for the node's fold of this number. Rows come in the order
// of their keys, so that two nodes cannot wait for each other.
const foldUsageSQL = `
WITH fold AS (
    INSERT INTO penstock.gateway_fold AS f (node_id, seq) VALUES ($14, $15)
    ON CONFLICT (node_id) DO UPDATE SET seq = excluded.seq, at = clock_timestamp() WHERE f.seq < excluded.seq
    RETURNING f.seq
), folded AS (
    INSERT INTO penstock.usage_hour AS u
           (hour, queue_id, model, flow, calls, gpu_ms, wasted_ms, tokens_in, tokens_cached, tokens_out, runs, run_ms,
            extra_ms, application)
    SELECT k.*, (SELECT q.application FROM penstock.queue q WHERE q.id = k.queue_id)
      FROM unnest($1::timestamptz[], $2::integer[], $3::text[], $4::text[], $5::bigint[], $6::bigint[],
                  $7::bigint[], $8::bigint[], $9::bigint[], $10::bigint[], $11::bigint[], $12::bigint[],
                  $13::bigint[]) k(hour, queue_id)
     WHERE EXISTS (SELECT FROM fold)
    ON CONFLICT (hour, queue_id, model, flow) DO UPDATE
       SET calls = u.calls + excluded.calls, gpu_ms = u.gpu_ms + excluded.gpu_ms,
           wasted_ms = u.wasted_ms + excluded.wasted_ms, tokens_in = u.tokens_in + excluded.tokens_in,
           tokens_cached = u.tokens_cached + excluded.tokens_cached, tokens_out = u.tokens_out + excluded.tokens_out,
           runs = u.runs + excluded.runs, run_ms = u.run_ms + excluded.run_ms,
           extra_ms = u.extra_ms + excluded.extra_ms, application = coalesce(excluded.application, u.application)
)
SELECT clock_timestamp()`

// foldUsage adds rows to the database.
func foldUsage(
	ctx context.Context, db postgres.DB, node invalidation.NodeID, seq int64, rows []usage.Row[usageKey, Used],
) (now time.Time, err error) {
	var c usageColumns
	for _, r := range rows {
		c.append(r.Key, r.Used)
	}
	err = db.QueryRow(ctx, foldUsageSQL, c.hours, c.queues, c.models, c.flows, c.calls, c.gpu, c.wasted, c.in,
		c.cached, c.out, c.runs, c.run, c.extra, node, seq).Scan(&now)
	if err != nil {
		return now, fmt.Errorf("fold usage of %d flows: %w", len(rows), err)
	}
	return now, nil
}

type usageColumns struct {
	hours                               []time.Time
	queues                              []int32
	models, flows                       []string
	calls, gpu, wasted, in, cached, out []int64
	runs, run, extra                    []int64
}

func (c *usageColumns) append(k usageKey, u Used) {
	c.hours, c.queues = append(c.hours, k.hour), append(c.queues, k.queue)
	c.models, c.flows = append(c.models, k.model), append(c.flows, k.flow)
	c.calls, c.gpu = append(c.calls, u.Calls), append(c.gpu, u.GPU.Milliseconds())
	c.wasted, c.in = append(c.wasted, u.Wasted.Milliseconds()), append(c.in, u.Tokens.In)
	c.cached, c.out = append(c.cached, u.Tokens.Cached), append(c.out, u.Tokens.Out)
	c.runs, c.run = append(c.runs, u.Runs), append(c.run, u.Run.Milliseconds())
	c.extra = append(c.extra, u.Extra.Milliseconds())
}

// ran says whether a call had use of its slot. Where nothing ran there is nothing to count.
func ran(o worker.Outcome) bool {
	return o.Kind != worker.Busy && o.Kind != worker.NotReady && o.Kind != worker.Rejected
}

// use counts what an exchange took of the worker; members is how many entries shared it. A run that the worker accepted
// is counted once and as a whole, by the node that sees its end: those before it, which may have died, count nothing of
// it.
func (d *dispatch) use(o worker.Outcome, members int) {
	if !ran(o) {
		return
	}
	took := d.took()
	used := d.usedBy(took/time.Duration(max(members, 1)), d.held.endpoint)
	used.Calls, used.Tokens = 1, o.Tokens
	if o.Kind == worker.Done {
		used.Runs, used.Run = 1, took
	} else {
		used.Wasted = used.GPU
	}
	d.used.add(used)
	d.run.Charge(d.used.GPU)
	d.counted.key, d.counted.Used = d.usageKey(), used
	d.usage.Add(d.counted.key, used)
}

// dropAnswer counts what was counted of the last call as wasted: the worker has answered, and the answer is not kept.
func (d *dispatch) dropAnswer() {
	last := d.counted.Used
	d.usage.Add(d.counted.key, Used{Runs: -last.Runs, Run: -last.Run, Wasted: last.GPU - last.Wasted})
	d.counted.Used = Used{}
}

// useAfterLeave counts the part of an entry in the rest of a call for several, once that is over and the others pay for
// their parts.
func (d *dispatch) useAfterLeave(rest time.Duration, call *sharedCall) {
	used := d.usedBy(rest/time.Duration(call.members), call.held.endpoint)
	used.Wasted = used.GPU
	d.usage.Add(d.usageKey(), used)
}

// usedBy is the use of the GPUs of an instance by a call that keeps a slot for so long.
func (d *dispatch) usedBy(slot time.Duration, endpoint *Endpoint) Used {
	gpu := slot * time.Duration(endpoint.GPUs()) * time.Duration(d.model.Choices(d.call))
	return Used{GPU: gpu, Extra: gpu - slot}
}

// usageKey is the row to which what ends now is counted.
func (d *dispatch) usageKey() usageKey {
	return usageKey{
		hour: d.usage.Hour(), queue: d.run.Queue.ID, model: d.model.Name,
		flow: d.run.Lock.Lane.Flow,
	}
}

// took is for how long the call has kept its slot, or, where it is of an earlier lock, since that one began it.
func (d *dispatch) took() time.Duration { return d.before + time.Since(d.began) }

// gpusMax bounds the label gpus, which anyone with the scope announce may set: the use of a call is its time, times
// this and its sequences, and has to fit a time.Duration.
const gpusMax = 1024

// GPUs is how many GPUs an instance works with, by its label gpus, from 1 to gpusMax; 1 with another value or none.
func (e *Endpoint) GPUs() int {
	if n, err := strconv.Atoi(e.Labels["gpus"]); err == nil && n > 0 && n <= gpusMax {
		return n
	}
	return 1
}

// sweepUsageSQL forgets usage after thirteen months.
const sweepUsageSQL = `
DELETE FROM penstock.usage_hour u
 WHERE u.ctid = ANY (ARRAY(SELECT x.ctid FROM penstock.usage_hour x
                            WHERE x.hour < now() - interval '13 months' LIMIT 10000))`

// sweepFoldsSQL forgets the last folds of nodes that are gone.
const sweepFoldsSQL = `
DELETE FROM penstock.gateway_fold f
 WHERE f.at < clock_timestamp() - interval '1 day' AND NOT EXISTS (SELECT FROM penstock.node n WHERE n.id = f.node_id)`
