package invalidation

import (
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/penstock/penstock/internal/postgres"
)

// A queue that cannot be read keeps nodes and leaders from all others: what is wrong is refused where it is set, by name.
func TestSettingThatNobodyCouldReadIsRefusedByName(t *testing.T) {
	b := newControlBed(t, Config{})
	for setting, want := range map[string]string{
		`{"retry": {"max_attempts": "many"}}`:                    "retry.max_attempts",
		`{"retry": {"max_attempts": 2.5}}`:                       "retry.max_attempts",
		`{"retry": {"max_attempts": -1}}`:                        "retry.max_attempts",
		`{"retry": {"max_attempts": 0}}`:                         "retry.max_attempts is not a whole number from 1 to 30000; 1 is for no retries",
		`{"retry": {"base": 0}}`:                                 "retry.base is not a number of seconds above 0 and up to ten years; leave it out for the default",
		`{"retry": {"cap": 0.0}}`:                                "retry.cap is not",
		`{"retry": {"factor": 0}}`:                               "retry.factor is not a number from 1 to 1000; leave it out for the default",
		`{"retry": {"classes": {"input": {"max_attempts": 0}}}}`: "retry.classes.input.max_attempts is not",
		`{"retry": {"base": 1e300}}`:                             "retry.base",
		`{"retry": {"factor": 0.5}}`:                             "retry.factor",
		`{"retry": {"jitter": 2}}`:                               "retry.jitter",
		`{"retry": {"attempts": 3}}`:                             "retry.attempts does not exist",
		`{"retry": {"classes": {"input": {"base": "1s"}}}}`:      "retry.classes.input.base",
		`{"retry": {"classes": {"input": 1}}}`:                   "retry.classes.input",
		`{"retry": {"classes": {"a": {"classes": {"b": {}}}}}}`:  "retry.classes.a.classes",
		`{"retry": [1]}`:                                         "retry is not",
		`{"grouping": "$.a["}`:                                   "grouping",
		`{"result_retention": "300000 years"}`:                   "result_retention",
		`{"failure_retention": "1 hour"}`:                        "failure_retention",
		`{"run_timeout": "-5 s"}`:                                "run_timeout",
		`{"quantum_time": "1000 years"}`:                         "quantum_time",
		`{"priority": "NaN"}`:                                    "priority",
		`{"capacity": 0}`:                                        "capacity is not at least 1",
		`{"algorithm": "lifo"}`:                                  "algorithm is not fair or fifo",
		`{"needs": {"cpu": 1e-400}}`:                             "at least 0.000001: cpu",
		`{"needs": {"cpu": 2000000, "memory_mib": 8192}}`:        "at least 0.000001: cpu",
		`{"needs": {"cpu": "1", "memory_mib": 1e10}}`:            "at least 0.000001: cpu, memory_mib",
	} {
		_, err := b.pool.Exec(b.ctx, `SELECT penstock.alter_queue('work', $1)`, setting)
		if postgres.Code(err) != "PS002" || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want it refused with the words %q", setting, err, want)
		}
	}
	b.exec(b.pool, `SELECT penstock.alter_queue('work', '{"retry": {"max_attempts": 3, "base": 0.5, "cap": 1e3, "factor": 1.5, "jitter": 0, "classes": {"input": {"max_attempts": 1}}},
	                "grouping": "$.a[0]", "run_timeout": "1 day", "start_within": "10 years", "max_concurrent": null,
	                "needs": {"cpu": 0, "memory_mib": 0.5}}')`)
	b.exec(b.pool, `SELECT penstock.create_queue('jobs', '{"kind": "cron"}')`)
	b.exec(b.pool, `SELECT penstock.register_model('m', '{"protocol": "openai", "headers": {"X-Team": "A"}}')`)
	for call, want := range map[string]string{
		`penstock.alter_queue('work', '[1]')`:                                                                    "options must be an object",
		`penstock.alter_queue('work', '{"capacity": 5, "max_concurrent": "lots"}')`:                              `queue option "max_concurrent" of "work" is not valid: invalid input syntax`,
		`penstock.alter_queue('work', '{"kind": null}')`:                                                         `queue option "kind" of "work" is not valid: it always has a value`,
		`penstock.alter_queue('work', '{"quantum_time": null, "capacity": 5}')`:                                  `queue option "quantum_time" of "work" is not valid: it always has a value`,
		`penstock.alter_queue('work', '{"run_timeout": "soon", "shards": 1}')`:                                   `queue option "run_timeout" of "work" is not valid: invalid input syntax`,
		`penstock.set_limit('l', '[1]')`:                                                                         "options must be an object",
		`penstock.set_limit('l', '{"max_units": -1}')`:                                                           "max_units is not at least 0",
		`penstock.set_limit('l', '{"per_key": true, "max_units": 1}')`:                                           "per_key is given with max_units",
		`penstock.create_cron_job('j', 'jobs', '@daily', '1', '{"overlap": "x"}')`:                               "overlap is not skip, queue or cancel_running",
		`penstock.create_cron_job('j', 'jobs', '@daily', '1', '[1]')`:                                            "options must be an object",
		`penstock.create_cron_job('', 'jobs', '@daily')`:                                                         "name is not from 1 to 256 bytes long",
		`penstock.create_batch('b', 'work', '{"items": [1], "part_size": 0}')`:                                   "part_size is not from 1 to 100000",
		`penstock.use_limit('work', 'l', -1)`:                                                                    "units is not at least 0",
		`penstock.set_quota('', '{"max_units": 1}')`:                                                             "application is empty",
		`penstock.pause('model', 'typo')`:                                                                        `no model "typo"`,
		`penstock.push('work', '1', callback => '"http://h/"')`:                                                  "callback is not an object with url and, if wanted, context and format (entry 1)",
		`penstock.push('work', '1', callback => '{"context": 1}')`:                                               "callback.url is missing or not a text (entry 1)",
		`penstock.push_many('work', ARRAY['1', '2']::jsonb[], callbacks => ARRAY[NULL, '{"url": ""}']::jsonb[])`: "(entry 2)",
		`penstock.push('work', '1', due_at => '294276-12-01')`:                                                   "due_at, start_by and finish_by must be before 9999-12-31 (entry 1)",
		`penstock.push('work', '1', finish_by => '10000-01-01')`:                                                 "due_at, start_by and finish_by must be before 9999-12-31 (entry 1)",
		`penstock.push('work', '1', due_at => '9990-01-01')`:                                                     "start_within and finish_within of the queue end before 9999-12-31 (entry 1)",
		`penstock.create_cron_job('j', 'jobs', '@daily', '1', '{"grace": "300 years"}')`:                         `option of cron job "j" is not valid: grace is not above 0 and at most 10 years`,
		`penstock.create_cron_job('j', 'jobs', '@daily', '1', '{"ends_at": "10000-01-01"}')`:                     "starts_at and ends_at must be from year 1 on and before 9999-12-31",
		`penstock.register_model('M', '{"protocol": "openai", "On_Unknown": "at_most_once"}')`:                   `settings of model "M" have no field "On_Unknown": write it on_unknown`,
		`penstock.set_model_override('m', '{"Max_Retries": 2}')`:                                                 `settings of model "m" have no field "Max_Retries": write it max_retries`,
		`penstock.set_model_override('m', '{"batch": {"Items": 2}}')`:                                            `settings of model "m" have no field "batch.Items": write it batch.items`,
		`penstock.push_many('work', ARRAY['1']::jsonb[], flows => ARRAY['a', 'b'])`:                              "flows has 2 elements, and there are 1 payloads",
	} {
		if _, err := b.pool.Exec(b.ctx, "SELECT "+call); postgres.Code(err) != "PS002" || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %v, want it refused with the words %q", call, err, want)
		}
	}
	q, err := Open(b.ctx, b.pool, "work")
	b.must(err)
	b.want(q.Config.Retry.Classes["input"].MaxAttempts, 1)
	for _, rate := range []string{"NaN", "Infinity"} {
		if _, err := b.pool.Exec(b.ctx, `SELECT penstock.set_limit('l', jsonb_build_object('rate', $1::text))`, rate); postgres.Code(err) != "PS002" {
			t.Errorf("rate %s: %v, want it refused", rate, err)
		}
	}
}

// Zeros meant the defaults when they were stored, and go on meaning that.
func TestAStoredRetryPolicyWithZerosStaysWhileOthersAreRefused(t *testing.T) {
	b := newControlBed(t, Config{})
	b.exec(b.pool, `ALTER TABLE penstock.queue DISABLE TRIGGER check_queue`)
	b.exec(b.pool, `UPDATE penstock.queue SET retry = '{"max_attempts": 0, "base": 0, "cap": 0, "factor": 0}' WHERE name = 'work'`)
	b.exec(b.pool, `ALTER TABLE penstock.queue ENABLE TRIGGER check_queue`)
	q, err := Alter(b.ctx, b.pool, "work", map[string]any{"max_concurrent": 3})
	b.must(err)
	if wait, again := q.Config.retryPolicy().Next("", 1, 0); !again || wait != time.Second {
		t.Errorf("after an error an entry is tried again: %t, after %s; want the defaults", again, wait)
	}
	if _, err := Alter(b.ctx, b.pool, "work", map[string]any{"retry": map[string]any{"base": 0}}); !errors.Is(err, ErrInvalid) {
		t.Errorf("a new policy with a zero: %v", err)
	}
	register := `SELECT penstock.register_model('m', '{"protocol": "cog", "max_retries": %d}')`
	b.exec(b.pool, fmt.Sprintf(register, 3))
	b.exec(b.pool, `ALTER TABLE penstock.queue DISABLE TRIGGER check_queue`)
	b.exec(b.pool, `UPDATE penstock.queue SET retry = retry || '{"base": 0}' WHERE model = 'm'`)
	b.exec(b.pool, `ALTER TABLE penstock.queue ENABLE TRIGGER check_queue`)
	b.exec(b.pool, fmt.Sprintf(register, 10))
}

// Needs of before their check was exact keep no queue from being read, and count as the nearest that a node can declare.
func TestStoredNeedsThatAreRefusedNowAreRead(t *testing.T) {
	b := newControlBed(t, Config{})
	b.exec(b.pool, `ALTER TABLE penstock.queue DISABLE TRIGGER check_queue`)
	for needs, want := range map[string]Needs{
		`{"cpu": 1e-400, "memory_mib": 1e-400}`: {}, `{"cpu": 2000000, "memory_mib": 8192}`: {CPU: 1e6, MemoryMiB: 8192}, `{"cpu": 0.1}`: {CPU: 0.1},
	} {
		b.exec(b.pool, `UPDATE penstock.queue SET needs = $1::text::jsonb WHERE name = 'work'`, needs)
		q, err := Open(b.ctx, b.pool, "work")
		b.must(err)
		b.want(q.Config.Needs, want)
	}
}

// Needs of before that are refused now keep no other setting from being changed.
func TestStoredNeedsThatAreRefusedNowStay(t *testing.T) {
	b := newControlBed(t, Config{})
	b.exec(b.pool, `ALTER TABLE penstock.queue DISABLE TRIGGER check_queue`)
	b.exec(b.pool, `UPDATE penstock.queue SET needs = '{"cpu": 2000000}' WHERE name = 'work'`)
	b.exec(b.pool, `ALTER TABLE penstock.queue ENABLE TRIGGER check_queue`)
	_, err := Alter(b.ctx, b.pool, "work", map[string]any{"max_concurrent": 3})
	b.must(err)
	if _, err := Alter(b.ctx, b.pool, "work", map[string]any{"needs": map[string]any{"cpu": 1000001}}); !errors.Is(err, ErrInvalid) {
		t.Errorf("new needs: %v", err)
	}
}

func TestKindOfAQueueStaysWhileSomethingNeedsIt(t *testing.T) {
	b := newControlBed(t, Config{})
	b.exec(b.pool, `CREATE TABLE public.watched (id bigint PRIMARY KEY)`)
	for _, c := range []struct{ kind, needs, end string }{
		{"cron", `penstock.create_cron_job('job', 'q_cron', '@every 1h')`, `penstock.drop_cron_job('job')`},
		{"change_log", `penstock.watch('public.watched', 'q_change_log')`, `penstock.unwatch('public.watched', 'q_change_log')`},
		{"batch", `penstock.create_batch('b', 'q_batch', '{"items": [1]}')`, `penstock.cancel_batch((SELECT max(id) FROM penstock.batch))`},
	} {
		b.exec(b.pool, fmt.Sprintf(`SELECT penstock.create_queue('q_%s', '{"kind": "%[1]s"}')`, c.kind))
		b.exec(b.pool, "SELECT "+c.needs)
		change := fmt.Sprintf(`SELECT penstock.alter_queue('q_%s', '{"kind": "task"}')`, c.kind)
		if _, err := b.pool.Exec(b.ctx, change); postgres.Code(err) != "PS006" || !strings.Contains(err.Error(), "from "+c.kind+" to task") {
			t.Errorf("%s: %v, want the change refused", c.kind, err)
		}
		b.exec(b.pool, fmt.Sprintf(`SELECT penstock.alter_queue('q_%s', '{"kind": "%[1]s", "priority": 2}')`, c.kind))
		b.exec(b.pool, "SELECT "+c.end)
		if c.kind != "batch" { // which has ended only when the leader has seen to it
			b.exec(b.pool, change)
		}
	}
}

func TestNeedsOfAQueueAreReadAndChecked(t *testing.T) {
	b := newBed(t, Config{Needs: Needs{CPU: 0.5, MemoryMiB: 256}})
	if b.q.Config.Needs != (Needs{CPU: 0.5, MemoryMiB: 256}) {
		t.Errorf("read %+v", b.q.Config.Needs)
	}
	for _, needs := range []any{map[string]any{"gpu": 1}, map[string]any{"cpu": -1}, map[string]any{"cpu": "1"}, map[string]any{"memory_mib": 1e10}, 7} {
		if _, err := Alter(b.ctx, b.pool, "work", map[string]any{"needs": needs}); !errors.Is(err, ErrInvalid) {
			t.Errorf("needs %v: %v", needs, err)
		}
	}
	q, err := Alter(b.ctx, b.pool, "work", map[string]any{"needs": nil})
	if err != nil || q.Config.Needs != (Needs{}) {
		t.Errorf("without needs: %+v, %v", q, err)
	}
}
