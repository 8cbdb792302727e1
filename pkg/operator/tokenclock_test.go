package operator

import (
	"testing"
	"time"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/pkg/invalidation"
)

// A leader whose clock was behind the database's made tokens that had ended.
func TestLifetimesOfTokensGoByTheDatabasesClock(t *testing.T) {
	tx := pgtest.ClockAhead(t, pgtest.New(t), `2 hours`)
	d, by := New(tx), invalidation.By{Actor: "ada", Reason: "test"}
	g := Grant{Name: "ci", Scopes: []string{"read"}, Lifetime: time.Hour}
	if _, err := d.CreateToken(t.Context(), g, by); err != nil {
		t.Fatal(err)
	}
	// The column's default is not of the search path.
	if _, err := tx.Exec(t.Context(), `UPDATE penstock.api_token SET created_at = clock_timestamp()`); err != nil {
		t.Fatal(err)
	}
	if _, err := d.RotateToken(t.Context(), "ci", time.Minute, time.Time{}, by); err != nil {
		t.Fatalf("rotate by a clock that is two hours ahead: %v", err)
	}
	rows, err := tx.Query(t.Context(), `
SELECT abs(extract(epoch FROM expires_at - (statement_timestamp() + interval '3 hours'))) < 600
  FROM penstock.api_token ORDER BY id DESC LIMIT 1`)
	if err != nil {
		t.Fatal(err)
	}
	defer rows.Close()
	for rows.Next() {
		var right bool
		if err := rows.Scan(&right); err != nil || !right {
			t.Errorf("the new token does not last for an hour of the database's clock (%v)", err)
		}
	}
	if err := rows.Err(); err != nil {
		t.Error(err)
	}
}
