package invalidation

import (
	"encoding/json"
	"errors"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"
)

// Poolers lead to these modes: FinishTx does not know the types of its arguments then, and says which mode does.
func TestFinishTxNamesAModeOfThePoolThatDoesNotKnowTypes(t *testing.T) {
	b := newBed(t, Config{})
	for mode, works := range map[pgx.QueryExecMode]bool{
		pgx.QueryExecModeExec: false, pgx.QueryExecModeSimpleProtocol: false, pgx.QueryExecModeDescribeExec: true,
		pgx.QueryExecModeCacheDescribe: true,
	} {
		b.push("")
		lock := b.claimOne()
		cfg, err := pgxpool.ParseConfig(b.pool.Config().ConnString())
		b.must(err)
		cfg.ConnConfig.DefaultQueryExecMode = mode
		own, err := pgxpool.NewWithConfig(b.ctx, cfg)
		b.must(err)
		t.Cleanup(own.Close)
		tx, err := own.Begin(b.ctx)
		b.must(err)
		r := &Run{Queue: b.q, Entry: lock.Entries[0], Lock: lock, Node: here}
		err = r.FinishTx(b.ctx, tx, json.RawMessage(`1`))
		if works && err != nil || !works && (!errors.Is(err, ErrInvalid) || !strings.Contains(err.Error(), mode.String())) {
			t.Errorf("FinishTx in mode %q: %v", mode, err)
		}
		b.must(tx.Rollback(b.ctx))
		b.settle(doneAll(lock)...)
	}
}
