package operator

import (
	"context"
	"errors"
	"fmt"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// Object is a kind of object that operators name.
type Object string

// The kinds of objects that have an owner or settings, with what names one.
const (
	ObjectQueue      Object = "queue"      // name
	ObjectEntry      Object = "entry"      // id
	ObjectBatch      Object = "batch"      // id
	ObjectOperation  Object = "operation"  // id
	ObjectNode       Object = "node"       // id
	ObjectCronJob    Object = "cron job"   // name
	ObjectModel      Object = "model"      // name
	ObjectLimit      Object = "limit"      // name
	ObjectDeployment Object = "deployment" // name
	// ObjectModelDeployments is the deployments of one model, by the name of the model.
	ObjectModelDeployments Object = "deployments of model"
)

// ownersSQL finds queue and application of the object that $1 names.
var ownersSQL = map[Object]string{
	ObjectQueue: `SELECT name, application FROM penstock.queue WHERE name = $1`,
	ObjectEntry: `
SELECT q.name, q.application
  FROM penstock.find_entry($1::bigint) f JOIN penstock.queue q ON q.id = f.queue_id`,
	ObjectBatch: `
SELECT q.name, q.application
  FROM penstock.batch b JOIN penstock.queue q ON q.id = b.queue_id WHERE b.id = $1::bigint`,
	ObjectOperation: `
SELECT q.name, q.application
  FROM penstock.operation o JOIN penstock.queue q ON q.id = o.queue_id WHERE o.id = $1::bigint`,
	ObjectNode: `SELECT '', application FROM penstock.node WHERE id = $1::bigint`,
	ObjectCronJob: `
SELECT q.name, q.application
  FROM penstock.cron_job j JOIN penstock.queue q ON q.id = j.queue_id WHERE j.name = $1`,
	ObjectModel: `
SELECT q.name, q.application
  FROM penstock.queue q WHERE q.name = penstock.model_queue($1) AND q.kind = 'inference'`,
}

// Owner returns the queue and the application that an object belongs to: those by which the tokens of clients are
// limited. A node has no queue. It returns invalidation.ErrNotFound if there is no such object.
func (d *Database) Owner(ctx context.Context, of Object, key string) (queue, application string, err error) {
	err = d.db.QueryRow(ctx, ownersSQL[of], key).Scan(&queue, &application)
	if errors.Is(err, pgx.ErrNoRows) {
		err = invalidation.ErrNotFound
	}
	if err != nil {
		return "", "", fmt.Errorf("find %s %s: %w", of, key, err)
	}
	return queue, application, nil
}

// lockSQL locks the rows with the settings of the object that $1 names, as changes of them do.
var lockSQL = map[Object]string{
	ObjectQueue:            `SELECT FROM penstock.queue WHERE name = $1 FOR NO KEY UPDATE`,
	ObjectCronJob:          `SELECT FROM penstock.cron_job WHERE name = $1 FOR NO KEY UPDATE`,
	ObjectModel:            `SELECT FROM penstock.model WHERE name = $1 FOR NO KEY UPDATE`,
	ObjectLimit:            `SELECT FROM penstock."limit" WHERE name = $1 FOR NO KEY UPDATE`,
	ObjectDeployment:       `SELECT FROM penstock.deployment WHERE name = $1 FOR NO KEY UPDATE`,
	ObjectModelDeployments: `SELECT FROM penstock.deployment WHERE model = $1 ORDER BY name FOR NO KEY UPDATE`,
}

// Locked calls do in a transaction that has the settings of an object locked, for a change that depends on the present
// settings: other changes of them wait. do uses the Database that it gets, and is told whether the object exists. One
// that does not exist is not locked.
func (d *Database) Locked(
	ctx context.Context, of Object, key string, do func(locked *Database, exists bool) error,
) error {
	return postgres.InTx(ctx, d.db, func(tx pgx.Tx) error {
		tag, err := tx.Exec(ctx, lockSQL[of], key)
		if err != nil {
			return fmt.Errorf("lock %s %s: %w", of, key, err)
		}
		return do(New(tx), tag.RowsAffected() > 0)
	})
}
