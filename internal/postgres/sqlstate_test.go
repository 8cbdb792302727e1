package postgres_test

import (
	"errors"
	"fmt"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/penstock/penstock/internal/postgres"
)

func TestRefusalsForValuesAreToldFromThoseOfTheServer(t *testing.T) {
	for _, c := range []struct {
		err         error
		values, row bool
	}{
		{&pgconn.PgError{Code: "22P05"}, true, true},
		{fmt.Errorf("push: %w", &pgconn.PgError{Code: "54001"}), true, true},
		{&pgconn.PgError{Code: "54000", Message: "total size of jsonb array elements exceeds the maximum"}, true, true},
		{&pgconn.PgError{Code: "54000", Message: "too many notifications in the NOTIFY queue", Routine: "PreCommit_Notify"}, false, false},
		{&pgconn.PgError{Code: "54000", Message: "database is not accepting commands", Routine: "GetNewTransactionId"}, false, false},
		{&pgconn.PgError{Code: "23514"}, false, true},
		{&pgconn.PgError{Code: "53200"}, false, false},
		{errors.New("54001"), false, false},
		{nil, false, false},
	} {
		if values, row := postgres.RefusesValues(c.err), postgres.RefusesRow(c.err); values != c.values || row != c.row {
			t.Errorf("%v: of the values %t, of the row %t; want %t and %t", c.err, values, row, c.values, c.row)
		}
	}
}

// Too many open files in system: others close some.
func TestAServerWithoutOpenFilesIsUnavailable(t *testing.T) {
	if err := (&pgconn.PgError{Code: "53000"}); !postgres.Unavailable(err) || !postgres.Passes(err) {
		t.Error("insufficient resources are not said to pass")
	}
}

// No statement that writes succeeds until a database is vacuumed, and then the same one does.
func TestAServerWithoutTransactionIDsIsUnavailable(t *testing.T) {
	for routine, want := range map[string]bool{"GetNewTransactionId": true, "GetNewMultiXactId": true, "check_stack_depth": false} {
		err := fmt.Errorf("push: %w", &pgconn.PgError{Code: "54000", Routine: routine})
		if unavailable, passes := postgres.Unavailable(err), postgres.Passes(err); unavailable != want || passes != want {
			t.Errorf("%s: unavailable %t, passes %t; want %t", routine, unavailable, passes, want)
		}
	}
}
