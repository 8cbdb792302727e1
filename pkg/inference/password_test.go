package inference

import (
	"strings"
	"testing"

	"github.com/penstock/penstock/internal/pgtest"
)

// An address with a password would be read in the audit, of which nothing can be deleted, and in lists.
func TestPasswordInAnEndpointIsRefusedAndNotRepeated(t *testing.T) {
	pool := pgtest.New(t)
	if _, err := pool.Exec(t.Context(), `SELECT penstock.register_model('m', '{"protocol": "dispatcher"}')`); err != nil {
		t.Fatal(err)
	}
	for _, endpoint := range []string{"http://user:hunter2@gpu:8000/x", "https://hunter2@gpu", "HTTP://a:hunter2@gpu/"} {
		_, err := pool.Exec(t.Context(), `SELECT penstock.register_instance('m', 's', $1, 1)`, endpoint)
		if err == nil || strings.Contains(err.Error(), "hunter2") {
			t.Errorf("%s: %v", endpoint, err)
		}
	}
	var n int
	err := pool.QueryRow(t.Context(), `SELECT count(*) FROM penstock.audit a WHERE a::text LIKE '%hunter2%'`).Scan(&n)
	if err != nil || n != 0 {
		t.Errorf("%d lines of the audit hold the password (%v)", n, err)
	}
	// An @ behind the host is part of a path.
	if _, err := pool.Exec(t.Context(), `SELECT penstock.register_instance('m', 's', 'http://gpu:8000/models/a@b', 1)`); err != nil {
		t.Error(err)
	}
}
