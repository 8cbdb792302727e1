package operator

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// bed is a database with a queue `work` and the operator's functions on it.
type bed struct {
	*testing.T
	pool *pgxpool.Pool
	q    *invalidation.Queue
	d    *Database
}

var by = invalidation.By{Actor: "ada", Reason: "because"}

func newBed(t *testing.T) *bed {
	t.Helper()
	pool, err := postgres.Open(t.Context(), postgres.Config{DSN: pgtest.DSN(t)})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	b := &bed{T: t, pool: pool, d: New(pool)}
	if err := b.d.CreateQueue(t.Context(), "work", map[string]any{"mergeable": true}, by); err != nil {
		t.Fatal(err)
	}
	if b.q, err = invalidation.Open(t.Context(), pool, "work"); err != nil {
		t.Fatal(err)
	}
	return b
}

func (b *bed) push(pushes ...invalidation.Push) []int64 {
	b.Helper()
	for i := range pushes {
		if pushes[i].Payload == nil {
			pushes[i].Payload = json.RawMessage(`{}`)
		}
	}
	pushed, err := b.d.Push(b.Context(), "work", pushes...)
	if err != nil {
		b.Fatal(err)
	}
	ids := make([]int64, len(pushed))
	for i, p := range pushed {
		ids[i] = int64(p.ID)
	}
	return ids
}

// claim registers a node and takes up to n locks of the usual lane for it.
func (b *bed) claim(node invalidation.NodeID, n int) []*invalidation.Lock {
	b.Helper()
	err := invalidation.Register(b.Context(), b.pool, invalidation.Node{
		ID: node, Name: "gpu-1", Application: "default", Lease: 10 * time.Second, Threads: 4, Queues: []int32{b.q.ID},
	})
	if err != nil {
		b.Fatal(err)
	}
	c, err := b.q.Claim(b.Context(), invalidation.ClaimRequest{Node: node, Lane: invalidation.Lane{Priority: 1}, Limit: n})
	if err != nil {
		b.Fatal(err)
	}
	return c.Locks
}

// fail ends every entry of the locks in error.
func (b *bed) fail(node invalidation.NodeID, text string, locks ...*invalidation.Lock) {
	b.Helper()
	for _, l := range locks {
		e := invalidation.Fail(l, l.Entries[0].ID, invalidation.Failure{Class: "input", Error: text}, time.Second)
		e.Last = true
		if _, err := b.q.Settle(b.Context(), node, []invalidation.Ending{e}); err != nil {
			b.Fatal(err)
		}
	}
}

func (b *bed) exec(sql string) {
	b.Helper()
	if _, err := b.pool.Exec(b.Context(), sql); err != nil {
		b.Fatal(err)
	}
}

func TestQueueShowsDepthByStateAndTheAgeOfItsHead(t *testing.T) {
	b := newBed(t)
	b.push(invalidation.Push{}, invalidation.Push{LockKey: "K"}, invalidation.Push{LockKey: "K"}, invalidation.Push{Flow: "other"},
		invalidation.Push{DueAt: time.Now().Add(time.Hour)})
	b.exec(`UPDATE penstock.entry SET created_at = now() - interval '90 seconds' WHERE lock_key = 'K'`)
	b.claim(71, 1)
	q, err := b.d.Queue(t.Context(), "work")
	if err != nil {
		t.Fatal(err)
	}
	if q.Initial != 1 || q.Pending != 4 || q.Computing != 1 || q.AwaitingCompute != 4 || q.Serving != 1 || q.Estimated {
		t.Errorf("queue is %+v", q.Queue)
	}
	if q.HeadAgeSeconds == nil || *q.HeadAgeSeconds < 90 || *q.HeadAgeSeconds > 120 {
		t.Errorf("head of line has waited %v seconds, want those of group K", q.HeadAgeSeconds)
	}
	if all, err := b.d.Queues(t.Context(), []string{}...); err != nil || len(all) == 0 {
		t.Errorf("no names find %d queues (%v), want all", len(all), err)
	}
	if len(q.Lanes) != 2 {
		t.Errorf("lanes are %+v, want one a flow", q.Lanes)
	}
	if _, err := b.d.Queue(t.Context(), "nil"); !errors.Is(err, invalidation.ErrQueueNotFound) {
		t.Errorf("a queue that is not there: %v", err)
	}
}

func TestHeadOfLineLeavesOutWhatCannotRun(t *testing.T) {
	b := newBed(t)
	b.push(invalidation.Push{LockKey: "K"})
	b.claim(71, 1)
	b.push(invalidation.Push{LockKey: "K"})
	b.exec(`UPDATE penstock.entry SET created_at = now() - interval '90 seconds'`)
	head := func() *float64 {
		q, err := b.d.Queue(t.Context(), "work")
		if err != nil {
			t.Fatal(err)
		}
		return q.HeadAgeSeconds
	}
	if got := head(); got != nil {
		t.Errorf("with only a held key in line the head has waited %v seconds, want none", *got)
	}
	b.push(invalidation.Push{})
	if got := head(); got == nil || *got > 60 {
		t.Errorf("head is %v, want the entry that can run", got)
	}
	low := int16(0)
	for i := range 100 { // as many lanes as are read
		b.push(invalidation.Push{Flow: fmt.Sprint(i), Priority: &low})
	}
	b.exec(`UPDATE penstock.entry SET created_at = now() - CASE priority WHEN 0 THEN interval '900 seconds' ELSE '90 seconds' END`)
	if got := head(); got == nil || *got < 90 || *got > 120 {
		t.Errorf("head is %v, want the entry of the queue's priority, and none below", got)
	}
	flow := Subject{Scope: ByFlow, Value: ""}
	if _, err := b.d.Pause(t.Context(), flow, by, time.Time{}); err != nil {
		t.Fatal(err)
	}
	if got := head(); got != nil {
		t.Errorf("head of a paused flow is %v, want none", *got)
	}
	if err := b.d.Resume(t.Context(), flow, by); err != nil {
		t.Fatal(err)
	}
	if _, err := b.d.Do(t.Context(), PauseQueue, "work", by, time.Time{}); err != nil {
		t.Fatal(err)
	}
	if got := head(); got != nil {
		t.Errorf("head of a paused queue is %v, want none", *got)
	}
}

func TestEntriesAreFoundByEachState(t *testing.T) {
	b := newBed(t)
	ids := b.push(invalidation.Push{}, invalidation.Push{LockKey: "K"}, invalidation.Push{LockKey: "K"}, invalidation.Push{Name: "mail"},
		invalidation.Push{DueAt: time.Now().Add(time.Hour)}, invalidation.Push{})
	if _, err := b.d.Do(t.Context(), DisableEntry, ids[5], by, time.Time{}); err != nil {
		t.Fatal(err)
	}
	b.claim(71, 2)
	for _, c := range []struct {
		filter EntryFilter
		want   []int64
	}{
		{EntryFilter{}, ids},
		{EntryFilter{After: ids[1], Limit: 2}, ids[2:4]},
		{EntryFilter{State: "computing"}, ids[:3]},
		{EntryFilter{State: "computing", LockKey: "K"}, ids[1:3]},
		{EntryFilter{State: "pending"}, ids[3:4]},
		{EntryFilter{State: "initial"}, ids[4:5]},
		{EntryFilter{State: "disabled"}, ids[5:]},
		{EntryFilter{Name: "mail"}, ids[3:4]},
		{EntryFilter{Flow: "none"}, nil},
	} {
		c.filter.Queue = "work"
		found, err := b.d.Entries(t.Context(), c.filter)
		if err != nil {
			t.Fatal(err)
		}
		var got []int64
		for _, e := range found {
			got = append(got, e.ID)
			if c.filter.State != "" && e.State != c.filter.State {
				t.Errorf("%+v found entry %d, whose state is %s", c.filter, e.ID, e.State)
			}
		}
		if !slices.Equal(got, c.want) {
			t.Errorf("%+v found %v, want %v", c.filter, got, c.want)
		}
	}
	if _, err := b.d.Entries(t.Context(), EntryFilter{Queue: "work", State: "lost"}); !errors.Is(err, invalidation.ErrInvalid) {
		t.Errorf("an unknown state: %v", err)
	}
}

func TestEntryIsShownWhereverItIs(t *testing.T) {
	b := newBed(t)
	ids := b.push(invalidation.Push{Payload: json.RawMessage(`{"a": 1}`)}, invalidation.Push{})
	e, err := b.d.Entry(t.Context(), ids[0])
	if err != nil || e.State != "pending" || string(e.Payload) != `{"a": 1}` || e.Entry == nil {
		t.Errorf("entry in line is %+v (%v)", e, err)
	}
	b.fail(71, "no such file 17", b.claim(71, 1)...)
	if e, err = b.d.Entry(t.Context(), ids[0]); err != nil || e.State != "failed" || e.Queue != "work" || e.Ended.Reason != "no such file 17" {
		t.Errorf("failed entry is %+v (%v)", e, err)
	}
	if _, err := b.d.Entry(t.Context(), 1<<40); !errors.Is(err, invalidation.ErrEntryNotFound) {
		t.Errorf("an entry that is not there: %v", err)
	}
}

func TestGroupsPageByKeyAndShowWhoHoldsThem(t *testing.T) {
	b := newBed(t)
	b.push(invalidation.Push{LockKey: "A"}, invalidation.Push{LockKey: "B"}, invalidation.Push{LockKey: "B"}, invalidation.Push{LockKey: "C"}, invalidation.Push{})
	b.claim(71, 1)
	first, err := b.d.Groups(t.Context(), "work", "", 2)
	if err != nil || len(first) != 2 || first[0].LockKey != "A" || first[0].Node != "gpu-1" || first[1].Entries != 2 || first[1].Token != nil {
		t.Fatalf("first page is %+v (%v)", first, err)
	}
	rest, err := b.d.Groups(t.Context(), "work", "B", 2)
	if err != nil || len(rest) != 1 || rest[0].LockKey != "C" {
		t.Fatalf("second page is %+v (%v)", rest, err)
	}
	n, next, err := b.d.Compact(t.Context(), "work", "", "", by)
	if err != nil || n != 1 || next != "" {
		t.Fatalf("compacted %d up to %q (%v), want one of group B", n, next, err)
	}
}

// The change of a queue and its line in the audit are kept together or not at all.
func TestACompactionThatCannotBeRecordedIsNotMade(t *testing.T) {
	b := newBed(t)
	b.push(invalidation.Push{LockKey: "B"}, invalidation.Push{LockKey: "B"})
	if _, err := b.pool.Exec(t.Context(), `
CREATE FUNCTION no_line() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE 'the audit is full'; END $$;
CREATE TRIGGER no_line BEFORE INSERT ON penstock.audit FOR EACH ROW EXECUTE FUNCTION no_line()`); err != nil {
		t.Fatal(err)
	}
	for _, key := range []string{"B", ""} {
		if n, _, err := b.d.Compact(t.Context(), "work", key, "", by); err == nil || n != 0 {
			t.Errorf("compaction of %q replaced %d without a line in the audit (%v)", key, n, err)
		}
	}
	groups, err := b.d.Groups(t.Context(), "work", "", 2)
	if err != nil || len(groups) != 1 || groups[0].Entries != 2 {
		t.Errorf("the groups are %+v (%v), want B with its two entries", groups, err)
	}
}

func TestFailuresAreFoundByWhatTheyHaveInCommon(t *testing.T) {
	b := newBed(t)
	ids := b.push(invalidation.Push{}, invalidation.Push{}, invalidation.Push{})
	for i, l := range b.claim(71, 3) {
		b.fail(71, []string{"line 1 is bad", "line 2 is bad", "out of paper"}[i], l)
	}
	causes, err := b.d.Causes(t.Context(), "work", time.Time{}, 0)
	if err != nil || len(causes) != 2 || causes[0].Failures != 2 || causes[0].ExampleID != ids[1] {
		t.Fatalf("causes are %+v (%v)", causes, err)
	}
	found, err := b.d.Failures(t.Context(), FailureFilter{Queue: "work", Fingerprint: causes[0].Fingerprint, Class: "input"})
	if err != nil || len(found) != 2 || found[0].ID != ids[1] {
		t.Fatalf("failures are %+v (%v)", found, err)
	}
	if found, err = b.d.Failures(t.Context(), FailureFilter{Queue: "work", Before: ids[1]}); err != nil || len(found) != 1 || found[0].ID != ids[0] {
		t.Fatalf("failures before %d are %+v (%v)", ids[1], found, err)
	}
	if _, err = b.pool.Exec(t.Context(), `UPDATE penstock.failure SET failed_at = failed_at - interval '2 hours' WHERE entry_id = $1`, ids[1]); err != nil {
		t.Fatal(err)
	}
	hourAgo := time.Now().Add(-time.Hour)
	if found, err = b.d.Failures(t.Context(), FailureFilter{Queue: "work", Since: hourAgo}); err != nil || len(found) != 2 || found[1].ID != ids[0] {
		t.Fatalf("failures of the last hour are %+v (%v)", found, err)
	}
	if causes, err = b.d.Causes(t.Context(), "work", hourAgo, 0); err != nil || len(causes) != 2 || causes[0].Failures != 1 {
		t.Fatalf("causes of the last hour are %+v (%v)", causes, err)
	}
	one, err := b.d.Failure(t.Context(), ids[2])
	if err != nil || one.Error != "out of paper" || string(one.Payload) != `{}` {
		t.Fatalf("failure is %+v (%v)", one, err)
	}
}

func TestMoreMayMatchThanWereCounted(t *testing.T) {
	for _, c := range []struct {
		of   Operation
		want bool
	}{
		{Operation{Status: "running", Matched: 20, Changed: 5}, false},
		{Operation{Status: "running", Matched: 20, Changed: 20}, true},
		{Operation{Status: "running", Matched: 20, Changed: 5, Partial: true}, true},
		{Operation{Status: "cancelled", Matched: 20, Changed: 5, Partial: true}, true},
		{Operation{Status: "done", Matched: 20, Changed: 20}, false},
		{Operation{Status: "done", Matched: 20, Changed: 20, Partial: true}, false},
		{Operation{Status: "done", Matched: 20, Changed: 5, Partial: true}, true},
	} {
		if got := c.of.AtLeast(); got != c.want {
			t.Errorf("of %+v more may match: %t, want %t", c.of, got, c.want)
		}
	}
}

func TestOperationsAreCarriedOutWithoutALeader(t *testing.T) {
	b := newBed(t)
	b.push(make([]invalidation.Push, 20)...)
	b.fail(71, "no", b.claim(71, 20)...)
	o := OperationRequest{Queue: "work", Verb: RetryFailures, Filter: Filter{All: true}, By: by}
	if n, whole, err := b.d.CountFirst(t.Context(), o); n != 20 || !whole || err != nil {
		t.Fatalf("%d match, all %t (%v)", n, whole, err)
	}
	id, err := b.d.StartOperation(t.Context(), o)
	if err != nil {
		t.Fatal(err)
	}
	for {
		op, err := b.d.Operation(t.Context(), id)
		if err != nil {
			t.Fatal(err)
		}
		if op.Status != "running" {
			if op.Changed != 20 || op.Matched != 20 || op.Partial || op.Actor != "ada" {
				t.Errorf("operation is %+v", op)
			}
			break
		}
		wait, err := b.d.Step(t.Context(), id)
		if err != nil {
			t.Fatal(err)
		}
		<-time.After(wait)
	}
	running, err := b.d.Operations(t.Context(), OperationFilter{Queue: "work", Running: true})
	if err != nil || len(running) != 0 {
		t.Errorf("running operations are %+v (%v)", running, err)
	}
}

func TestVerifyLocksNamesWhatIsWrong(t *testing.T) {
	b := newBed(t)
	b.push(invalidation.Push{}, invalidation.Push{}, invalidation.Push{})
	b.claim(71, 1)
	b.claim(72, 1)
	b.claim(73, 1)
	suspects := func() map[NodeID]string {
		found, err := b.d.VerifyLocks(t.Context(), 0, 0)
		if err != nil {
			t.Fatal(err)
		}
		problems := map[NodeID]string{}
		for _, s := range found {
			problems[s.NodeID] += s.Problem + ";"
		}
		return problems
	}
	if got := suspects(); len(got) != 0 {
		t.Errorf("fresh locks are suspected: %v", got)
	}
	b.exec(`UPDATE penstock.lock SET claimed_at = now() - interval '1 minute'`)
	b.exec(`UPDATE penstock.node SET tokens = ARRAY(SELECT token FROM penstock.lock WHERE node_id = 71) WHERE id = 71`)
	b.exec(`UPDATE penstock.node SET beat_at = now() - interval '1 minute' WHERE id = 72`)
	b.exec(`DELETE FROM penstock.entry e USING penstock.lock l WHERE l.node_id = 71 AND e.id = l.last_entry_id`)
	got := suspects()
	if got[71] != "it has no entries;" || got[72] != "its node has been silent for 1 m 0 s;" || got[73] != "its node lives and does not list its token;" {
		t.Errorf("problems are %v", got)
	}
	// A lock with two problems is one row, and pages go on behind a row.
	b.exec(`DELETE FROM penstock.entry`)
	all, err := b.d.VerifyLocks(t.Context(), 0, 10)
	if err != nil || len(all) != 3 || !strings.HasSuffix(all[1].Problem, " s; it has no entries") {
		t.Fatalf("found %+v (%v)", all, err)
	}
	if rest, err := b.d.VerifyLocks(t.Context(), all[0].Token, 1); err != nil || len(rest) != 1 || rest[0].Token != all[1].Token {
		t.Errorf("found %+v behind %d (%v)", rest, all[0].Token, err)
	}
}

func TestNodeIsFoundByIDAndByTheNameOfTheOneThatLives(t *testing.T) {
	b := newBed(t)
	b.claim(71, 1)
	b.claim(72, 1)
	if _, err := FindNode(t.Context(), b.d, "gpu-1"); !errors.Is(err, invalidation.ErrState) {
		t.Errorf("two living nodes of one name: %v", err)
	}
	b.exec(`UPDATE penstock.node SET beat_at = now() - interval '1 minute' WHERE id = 72`)
	n, err := FindNode(t.Context(), b.d, "gpu-1")
	if err != nil || n.ID != 71 {
		t.Errorf("found %+v (%v)", n, err)
	}
	if n, err = FindNode(t.Context(), b.d, "72"); err != nil || n.State != "dead" {
		t.Errorf("found %+v (%v)", n, err)
	}
	if _, err = FindNode(t.Context(), b.d, "gpu-2"); !errors.Is(err, invalidation.ErrNotFound) {
		t.Errorf("a node that is not there: %v", err)
	}
}

func TestLimitsShowWhatIsInUse(t *testing.T) {
	b := newBed(t)
	if err := b.d.SetLimit(t.Context(), "gpus", map[string]any{"max_units": 4, "rate": 10}, by); err != nil {
		t.Fatal(err)
	}
	if err := b.d.UseLimit(t.Context(), "work", "none", 2, by); !errors.Is(err, invalidation.ErrNotFound) {
		t.Errorf("use of a limit that does not exist: %v", err)
	}
	if err := b.d.UseLimit(t.Context(), "work", "gpus", 2, by); err != nil {
		t.Fatal(err)
	}
	var err error
	if b.q, err = invalidation.Open(t.Context(), b.pool, "work"); err != nil {
		t.Fatal(err)
	}
	b.push(invalidation.Push{})
	b.claim(71, 1)
	limits, err := b.d.Limits(t.Context(), "", 0)
	if err != nil || len(limits) != 1 || limits[0].InUse != 2 || *limits[0].MaxUnits != 4 || limits[0].Queues[0] != "work" || *limits[0].Left > 10 {
		t.Fatalf("limits are %+v (%v)", limits, err)
	}
	if err := b.d.SetLimit(t.Context(), "gpus", map[string]any{"speed": 1}, by); !errors.Is(err, invalidation.ErrInvalid) {
		t.Errorf("an unknown option: %v", err)
	}
}

// A flow's present usage comes from lock records, its past usage from the nodes' reports; either
// may be missing.
func TestUsageShowsFlowsThatRunAndFlowsThatRan(t *testing.T) {
	b := newBed(t)
	b.push(invalidation.Push{})
	b.claim(71, 1)
	b.exec(`INSERT INTO penstock.usage (queue_id, priority, whole, flow, service, lift, at)
	        SELECT id, p, false, 'old', 300 / ln(2::float8), 7, clock_timestamp() FROM penstock.queue, unnest('{1,2}'::smallint[]) p WHERE name = 'work'`)
	if err := b.d.SetFlowWeight(t.Context(), "old", "", 3, by); err != nil {
		t.Fatal(err)
	}
	found, err := b.d.Usage(t.Context(), "work", "", "", 0)
	if err != nil || len(found) != 2 {
		t.Fatalf("usage is %+v (%v)", found, err)
	}
	now, late := found[0], found[1]
	if now.Flow != "" || now.Locks != 1 || now.Slots != 0 || now.Weight != 1 {
		t.Errorf("a flow that runs shows as %+v", now)
	}
	if late.Flow != "old" || late.Locks != 0 || late.Weight != 3 || late.Share != 1 || late.Slots < 1.9 || late.Slots > 2 {
		t.Errorf("a flow that used a slot in each of two bands shows as %+v, want 2 slots", late)
	}
}

func TestAuditTellsWhoChangedWhatAndWhy(t *testing.T) {
	b := newBed(t)
	if err := b.d.AlterQueue(t.Context(), "work", map[string]any{"capacity": 10}, by); err != nil {
		t.Fatal(err)
	}
	found, err := b.d.Audits(t.Context(), AuditFilter{Actor: "ada", Verb: "alter_queue", Since: time.Now().Add(-time.Hour)})
	if err != nil || len(found) != 1 || found[0].Reason != "because" || found[0].Object != "work" || string(found[0].Detail) != `{"capacity": 10}` {
		t.Fatalf("audit is %+v (%v)", found, err)
	}
	if err := b.d.DropQueue(t.Context(), "work", false, by); err != nil {
		t.Fatal(err)
	}
	if found, err = b.d.Audits(t.Context(), AuditFilter{Object: "work", Verb: "drop_queue"}); err != nil || len(found) != 1 ||
		found[0].Actor != "ada" || found[0].Reason != "because" {
		t.Fatalf("audit is %+v (%v), want one row with who and why", found, err)
	}
}

func TestRatesComeFromTwoSnapshots(t *testing.T) {
	at := time.Unix(100, 0)
	one := &Snapshot{At: at, Queues: []Queue{{Name: "a", QueueID: 1, Accepted: 10, Gone: 4}, {Name: "b", QueueID: 2, Accepted: 10}}}
	two := &Snapshot{At: at.Add(2 * time.Second), Queues: []Queue{
		{Name: "a", QueueID: 1, Accepted: 30, Gone: 5}, {Name: "b", QueueID: 2, Accepted: 3}, {Name: "c", QueueID: 3, Accepted: 3},
	}}
	got := Rates(one, two)
	if len(got) != 1 || got[0] != (Rate{Queue: "a", In: 10, Out: 0.5}) {
		t.Errorf("rates are %+v; a queue that is new or whose counters were reset has none", got)
	}
	b := newBed(t)
	b.push(invalidation.Push{})
	first, err := b.d.Snapshot(t.Context(), nil)
	if err != nil || len(first.Queues) == 0 || first.Waiting != 1 || len(first.Lanes) != 1 || len(first.Rates) != 0 || first.Server.MaxConnections == 0 {
		t.Fatalf("snapshot is %+v (%v)", first, err)
	}
	if second, err := b.d.Snapshot(t.Context(), first); err != nil || len(second.Rates) != len(first.Queues) {
		t.Fatalf("second snapshot is %+v (%v)", second, err)
	}
}

func TestListOfQueuesReadsSamplesWhereThereAreSome(t *testing.T) {
	b := newBed(t)
	b.push(invalidation.Push{})
	b.exec(`CREATE TABLE penstock.sample_ever PARTITION OF penstock.sample FOR VALUES FROM (MINVALUE) TO (MAXVALUE)`)
	b.exec(`INSERT INTO penstock.sample SELECT (s).* FROM (SELECT jsonb_populate_record(penstock.measure(q), '{"pending": 77, "in_per_second": 5, "out_per_second": 4}') AS s
	          FROM penstock.queue q WHERE q.name = 'work') x`)
	find := func(queues []Queue, err error) Queue {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return queues[slices.IndexFunc(queues, func(q Queue) bool { return q.Name == "work" })]
	}
	if q := find(b.d.Queues(t.Context())); q.Pending != 77 || q.SampledAt == nil || q.AwaitingCompute != 77 {
		t.Errorf("the list says %+v, want what was sampled", q)
	}
	if q := find(b.d.Queues(t.Context(), "work")); q.Pending != 1 || q.SampledAt != nil {
		t.Errorf("by name it says %+v, want what is there now", q)
	}
	for over, want := range map[time.Duration]int{time.Hour: 1, 2 * time.Hour: 0} {
		found, err := b.d.Samples(t.Context(), "work", over)
		if err != nil || len(found) != want || (want > 0 && (found[0].Pending != 77 || *found[0].OutPerSecond != 4)) {
			t.Errorf("samples over %s are %+v (%v), want %d", over, found, err, want)
		}
	}
	if _, err := b.d.Samples(t.Context(), "nil", time.Hour); !errors.Is(err, invalidation.ErrQueueNotFound) {
		t.Errorf("samples of a queue that is not there: %v", err)
	}
	s, err := b.d.Snapshot(t.Context(), nil)
	if err != nil || len(s.Rates) != 1 || s.Rates[0] != (Rate{"work", 5, 4}) {
		t.Errorf("the first snapshot has rates %+v (%v), want the sample's", s, err)
	}
	b.exec(`UPDATE penstock.sample SET at = at - interval '31 seconds'`)
	if q := find(b.d.Queues(t.Context())); q.Pending != 1 || q.SampledAt != nil {
		t.Errorf("with an old sample it says %+v, want what is there now", q)
	}
	b.exec(`INSERT INTO penstock.sample SELECT (jsonb_populate_record(s, jsonb_build_object('at', s.at - interval '15 seconds'))).*
	          FROM penstock.sample s`)
	if q := find(b.d.Queues(t.Context())); q.Pending != 77 || q.SampledAt == nil {
		t.Errorf("with a sample as old as three from that leader may be it says %+v, want what was sampled", q)
	}
	b.exec(`UPDATE penstock.sample SET at = at - interval '5 minutes'`)
	if q := find(b.d.Queues(t.Context())); q.Pending != 1 || q.SampledAt != nil {
		t.Errorf("with the samples of a leader that is gone it says %+v, want what is there now", q)
	}
	b.exec(`INSERT INTO penstock.queue (name) SELECT 'more' || n FROM generate_series(1, 100) n`)
	if q := find(b.d.Queues(t.Context())); q.Pending != 77 || q.SampledAt == nil {
		t.Errorf("with many queues it says %+v, want the sample of before instead of a count of all", q)
	} else if q.InPerSecond != nil || q.OutPerSecond != nil {
		t.Errorf("the rates of %v and %v are of a sample of long ago", *q.InPerSecond, *q.OutPerSecond)
	}
	if q := find(b.d.LiveQueues(t.Context())); q.Pending != 1 || q.InPerSecond != nil || q.SampledAt != nil {
		t.Errorf("the live list says %+v, want counts of now without the time of the sample", q)
	}
}

func TestDropThatWaitsInVainSaysForWhom(t *testing.T) {
	b := newBed(t)
	pool, err := postgres.Open(t.Context(), postgres.Config{DSN: b.pool.Config().ConnString(), LockTimeout: 200 * time.Millisecond})
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	tx, err := b.pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(context.Background())
	if _, err := tx.Exec(t.Context(), `SELECT count(*) FROM penstock.entry_work`); err != nil {
		t.Fatal(err)
	}
	who := fmt.Sprintf("session %d ", tx.Conn().PgConn().PID())
	if err := New(pool).DropQueue(t.Context(), "work", true, by); !errors.Is(err, invalidation.ErrState) || !strings.Contains(err.Error(), who) {
		t.Errorf("drop beside a transaction says %v, want it to name %s", err, who)
	}
	if _, err := tx.Exec(t.Context(), `SELECT FROM penstock.queue WHERE name = 'work' FOR UPDATE`); err != nil {
		t.Fatal(err)
	}
	if err := New(pool).AlterQueue(t.Context(), "work", map[string]any{"capacity": 5}, by); !errors.Is(err, invalidation.ErrState) || !strings.Contains(err.Error(), "timed out") {
		t.Errorf("alter beside a transaction says %v", err)
	}
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	if err := New(pool).DropQueue(t.Context(), "work", true, by); err != nil {
		t.Errorf("drop afterwards: %v", err)
	}
}
