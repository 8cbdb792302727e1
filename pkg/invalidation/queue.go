package invalidation

import (
	"context"
	"errors"
	"fmt"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
)

// DB is what this package works on, by a name that programs outside this module can write as well: a *pgxpool.Pool, as
// package penstock opens it, or a pgx.Tx.
type DB = postgres.DB

// Queue is a handle on one typed queue. It is safe for many goroutines and holds nothing but names and statements.
type Queue struct {
	ID     int32
	Name   string
	Config Config

	// What commands other than Create and Alter set, as it was when the queue was read.

	Disabled   *Control          // nil: it is not disabled
	Statements map[string]string // SQL that task nodes run for its entries, by name; see SetStatements

	paused *Control // a pause of the queue itself, see Paused; nil: there is none
	limits []int32  // ids of the limits that the queue is under, in order
	rates  rateKind // of its limits
	// mayWeigh says that entries may have weights.
	mayWeigh bool
	pauses   []pause
	// weights of flows that have another one than 1.
	weights map[string]float64
	// everywhere has the pauses and weights of flows in all queues, where the queue was read with others.
	everywhere flowsOfAll
	hinter     *Hinter // of pushes outside a transaction; nil for none
	db         postgres.DB
	sql        statements
	policy     *lanePolicy // shared by all handles made from this one, as sizes are
	sizes      *payloadSize
	batcher    *batcher // group commit of pushes outside a transaction; nil for none
}

// statements are the hot statements on the queue's own table: they never read other queues' entries.
type statements struct {
	claim                                                         claimStatements
	plainPush, promote, misdated, redate                          string
	claimGroups, reclaim, sweep                                   string
	busy, finishSolo                                              string // of settle and settleUnlocked
	callBack, done, retry, fail, refund, remove, started, unlock  string // of settleHeld
	recoverEntries, mayHaveRun, crash, callBackPoison, deadLetter string // of Recover
}

const openSQL = `
SELECT id, name, ` + configColumns + `, penstock.queue_pauses(queue), penstock.queue_weights(queue)
  FROM penstock.queue
 WHERE name = $1`

// Open returns the queue of that name, or ErrQueueNotFound.
func Open(ctx context.Context, db postgres.DB, name string) (*Queue, error) {
	queues, err := pgx.CollectRows(postgres.Query(ctx, db, openSQL, name), scanQueue)
	if err != nil {
		return nil, fmt.Errorf("open queue %q: %w", name, withDuty(err))
	}
	if len(queues) == 0 {
		return nil, fmt.Errorf("open queue %q: %w", name, ErrQueueNotFound)
	}
	return queues[0].bind(db), nil
}

// Reopen reads the queue and its settings again, or returns ErrQueueNotFound. Its pushes hint as those of q do, and go
// in groups with those of q, so that callers of both handles share the bound on statements.
// A queue that was dropped and created again is another one, whose pushes do not go with those of q.
func (q *Queue) Reopen(ctx context.Context) (*Queue, error) {
	other, err := Open(ctx, q.db, q.Name)
	if err != nil {
		return nil, err
	}
	other.hinter = q.hinter
	if other.ID == q.ID && q.batcher != nil {
		other.batcher = q.batcher
	}
	other.LearnFrom(q)
	return other, nil
}

// LearnFrom hands on what claims by another handle on the same queue have learned: the sizes of payloads, and which
// lanes have keys. It must be called before q is used.
func (q *Queue) LearnFrom(other *Queue) {
	if q.ID == other.ID {
		q.sizes, q.policy = other.sizes, other.policy
	}
}

// Create makes a queue with its table. Settings at their zero value get the defaults that Config states.
func Create(ctx context.Context, db postgres.DB, name string, config Config) (*Queue, error) {
	options, err := config.options()
	if err != nil {
		return nil, fmt.Errorf("create queue %q: %w", name, err)
	}
	if _, err := db.Exec(ctx, `SELECT penstock.create_queue($1, $2)`, name, options); err != nil {
		return nil, fmt.Errorf("create queue %q: %w", name, withDuty(err))
	}
	return Open(ctx, db, name)
}

// Alter changes the settings named in options, keys being columns of penstock.queue, and returns the queue anew.
func Alter(ctx context.Context, db postgres.DB, name string, options map[string]any) (*Queue, error) {
	if _, err := db.Exec(ctx, `SELECT penstock.alter_queue($1, $2)`, name, options); err != nil {
		return nil, fmt.Errorf("alter queue %q: %w", name, withDuty(err))
	}
	return Open(ctx, db, name)
}

// Drop removes a queue. It refuses with ErrState while there are entries, unless force is set: then they are lost.
func Drop(ctx context.Context, db postgres.DB, name string, force bool, by By) error {
	return control(ctx, db, fmt.Sprintf("drop queue %q", name), `SELECT penstock.drop_queue($1, $2, $3, $4)`, name,
		force, postgres.Given(by.Reason), postgres.Given(by.Actor))
}

// OnTable writes a queue's own table into a statement, in place of penstock.entry_X. The name comes from the registry
// and is quoted here, the only place where the name of a queue's table enters SQL.
func OnTable(queue, sql string) string {
	return strings.ReplaceAll(sql, "penstock.entry_X", pgx.Identifier{"penstock", "entry_" + queue}.Sanitize())
}

// bind binds the queue to a database and writes its statements.
func (q *Queue) bind(db postgres.DB) *Queue {
	own := func(sql string) string { return OnTable(q.Name, sql) }
	q.db, q.policy, q.sizes, q.batcher = db, &lanePolicy{}, &payloadSize{}, &batcher{}
	q.sql = statements{
		claim: claimStatements{
			oneLane:     own(claimTexts.oneLane),
			deleteFirst: own(claimTexts.deleteFirst), deleteFirstLimited: own(claimTexts.deleteFirstLimited),
			lockFirst: own(claimTexts.lockFirst), lockFirstLimited: own(claimTexts.lockFirstLimited),
			lockFirstKeyed: own(claimTexts.lockFirstKeyed),
			weighed:        own(claimTexts.weighed), weighedKeyed: own(claimTexts.weighedKeyed),
		},
		plainPush: own(plainPushSQL), promote: own(promoteSQL), misdated: own(misdatedSQL), redate: own(redateSQL),
		claimGroups: own(claimGroupsSQL), reclaim: own(reclaimSQL), sweep: own(sweepSQL),
		busy: own(busySQL), finishSolo: own(finishSoloSQL),
		callBack: own(callBackSQL), done: own(doneSQL), retry: own(retrySQL), fail: own(failSQL),
		refund: own(refundSQL), remove: own(removeSQL), started: own(startedSQL), unlock: own(unlockSQL),
		recoverEntries: own(recoverEntriesSQL), mayHaveRun: own(mayHaveRunSQL), crash: own(crashSQL),
		callBackPoison: own(callBackPoisonSQL), deadLetter: own(deadLetterSQL),
	}
	if q.Config.Kind == KindCron {
		q.sql.promote = own(promoteCronSQL)
	}
	return q
}

// WithTx returns the same queue on another database handle, usually a transaction. Its pushes are not batched with
// those of others.
func (q *Queue) WithTx(db postgres.DB) *Queue {
	other := *q
	other.db, other.batcher = db, nil
	return &other
}

// errorf wraps err with the verb and the queue, after translating it.
func (q *Queue) errorf(verb string, err error) error {
	if err == nil || errors.Is(err, context.Canceled) {
		return err
	}
	return fmt.Errorf("%s queue %q: %w", verb, q.Name, withDuty(err))
}

// control runs a function of the schema that returns nothing; does names it in the error.
func control(ctx context.Context, db postgres.DB, does, sql string, args ...any) error {
	if _, err := db.Exec(ctx, sql, args...); err != nil {
		return fmt.Errorf("%s: %w", does, withDuty(err))
	}
	return nil
}
