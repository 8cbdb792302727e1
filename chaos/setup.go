package main

import (
	"context"
	_ "embed"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"
)

//go:embed recorder.sql
var recorderSQL string

// Bounds that the queues of the load have, and that the judges know.
const (
	limitedLocks = 3
	attemptsMax  = 60
	crashesMax   = 60
	runMax       = 8 * time.Second
	retryBase    = 200 * time.Millisecond // the wait after the first error
	// callbackCrashes is after how many deaths of nodes the entry of a callback is given up, which is the product's
	// own setting.
	callbackCrashes = 3
	// doubtMax is how long a slot is in doubt at most although its worker has no call: the 10 s after which a probe
	// may free it, a second until a node makes that, and the timeout of a probe.
	doubtMax = 13 * time.Second
	// catchUpMax is the largest number of nominal times that a schedule may catch up on.
	catchUpMax = 1000
)

// tickQueue is the queue of the schedules.
const tickQueue = "ticks"

// timetable is when the schedules of a run fire. Jitter spreads them, so that each firing is a transaction of its own.
type timetable struct {
	jobs         []string
	step, jitter time.Duration
}

func (c config) timetable() timetable {
	t := timetable{jobs: []string{"tick_a", "tick_b", "tick_c"}, step: 2 * time.Second}
	if c.rare {
		t.jobs = append(t.jobs, "tick_d", "tick_e", "tick_f", "tick_g", "tick_h")
		t.jitter = 1900 * time.Millisecond
	}
	return t
}

// onceQueue is that of a model which is called at most once. The version before called it again in some cases: beside
// programs of another build nothing is pushed to it.
const onceQueue = "once"

// models are queues whose entries workers run.
var models = []string{"solo", "keyed", "limited", onceQueue, frailQueue, uniqueQueue, ratedQueue}

// servers are the instances of each of these models.
var servers = []string{"cpu-1", "cpu-2"}

const serverSlots = 16 // of each instance

// instanceOf names an instance of a model for the judges.
func instanceOf(model, server string) string { return model + " on " + server }

// slotsOfInstances is how many slots each instance has.
func slotsOfInstances() map[string]int {
	slots := map[string]int{}
	for _, model := range models {
		for _, server := range servers {
			slots[instanceOf(model, server)] = serverSlots
		}
	}
	for _, server := range onlineServers {
		slots[instanceOf(onlineQueue, server)] = onlineSlots
	}
	return slots
}

// setUp makes models, queues and schedules, and attaches the recorder, on a database that a leader
// has migrated.
func setUp(ctx context.Context, db *database, w *recorder, ticks timetable) error {
	patient := patience(attemptsMax, crashesMax)
	for _, model := range models {
		unknown, settings := "at_least_once", patient
		switch model {
		case onceQueue:
			unknown = "at_most_once"
		case frailQueue:
			settings = patience(frailAttempts, frailCrashes)
		}
		config := fmt.Sprintf(`{"protocol": "dispatcher", "max_retries": 60, "on_unknown": %q,
		    "timeouts": {"connect": 1, "run": %v, "control": 2, "probe": 2}}`, unknown, runMax.Seconds())
		if err := db.exec(ctx, `SELECT penstock.register_model($1, $2)`, model, config); err != nil {
			return fmt.Errorf("register model %s: %w", model, err)
		}
		for _, server := range servers {
			const sql = `SELECT penstock.register_instance($1, $2, $3, $4)`
			if err := db.exec(ctx, sql, model, server, w.addr+"/run/"+model+"/"+server, serverSlots); err != nil {
				return fmt.Errorf("register instance: %w", err)
			}
		}
		if err := db.exec(ctx, `SELECT penstock.alter_queue($1, $2)`, model, "{"+settings+"}"); err != nil {
			return fmt.Errorf("alter queue: %w", err)
		}
	}
	if err := db.exec(ctx, recorderSQL, pgx.QueryExecModeSimpleProtocol); err != nil {
		return fmt.Errorf("attach the recorder: %w", err)
	}
	for _, statement := range []string{
		fmt.Sprintf(`SELECT penstock.alter_queue('limited', '{"max_concurrent": %d}')`, limitedLocks),
		fmt.Sprintf(`SELECT penstock.set_limit('start', '{"rate": %d, "burst": %d}')`, ratedRate, ratedBurst),
		`SELECT penstock.use_limit('` + ratedQueue + `', 'start')`,
		`SELECT penstock.create_queue('work', '{` + patient + `}')`,
		`SELECT penstock.set_statements('work', '{"run": "INSERT INTO judge.effect VALUES (($1->>''op'')::bigint)"}')`,
		`SELECT penstock.create_queue('` + tickQueue + `', '{"kind": "cron", ` + patient + `}')`,
		`SELECT penstock.set_statements('` + tickQueue + `', '{"run":
		    "INSERT INTO judge.tick VALUES ($1->>''job'', ($1->>''nominal_at'')::timestamptz)"}')`,
		`SELECT penstock.create_queue('parts', '{"kind": "batch", ` + patient + `}')`,
		`SELECT penstock.set_statements('parts', '{"map":
		    "INSERT INTO judge.part SELECT (x->>''b'')::bigint, (x->>''i'')::int FROM jsonb_array_elements($1) x"}')`,
	} {
		if err := db.exec(ctx, statement); err != nil {
			return fmt.Errorf("%.60s: %w", statement, err)
		}
	}
	for _, job := range ticks.jobs {
		const sql = `
SELECT penstock.create_cron_job($1, $5, $2, jsonb_build_object('job', $1::text),
       jsonb_build_object('jitter', $3::text, 'catch_up', 'all', 'catch_up_max', $4::int, 'overlap', 'queue'))`
		spec := fmt.Sprintf("@every %v", ticks.step)
		if err := db.exec(ctx, sql, job, spec, ticks.jitter.String(), catchUpMax, tickQueue); err != nil {
			return fmt.Errorf("create schedule: %w", err)
		}
	}
	return nil
}
