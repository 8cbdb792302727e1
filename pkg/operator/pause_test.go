package operator_test

import (
	"errors"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode"

	. "github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
)

func TestPauseStopsFlowModelAndApplication(t *testing.T) {
	b := newQueueBed(t, Config{Model: "m", Application: "shop"})
	by := By{Actor: "ada", Reason: "window"}
	b.exec(b.pool, `SELECT penstock.create_queue('others', '{"model": "other"}')`)
	for _, c := range []struct {
		subject      operator.Subject
		paused, free string // flows
	}{
		{operator.Subject{Scope: operator.ByFlow, Value: "a"}, "a", "b"},
		{operator.Subject{Scope: operator.ByFlow, Value: "a", Queue: "work"}, "a", "b"},
		{operator.Subject{Scope: operator.ByModel, Value: "m"}, "a", "-"},
		{operator.Subject{Scope: operator.ByApplication, Value: "shop"}, "b", "-"},
		{operator.Subject{Scope: operator.ByModel, Value: "other"}, "-", "a"},
	} {
		version := b.count(`SELECT sum(version) FROM penstock.queue`)
		b.did(b.d.Pause(b.ctx, c.subject, by, time.Time{}))
		if b.count(`SELECT sum(version) FROM penstock.queue`) == version {
			t.Errorf("%v: nodes do not hear of it", c.subject)
		}
		q := b.again()
		if control, paused := q.Paused(c.paused, time.Now()); c.paused != "-" && (!paused || control.Actor != "ada" || control.Reason != "window") {
			t.Errorf("%v does not pause flow %q: %+v", c.subject, c.paused, control)
		}
		if _, paused := q.Paused(c.free, time.Now()); c.free != "-" && paused {
			t.Errorf("%v pauses flow %q", c.subject, c.free)
		}
		b.must(b.d.Resume(b.ctx, c.subject, by))
		if _, paused := b.again().Paused(c.paused, time.Now()); paused {
			t.Errorf("%v pauses after it was resumed", c.subject)
		}
	}
	if err := b.d.Resume(b.ctx, operator.Subject{Scope: operator.ByFlow, Value: "a"}, by); !errors.Is(err, ErrState) {
		t.Errorf("resume of what is not paused: %v", err)
	}
	if _, err := b.d.Pause(b.ctx, operator.Subject{Scope: operator.ByName, Value: "a"}, by, time.Time{}); !errors.Is(err, ErrInvalid) {
		t.Errorf("pause of a name of no queue: %v", err)
	}
}

// The sample was taken before the change.
func TestListOfQueuesHasWhatIsStoppedNow(t *testing.T) {
	b := newQueueBed(t, Config{Application: "shop"})
	b.exec(b.pool, `CREATE TABLE penstock.sample_ever PARTITION OF penstock.sample FOR VALUES FROM (MINVALUE) TO (MAXVALUE)`)
	sample := func() {
		b.exec(b.pool, `TRUNCATE penstock.sample`)
		b.exec(b.pool, `INSERT INTO penstock.sample SELECT (penstock.measure(q)).* FROM penstock.queue q`)
	}
	blocked := func() string {
		t.Helper()
		found, err := b.d.Queues(b.ctx)
		b.must(err)
		q := found[slices.IndexFunc(found, func(q operator.Queue) bool { return q.Name == "work" })]
		if q.SampledAt == nil {
			t.Fatal("the queue is not sampled")
		}
		if q.Blocked == nil {
			return ""
		}
		return *q.Blocked
	}
	by := By{Actor: "ada", Reason: "window"}
	shop := operator.Subject{Scope: operator.ByApplication, Value: "shop"}
	for _, c := range []struct {
		want        string
		stop, start func()
	}{
		{
			"paused", func() { b.did(b.d.Do(b.ctx, operator.PauseQueue, "work", by, time.Time{})) },
			func() { b.did(b.d.Do(b.ctx, operator.ResumeQueue, "work", by, time.Time{})) },
		},
		{
			"application_paused", func() { b.did(b.d.Pause(b.ctx, shop, by, time.Time{})) },
			func() { b.must(b.d.Resume(b.ctx, shop, by)) },
		},
	} {
		sample()
		c.stop()
		if got := blocked(); got != c.want {
			t.Errorf("stopped after the sample, the list has %q, want %q", got, c.want)
		}
		sample()
		c.start()
		if got := blocked(); got != "" {
			t.Errorf("started after the sample, the list has %q", got)
		}
	}
}

func TestPauseWithAnEndEndsByTheNodesMonotonicClock(t *testing.T) {
	b := newQueueBed(t, Config{})
	b.did(b.d.Pause(b.ctx, operator.Subject{Scope: operator.ByFlow, Value: "a"}, By{}, time.Now().Add(time.Hour)))
	q := b.again()
	if _, paused := q.Paused("a", time.Now().Add(59*time.Minute)); !paused {
		t.Error("it ended too early")
	}
	if _, paused := q.Paused("a", time.Now().Add(61*time.Minute)); paused {
		t.Error("it did not end")
	}
}

func TestPausedNameAndKeyAreDisabledUntilTheirTimeIsOver(t *testing.T) {
	b := newQueueBed(t, Config{})
	b.pushAll(b.pool, Push{Name: "mail"}, Push{Name: "other"}, Push{LockKey: "k"})
	b.did(b.d.Pause(b.ctx, operator.Subject{Scope: operator.ByName, Value: "mail", Queue: "work"}, By{Actor: "ada"}, time.Time{}))
	b.did(b.d.Pause(b.ctx, operator.Subject{Scope: operator.ByLockKey, Value: "k", Queue: "work"}, By{}, time.Now().Add(time.Hour)))
	b.pushAll(b.pool, Push{Name: "mail"}, Push{LockKey: "k"})
	locks := b.claim(10)
	if len(locks) != 1 || locks[0].Entries[0].Name != "other" {
		t.Fatalf("claimed %d locks, want the one that is not paused", len(locks))
	}
	b.settle(doneAll(locks...)...)
	if n := b.count(`SELECT penstock.end_pauses()`); n != 0 {
		t.Errorf("ended %d before their time", n)
	}
	b.exec(b.pool, `UPDATE penstock.pause SET until = clock_timestamp() WHERE scope = 'lock_key'`)
	if n := b.count(`SELECT penstock.end_pauses()`); n != 1 {
		t.Errorf("ended %d, want 1", n)
	}
	locks = b.claim(10)
	if len(locks) != 1 || locks[0].Key != "k" || len(locks[0].Entries) != 2 {
		t.Fatalf("claimed %d locks, want the key with two entries", len(locks))
	}
	b.settle(doneAll(locks...)...)
	b.must(b.d.Resume(b.ctx, operator.Subject{Scope: operator.ByName, Value: "mail", Queue: "work"}, By{}))
	locks = b.claim(10)
	if len(locks) != 2 {
		t.Errorf("claimed %d, want both mails", len(locks))
	}
	b.settle(doneAll(locks...)...)
	if n := b.count(`SELECT count(*) FROM penstock.pause`); n != 0 {
		t.Errorf("%d pauses left", n)
	}
}

func TestPausedNodeHearsOfItAtItsHeartbeat(t *testing.T) {
	b := newQueueBed(t, Config{})
	const node NodeID = 7050
	b.must(Register(b.ctx, b.pool, Node{ID: node, Name: "gpu-7", Application: "default", Lease: 10 * time.Second}))
	paused := func() bool {
		o, err := Renew(b.ctx, b.pool, node, Beat{Tokens: []Token{}})
		b.must(err)
		return o.Paused
	}
	for _, value := range []string{"gpu-7", "7050"} {
		b.did(b.d.Pause(b.ctx, operator.Subject{Scope: operator.ByNode, Value: value}, By{}, time.Time{}))
		if !paused() {
			t.Errorf("node %s is not paused", value)
		}
		b.must(b.d.Resume(b.ctx, operator.Subject{Scope: operator.ByNode, Value: value}, By{}))
		if paused() {
			t.Errorf("node %s is paused still", value)
		}
	}
}

func TestQuotaBoundsAnApplicationOverAllItsQueues(t *testing.T) {
	b := newQueueBed(t, Config{Application: "shop"})
	two := 2
	b.must(b.d.SetQuota(b.ctx, "shop", &operator.Quota{MaxUnits: &two}, By{Actor: "ada"}))
	later, err := Create(b.ctx, b.pool, "later", Config{Application: "shop"})
	b.must(err)
	b.q = b.again()
	b.push("", "", "")
	b.must(func() error { _, err := later.Push(b.ctx, withPayload(Push{}), withPayload(Push{})); return err }())
	locks := b.claim(2)
	if len(locks) != 2 {
		t.Fatalf("claimed %d of the first queue, want the quota of 2", len(locks))
	}
	c, err := later.Claim(b.ctx, ClaimRequest{Node: here, ClaimID: 900, Lane: usual, Limit: 2})
	b.must(err)
	if len(c.Locks) != 0 || !c.Limited {
		t.Errorf("claimed %d of the second queue beyond the quota: %+v", len(c.Locks), c)
	}
	if n := b.count(`SELECT count(*) FROM penstock.application_status WHERE application = 'shop' AND queues = 2 AND quota_units = 2 AND used_units = 2`); n != 1 {
		t.Error("the view does not show what the application uses")
	}
	b.settle(doneAll(locks...)...)
	c, err = later.Claim(b.ctx, ClaimRequest{Node: here, ClaimID: 901, Lane: usual, Limit: 2})
	b.must(err)
	if len(c.Locks) != 2 {
		t.Errorf("claimed %d after the quota came free, want 2", len(c.Locks))
	}
	b.exec(b.pool, `SELECT penstock.alter_queue('later', '{"application": "other"}')`)
	if n := b.count(`SELECT count(*) FROM penstock.limit_use WHERE queue_id = $1`, later.ID); n != 0 {
		t.Error("a queue that left the application is under its quota still")
	}
	b.must(b.d.SetQuota(b.ctx, "shop", nil, By{}))
	b.q = b.again()
	if locks := b.claim(5); len(locks) != 1 {
		t.Errorf("claimed %d without a quota, want the one that is left", len(locks))
	}
}

// The end of a pause enables what the pause disabled: what an operator disables until further notice is not that.
func TestAPausedNameIsNeitherDisabledNorEnabledMeanwhile(t *testing.T) {
	b := newQueueBed(t, Config{})
	b.pushAll(b.pool, Push{Name: "mail"})
	mail := operator.Subject{Scope: operator.ByName, Value: "mail", Queue: "work"}
	b.did(b.d.Pause(b.ctx, mail, By{}, time.Now().Add(time.Hour)))
	for _, verb := range []operator.Verb{operator.DisableEntry, operator.EnableEntry} {
		if _, err := b.d.SwitchEntries(b.ctx, verb, "work", operator.ByName, "mail", By{}); !errors.Is(err, ErrState) {
			t.Errorf("%s of a name that is paused: %v", verb, err)
		}
	}
	b.did(b.d.Pause(b.ctx, mail, By{Reason: "for longer"}, time.Now().Add(2*time.Hour)))
	b.want(b.count(`SELECT count(*) FROM penstock.entry WHERE priority < 0`), 1)
	b.must(b.d.Resume(b.ctx, mail, By{}))
	_, err := b.d.SwitchEntries(b.ctx, operator.DisableEntry, "work", operator.ByName, "mail", By{})
	b.must(err)
	if _, err := b.d.Pause(b.ctx, mail, By{}, time.Time{}); !errors.Is(err, ErrState) {
		t.Errorf("pause of a name that is disabled: %v", err)
	}
}

// Two people pause the same: the second learns of the first, whose reason and end are gone otherwise.
func TestAPauseSaysWhichOneItReplaces(t *testing.T) {
	b := newQueueBed(t, Config{Model: "m"})
	b.exec(b.pool, `SELECT penstock.create_queue('jobs', '{"kind": "cron"}'), penstock.create_queue('parts', '{"kind": "batch"}')`)
	b.exec(b.pool, `SELECT penstock.create_cron_job('nightly', 'jobs', '@daily', '1')`)
	b.exec(b.pool, `SELECT penstock.create_batch('photos', 'parts', '{"items": [1, 2]}')`)
	type pause func(By, time.Time) (*operator.Replaced, error)
	verb := func(v operator.Verb, thing any) pause {
		return func(by By, until time.Time) (*operator.Replaced, error) { return b.d.Do(b.ctx, v, thing, by, until) }
	}
	subject := func(s operator.Subject) pause {
		return func(by By, until time.Time) (*operator.Replaced, error) { return b.d.Pause(b.ctx, s, by, until) }
	}
	soon := time.Now().Add(time.Hour).Truncate(time.Millisecond)
	for name, pause := range map[string]pause{
		"queue":    verb(operator.PauseQueue, "work"),
		"cron job": verb(operator.PauseCronJob, "nightly"),
		"batch":    verb(operator.PauseBatch, int64(b.count(`SELECT id FROM penstock.batch`))),
		"model":    subject(operator.Subject{Scope: operator.ByModel, Value: "m"}),
		"flow":     subject(operator.Subject{Scope: operator.ByFlow, Value: "f"}),
		"lock key": subject(operator.Subject{Scope: operator.ByLockKey, Value: "k", Queue: "work"}),
	} {
		first, err := pause(By{Actor: "ada", Reason: "a migration"}, soon)
		if err != nil || first != nil {
			t.Fatalf("%s: the first pause replaced %v (%v)", name, first, err)
		}
		second, err := pause(By{Actor: "bob", Reason: "a test"}, time.Time{})
		if err != nil || second == nil || second.Actor != "ada" || second.Reason != "a migration" || second.Until == nil ||
			!second.Until.Equal(soon) || second.Since.IsZero() {
			t.Fatalf("%s: the second pause replaced %+v (%v)", name, second, err)
		}
		third, err := pause(By{Actor: "ada"}, time.Time{})
		if err != nil || third == nil || third.Actor != "bob" || third.Until != nil || !third.Since.After(second.Since) {
			t.Fatalf("%s: the third pause replaced %+v (%v), and that had replaced %+v", name, third, err, second)
		}
		if n := b.count(`SELECT count(*) FROM penstock.audit WHERE detail->'replaced'->>'reason' = 'a migration'
			AND verb LIKE 'pause%' AND id = (SELECT max(id) - 1 FROM penstock.audit WHERE verb LIKE 'pause%')`); n != 1 {
			t.Errorf("%s: the audit does not name the pause that was replaced", name)
		}
	}
	b.exec(b.pool, `UPDATE penstock.queue SET paused_until = clock_timestamp() WHERE name = 'work'`)
	if over, err := b.d.Do(b.ctx, operator.PauseQueue, "work", ann, time.Time{}); err != nil || over != nil {
		t.Errorf("a pause that is over was replaced: %+v (%v)", over, err)
	}
}

// Its actor and reason are texts of others, which a terminal displays, and a notice has little room.
func TestThePauseThatIsReplacedIsToldInOneLine(t *testing.T) {
	until := time.Date(2026, 11, 30, 10, 0, 0, 0, time.UTC)
	r := operator.Replaced{Actor: "a\x1b[2Jda", Reason: "line\nline\x1b[1A" + strings.Repeat("x", 1000), Until: &until}
	text := r.String()
	if strings.ContainsFunc(text, unicode.IsControl) || len([]rune(text)) > 200 || !strings.HasSuffix(text, "until 2026-11-30T10:00:00Z") {
		t.Errorf("%q", text)
	}
}
