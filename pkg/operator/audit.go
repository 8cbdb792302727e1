package operator

import (
	"context"
	"encoding/json"
	"fmt"
	"time"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// Audit is one recorded change: its actor, verb, object and reason.
type Audit struct {
	ID     int64           `json:"id"`
	At     time.Time       `json:"at"`
	Actor  string          `json:"actor"`
	Verb   string          `json:"verb"`
	Object string          `json:"object"`
	Reason string          `json:"reason"`
	Detail json.RawMessage `json:"detail,omitempty"`
}

// AuditFilter chooses audit rows; all fields that are set must match.
type AuditFilter struct {
	Actor, Verb, Object string
	Since               time.Time
	Before              int64 // ids below this one
	Limit               int
}

const auditRows = `
SELECT id, at, actor, verb, object, coalesce(reason, '') AS reason, detail
  FROM penstock.audit
 WHERE ($1::text IS NULL OR actor = $1) AND ($2::text IS NULL OR verb = $2)
   AND ($4::timestamptz IS NULL OR at >= $4) AND ($5::bigint IS NULL OR id < $5)`

// All read the newest first. Those of one object or actor are read by its index, others by the primary key. An equality
// would leave the choice to statistics: of few actors, each has a large part of the rows by them, and the plan for any
// actor reads all rows by the primary key for one that has none. A range has its order from its index alone.
const (
	auditSQL        = auditRows + ` AND $3::text IS NULL ORDER BY id DESC LIMIT $6`
	auditOfActorSQL = auditRows + ` AND $3::text IS NULL AND actor BETWEEN $1 AND $1
 ORDER BY actor DESC, id DESC LIMIT $6`
	auditOfObjectSQL = auditRows + ` AND object BETWEEN $3 AND $3 ORDER BY object DESC, id DESC LIMIT $6`
)

// Audits returns recorded changes, the newest first.
func (d *Database) Audits(ctx context.Context, f AuditFilter) ([]Audit, error) {
	sql := auditSQL
	switch {
	case f.Object != "":
		sql = auditOfObjectSQL
	case f.Actor != "":
		sql = auditOfActorSQL
	}
	return list[Audit](ctx, d.db, "audit", sql, given(f.Actor), given(f.Verb), given(f.Object), given(f.Since),
		given(f.Before), page(f.Limit))
}

// record writes the audit row of a change whose SQL function does not write one itself.
func record(ctx context.Context, db postgres.DB, by invalidation.By, verb, object string, detail map[string]any) error {
	const sql = `SELECT penstock.audit_log($1, $2, $3, $4, $5)`
	if _, err := db.Exec(ctx, sql, given(by.Actor), verb, object, by.Reason, detail); err != nil {
		return fmt.Errorf("write audit of %s: %w", verb, err)
	}
	return nil
}
