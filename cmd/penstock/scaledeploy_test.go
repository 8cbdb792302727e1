package main

import (
	"regexp"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/pgtest"
)

func TestDeploymentsAreMadeExplainedOverriddenAndDisabled(t *testing.T) {
	dsn := pgtest.DSN(t)
	db, err := pgx.Connect(t.Context(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close(t.Context())
	do := func(sql string) {
		t.Helper()
		if _, err := db.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	do(`SELECT penstock.register_model('llama', '{"protocol": "openai"}')`)
	says := func(code int, want string, args ...string) {
		t.Helper()
		out, errs, got := command(t, nil, append(append([]string{"scale"}, args...), "--database-url", dsn)...)
		if got != code || !strings.Contains(out+errs, want) {
			t.Errorf("scale %s: exit %d, want %d and %q in\n%s%s", strings.Join(args, " "), got, code, want, out, errs)
		}
	}
	const why = "--reason=test"
	says(exitNotFound, "", "set", "own", "--set", "mode=full", why)
	says(exitUsage, "nothing to set", "set", "own", why)
	says(exitUsage, "policy", "set", "own", "--model", "llama", "--set", `policy={"min": 9, "max": 1}`, why)
	says(exitUsage, "colour", "set", "own", "--model", "llama", "--set", `policy={"colour": 1}`, why)
	says(exitUsage, "mode", "set", "own", "--model", "llama", "--set", `policy={"mode": "manual"}`, why) // a setting beside it
	says(0, "set deployment own", "set", "own", "--model", "llama", "--set", `policy={"slots": 4}`, why)
	says(0, "not decided yet", "status")
	says(0, "There is no decision yet", "explain", "own")

	do(`INSERT INTO penstock.scale_state (model, state, arrived, desired, base, raw, stabilised, ready, metric, why, decided_at)
	    VALUES ('llama', '{}', 9, 3, 1, 2, 3, 1, 9, '1 -> 3: a burst', now())`)
	do(`INSERT INTO penstock.scale_decision (at, model, before, desired, base, raw, stabilised, ready, applied, notes, why)
	    SELECT '2026-01-02T03:04:00.000001Z'::timestamptz + n * interval '1 microsecond', 'llama', n, n + 1, 1, 2, 3, 1, true, '[]',
	           format('%s -> %s', n, n + 1)
	      FROM generate_series(0, 2) n`)
	says(0, "1 -> 3: a burst", "status")
	says(0, "9 run or may start", "explain", "own")
	says(0, "2 -> 3", "explain", "own")
	says(0, "--before 2026-01-02T03:04:00.000003Z", "history", "llama", "--limit", "1")
	says(0, "--before 2026-01-02T03:04:00.000002Z", "history", "llama", "--limit", "1", "--before", "2026-01-02T03:04:00.000003Z")
	says(exitUsage, "--before", "history", "llama", "--before", "yesterday")

	// Spot machines run beside the first deployment, and one of them drains: they are paid for until they are gone.
	says(0, "set deployment spot", "set", "spot", "--model", "llama", "--set", "backend=webhook", "--set", `target={"url": "https://x.example"}`,
		"--set", "fill_order=1", why)
	do(`INSERT INTO penstock.deployment_state (name, desired, decided_at, order_id, ordered, ordered_at, existing, seen_at, failures, retry_at, error)
	    VALUES ('spot', 2, now(), 7, 6, '2026-01-02T03:04:05Z', 5, now(), 4, now(), 'status 503: no capacity')`)
	do(`INSERT INTO penstock.instance (model, server, endpoint, slots, labels, state, ready_at, deployment, draining_at)
	    SELECT 'llama', 'spot-' || n, 'http://spot-' || n, 1, '{}', 'ready', now(), 'spot', CASE WHEN n = 1 THEN now() END FROM generate_series(1, 3) n`)
	out, _, _ := command(t, nil, "scale", "status", "--database-url", dsn)
	if row := regexp.MustCompile(`spot +llama +full +- +2 +2 +5 .*status 503: no capacity +1 -> 3: a burst`); !row.MatchString(out) {
		t.Errorf("scale status tells nothing of what runs and fails:\n%s", out)
	}
	for _, want := range []string{
		"2 desired, 5 exist, 2 ready, 1 drain", "6 at 2026-01-02T03:04:05Z, not accepted yet", "4 in a row, tried again at", "status 503: no capacity",
		"caps of this one bind its share",
	} {
		says(0, want, "explain", "spot")
	}

	says(exitUsage, "--until", "override", "own", "8", why)
	says(0, "override deployment own with 8 instances", "override", "own", "8", "--until", "2100-01-01T00:00:00Z", why)
	says(0, "8 until ", "explain", "own")
	says(0, "end the override", "override", "own", "--clear", why)
	says(exitNotFound, "", "override", "other", "8", "--until", "2100-01-01T00:00:00Z", why)

	says(exitUsage, "give a deployment", "disable", why)
	says(0, "set deployment own", "disable", "own", why)
	says(0, "disabled", "status")
	says(0, "stop scaling everywhere", "disable", "--all", "--yes", why)
	var off bool
	if err := db.QueryRow(t.Context(), `SELECT value = 'true' FROM penstock.setting WHERE name = 'scale.off'`).Scan(&off); err != nil || !off {
		t.Errorf("scale.off is %v (%v)", off, err)
	}
	says(0, "go on with scaling everywhere", "disable", "--all", "--end", why)
	var left int
	if err := db.QueryRow(t.Context(), `SELECT count(*) FROM penstock.setting`).Scan(&left); err != nil || left != 0 {
		t.Errorf("%d settings are left (%v)", left, err)
	}
}
