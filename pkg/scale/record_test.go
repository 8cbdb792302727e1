package scale

import (
	"errors"
	"testing"
)

// An answer of a backend may have any characters. Postgres takes no NUL in a text.
func TestAFailureWithAnyTextIsRecorded(t *testing.T) {
	db, c := driven(t), &cluster{before: errors.New("status 500: a\x00b \x1b[31mred\r\n")}
	w := newTerm(t, db, c)
	w.round()
	override(t, db, 2)
	for range 3 {
		w.round()
	}
	text := one[string](t, db, `SELECT failures || ' ' || coalesce(error, '') FROM penstock.deployment_state`)
	if text != "1 status 500: a b [31mred" {
		t.Errorf("recorded is %q after %d orders", text, len(c.orders))
	}
}
