package doctor

import (
	"context"
	"errors"
	"fmt"
	"slices"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/migrations"
)

// Schema compares the schema of a database with the migrations and functions of this program. Pending or unknown
// migrations are a warning, and so are other parameters of tables, indexes and columns, by which an administrator tunes
// them; other differences are critical. It needs a connection of its own, outside the transaction of Examine.
func Schema(ctx context.Context, db postgres.DB) (Finding, error) {
	all, err := migrations.List(ctx, db)
	if err != nil {
		return Finding{}, err
	}
	if pending := inState(all, migrations.Pending); len(pending) > 0 {
		f := Finding{
			Severity: Warning, Summary: many(len(pending), "migration is", "migrations are") + " pending",
			Advice: "Run penstock migrate up before the programs of this version.",
		}
		for _, m := range pending {
			f.Details = append(f.Details, m.Name)
		}
		return f, nil
	}
	if unknown := inState(all, migrations.Unknown); len(unknown) > 0 {
		newest := unknown[len(unknown)-1]
		has := fmt.Sprintf("migration %d", newest.Version)
		if newest.Name == migrations.FunctionsName {
			has = "functions of a newer release"
		}
		return Finding{
			Severity: Warning, Summary: "the database is newer than this program: it has " + has,
			Advice: "Use the program of the version that runs. Programs of the version before keep working.",
		}, nil
	}
	drift, err := migrations.Drift(ctx, db)
	var other *migrations.OtherServerError
	switch {
	case errors.As(err, &other) && len(drift.Objects) == 0:
		return Finding{
			Severity: Warning, Summary: "not compared: " + other.Error(),
			Advice: "Run penstock migrate up: it records the schema as it is now, and later changes are found.",
		}, nil
	case err != nil && other == nil:
		return Finding{}, err
	case len(drift.Objects) > 0:
		return Finding{
			Severity: Critical, Details: append(drift.Objects, drift.Parameters...),
			Summary: many(len(drift.Objects), "object differs", "objects differ") +
				" from what migrations and functions made",
			Advice: "The schema was changed by hand. penstock migrate sql prints what should be there; restore it, " +
				"or put the change in " +
				"a migration.",
		}, nil
	case len(drift.Parameters) > 0:
		return Finding{
			Severity: Warning, Details: drift.Parameters,
			Summary: many(len(drift.Parameters), "parameter is", "parameters are") + " not as migrations set them",
			Advice: "Keep them if they were meant. ALTER TABLE or ALTER INDEX with SET (NAME = VALUE), or RESET " +
				"(NAME) where Penstock's is not set, gives those of Penstock back.",
		}, nil
	}
	return Finding{Severity: Fine, Summary: "as migrations and functions made it"}, nil
}

// inState returns the migrations in one state.
func inState(all []migrations.Status, state string) []migrations.Status {
	return slices.DeleteFunc(slices.Clone(all), func(m migrations.Status) bool { return m.State != state })
}

// many is a number and its noun, singular or plural.
func many(n int, one, more string) string {
	if n == 1 {
		return "1 " + one
	}
	return fmt.Sprintf("%d %s", n, more)
}
