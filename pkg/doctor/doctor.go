package doctor

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/penstock/penstock/internal/postgres"
)

// Severity is the urgency of a finding.
type Severity string

// The severities, from nothing to do to act now.
const (
	Fine     Severity = "fine"
	Skipped  Severity = "skipped" // it was not checked, for the reason in the summary
	Warning  Severity = "warning"
	Critical Severity = "critical"
)

// Finding is the result of one check.
type Finding struct {
	Check    string   `json:"check"`
	Severity Severity `json:"severity" doc:"fine, skipped, warning or critical."`
	Summary  string   `json:"summary"`
	Details  []string `json:"details,omitempty"`
	Advice   string   `json:"advice,omitempty"` // the action to take; empty if none is needed
}

// Config sets the bounds of an examination. The zero value means the defaults.
type Config struct {
	// Deep checks the invariants for any number of rows; otherwise they are skipped above RowsMax
	// estimated rows.
	Deep    bool
	RowsMax int64 // 200,000
	// Schema compares the database with the program's migrations; the check is left out if nil.
	Schema func(ctx context.Context) (Finding, error)
	// Now is this machine's clock: time.Now if nil.
	Now func() time.Time
}

func (c Config) withDefaults() Config {
	c.RowsMax = cmp.Or(max(c.RowsMax, 0), 200_000)
	if c.Now == nil {
		c.Now = time.Now
	}
	return c
}

// How long a check may take, and that of the invariants of any number of rows.
const checkMax, invariantsMax = 10 * time.Second, 10 * time.Minute

// checkSettingsSQL sets up the transaction of a check: read only, with the planner's default
// settings. The pool's sessions are set for keyed lookups, with which a check that reads many rows
// would take too long.
const checkSettingsSQL = `SET TRANSACTION READ ONLY;
SET LOCAL enable_seqscan = on; SET LOCAL enable_hashjoin = on; SET LOCAL enable_mergejoin = on;
SET LOCAL plan_cache_mode = auto; SET LOCAL max_parallel_workers_per_gather = 2; SET LOCAL lock_timeout = '2s';
SET LOCAL statement_timeout = `

// Examine runs every check and returns the findings, in the order of the table. It returns an error
// only if the database cannot be reached.
func Examine(ctx context.Context, db postgres.DB, cfg Config) ([]Finding, error) {
	cfg = cfg.withDefaults()
	if _, err := db.Exec(ctx, `SELECT 1`); err != nil {
		return nil, fmt.Errorf("reach the database: %w", err)
	}
	var findings []Finding
	var foreign bool // the schema is not this program's: later errors about missing objects add nothing
	for _, c := range checks {
		if c.name == "schema" && cfg.Schema == nil {
			continue
		}
		if err := ctx.Err(); err != nil {
			return findings, err
		}
		f, err := examine(ctx, db, cfg, c)
		switch {
		case err == nil && c.name == "schema":
			foreign = f.Severity != Fine
		case err != nil && foreign && ofSchema(postgres.Code(err)):
			f = Finding{Check: c.name, Severity: Skipped, Summary: "not checked: it needs the schema of this program"}
		case err != nil:
			f = Finding{
				Check: c.name, Severity: Warning, Summary: "could not be checked: " + err.Error(),
				Advice: cannot(err),
			}
		}
		findings = append(findings, f)
	}
	return findings, nil
}

// ofSchema reports whether an error is about a missing table, function or column.
func ofSchema(code string) bool {
	return slices.Contains([]string{"3F000", "42P01", "42883", "42703"}, code)
}

func examine(ctx context.Context, db postgres.DB, cfg Config, c check) (Finding, error) {
	limit := checkMax
	if cfg.Deep && c.name == "invariants" {
		limit = invariantsMax
	}
	bounded, cancel := context.WithTimeout(ctx, limit+5*time.Second)
	defer cancel()
	var f Finding
	err := postgres.InTx(bounded, db, func(tx pgx.Tx) error {
		if _, err := tx.Exec(bounded, checkSettingsSQL+fmt.Sprint(limit.Milliseconds()),
			pgx.QueryExecModeSimpleProtocol); err != nil {
			return err
		}
		var err error
		f, err = c.run(bounded, tx, cfg)
		return err
	})
	f.Check = c.name
	f.Severity = cmp.Or(f.Severity, Fine)
	return f, err
}

// cannot returns the advice for a check that failed.
func cannot(err error) string {
	switch code := postgres.Code(err); {
	case ofSchema(code):
		return "The schema is missing or older than this program: run penstock migrate status, then penstock " +
			"migrate up."
	case code == postgres.InsufficientPrivilege:
		return missingRight(err)
	case code == postgres.QueryCanceled, code == postgres.LockNotAvailable:
		return "The database is busy: try again, or read the view by hand."
	}
	return "Try again; if it stays, the error says what Postgres refused."
}

// deniedSchema is the schema that Postgres denies, in its English messages.
var deniedSchema = regexp.MustCompile(`permission denied for schema (.+)$`)

// missingRight returns the advice for a check whose session lacks a right. Postgres names the object without its
// schema.
func missingRight(err error) string {
	var denied *pgconn.PgError
	if !errors.As(err, &denied) {
		return "Run the doctor as a role with the rights that the error names."
	}
	if found := deniedSchema.FindStringSubmatch(denied.Message); found != nil && found[1] != "penstock" {
		return "GRANT USAGE ON SCHEMA " + found[1] + " to the role, or run the doctor as one that has it."
	}
	if strings.Contains(denied.Message, " pg_") {
		return "GRANT pg_monitor to the role, or run the doctor as a role that has it."
	}
	return "Run the doctor as a role with the duty operator (penstock grants), or as the owner of the schema."
}

// Worst returns the severity of the worst finding.
func Worst(findings []Finding) Severity {
	worst := Fine
	for _, f := range findings {
		switch f.Severity {
		case Critical:
			return Critical
		case Warning:
			worst = Warning
		}
	}
	return worst
}
