package invalidation

import (
	"context"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
)

// listSQL reads all queues, or those that nodes of application $1 serve: its own and those of callbacks.
const listSQL = `
SELECT id, name, ` + configColumns + `, NULL::jsonb, NULL::jsonb
  FROM penstock.queue
 WHERE $1::text IS NULL OR application = $1 OR kind = 'webhook'
 ORDER BY name`

// pausesSQL reads the pauses of flows, models and applications once, and not once for each queue.
const pausesSQL = `
SELECT coalesce(queue_id, 0), scope, value, actor, reason, created_at,
       extract(epoch FROM until - clock_timestamp())::float8
  FROM penstock.pause
 WHERE scope IN ('flow', 'model', 'application')`

// weightsSQL reads the weights of flows once.
const weightsSQL = `SELECT coalesce(queue_id, 0), flow, weight::text::float8 FROM penstock.flow_weight`

// List returns every queue.
func List(ctx context.Context, db postgres.DB) ([]*Queue, error) {
	return list(ctx, db, nil, &flowSettings{})
}

// ListOf returns the queues that nodes of an application serve: its own and those of callbacks.
func ListOf(ctx context.Context, db postgres.DB, application string) ([]*Queue, error) {
	return list(ctx, db, &application, &flowSettings{})
}

// ListSettings returns every queue without pauses and weights of flows: Paused knows only pauses of the queue, and
// FlowWeight is 1. It is for duties that claim nothing.
func ListSettings(ctx context.Context, db postgres.DB) ([]*Queue, error) {
	return list(ctx, db, nil, nil)
}

// list reads queues, and what is set for their flows unless flows is nil.
func list(ctx context.Context, db postgres.DB, application *string, flows *flowSettings) ([]*Queue, error) {
	queues, err := pgx.CollectRows(postgres.Query(ctx, db, listSQL, application), scanQueue)
	if err == nil && flows != nil {
		err = flows.read(ctx, db)
	}
	if err != nil {
		return nil, fmt.Errorf("list queues: %w", withDuty(err))
	}
	for _, q := range queues {
		q.bind(db)
		if flows != nil {
			flows.setOn(q)
		}
	}
	return queues, nil
}

// flowsOfAll are pauses and weights of flows that hold in all queues.
type flowsOfAll struct {
	pauses  []pause
	weights map[string]float64
}

// flowSettings are the pauses and weights of flows, and the pauses of models and applications.
type flowSettings struct {
	everywhere flowsOfAll
	pauses     map[int32][]pause // by queue
	weights    map[int32]map[string]float64
	over       map[pausedThing]pause // models and applications
}

type pausedThing struct{ scope, value string }

// read reads them in one round trip.
func (f *flowSettings) read(ctx context.Context, db postgres.DB) error {
	batch := &pgx.Batch{}
	f.everywhere.weights = map[string]float64{}
	f.pauses, f.weights, f.over = map[int32][]pause{}, map[int32]map[string]float64{}, map[pausedThing]pause{}
	batch.Queue(pausesSQL).Query(func(rows pgx.Rows) error {
		var queue int32
		var p pause
		var left *float64 // seconds
		scan := []any{&queue, &p.scope, &p.value, &p.control.Actor, &p.control.Reason, &p.control.At, &left}
		_, err := pgx.ForEachRow(rows, scan, func() error {
			p.control.Until = endOfPause(left)
			f.addPause(queue, p)
			left = nil
			return nil
		})
		return err
	})
	batch.Queue(weightsSQL).Query(func(rows pgx.Rows) error {
		var queue int32
		var flow string
		var weight float64
		_, err := pgx.ForEachRow(rows, []any{&queue, &flow, &weight}, func() error {
			f.addWeight(queue, flow, weight)
			return nil
		})
		return err
	})
	return db.SendBatch(ctx, batch).Close()
}

func (f *flowSettings) addPause(queue int32, p pause) {
	switch {
	case p.scope != "flow":
		f.over[pausedThing{p.scope, p.value}] = p
	case queue == 0:
		f.everywhere.pauses = append(f.everywhere.pauses, p)
	default:
		f.pauses[queue] = append(f.pauses[queue], p)
	}
}

func (f *flowSettings) addWeight(queue int32, flow string, weight float64) {
	if queue == 0 {
		f.everywhere.weights[flow] = weight
		return
	}
	if f.weights[queue] == nil {
		f.weights[queue] = map[string]float64{}
	}
	f.weights[queue][flow] = weight
}

// setOn gives a queue what holds for its flows, its model and its application.
func (f *flowSettings) setOn(q *Queue) {
	q.everywhere, q.pauses, q.weights = f.everywhere, f.pauses[q.ID], f.weights[q.ID]
	for _, of := range []pausedThing{{"model", q.Config.Model}, {"application", q.Config.Application}} {
		if p, paused := f.over[of]; paused {
			q.pauses = append(q.pauses, p)
		}
	}
}
