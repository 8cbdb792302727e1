package main

import (
	"bytes"
	"io"
	"net/http"
	"net/http/httptest"
	"net/url"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/pgtest"
)

// A function of an older build may take and return something else: it might do its work and then be reported as failed.
func TestAChangeOnAnOlderSchemaIsRefusedBeforeItBegins(t *testing.T) {
	dsn := pgtest.DSN(t)
	db, err := pgx.Connect(t.Context(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close(t.Context())
	if _, err := db.Exec(t.Context(), `
		SELECT penstock.create_queue('mails', '{}');
		DROP FUNCTION penstock.pause_queue;
		CREATE FUNCTION penstock.pause_queue(queue text, reason text DEFAULT '', actor text DEFAULT NULL, until timestamptz DEFAULT NULL)
		RETURNS void LANGUAGE plpgsql AS $$ BEGIN UPDATE penstock.queue q SET paused_at = now() WHERE q.name = queue; END $$;
		UPDATE penstock.schema_version SET hash = 'of an older build'`); err != nil {
		t.Fatal(err)
	}
	const remedy = "penstock migrate up"
	_, errs, code := command(t, nil, "queue", "pause", "mails", "--reason", "r", "--database-url", dsn)
	if code != exitState || !strings.Contains(errs, "functions are not those of this program") || !strings.Contains(errs, remedy) {
		t.Errorf("pause: exit %d, %s", code, errs)
	}
	out, errs, code := command(t, nil, "pause", "list", "-o", "jsonl", "--database-url", dsn)
	if code != 0 || out != "" {
		t.Errorf("pauses after the refusal: exit %d, %s%s", code, out, errs)
	}
	replay := bytes.NewBufferString(`{"model": "none", "policy": {}}`)
	if status := local(t, dsn, "POST", "/v1/scale/simulate", replay); status != http.StatusNotFound {
		t.Errorf("decisions of another policy, which change nothing: status %d, want that of an unknown model", status)
	}
	if _, errs, code := command(t, nil, "migrate", "up", "--database-url", dsn); code != 0 {
		t.Fatalf("migrate up: exit %d, %s", code, errs)
	}
	if _, errs, code := command(t, nil, "queue", "pause", "mails", "--reason", "r", "--database-url", dsn); code != 0 {
		t.Errorf("pause on the new functions: exit %d, %s", code, errs)
	}
}

// A role without CONNECT is not told to get the rights of an operator.
func TestARoleThatMayNotConnectIsToldWhatItLacks(t *testing.T) {
	dsn := pgtest.DSN(t)
	db, err := pgx.Connect(t.Context(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close(t.Context())
	role := "outside_" + strconv.FormatInt(time.Now().UnixNano(), 36)
	if _, err := db.Exec(t.Context(), `
		CREATE ROLE `+role+` LOGIN PASSWORD 'secret';
		DO $$ BEGIN EXECUTE format('REVOKE CONNECT ON DATABASE %I FROM PUBLIC', current_database()); END $$`); err != nil {
		t.Fatal(err)
	}
	defer func() { _, _ = db.Exec(t.Context(), `DROP ROLE `+role) }()
	at, err := url.Parse(dsn)
	if err != nil {
		t.Fatal(err)
	}
	at.User = url.UserPassword(role, "secret")
	_, errs, code := command(t, nil, "queue", "list", "--database-url", at.String())
	if code != exitUnavailable || !strings.Contains(errs, "next: the role may not connect to the database") {
		t.Errorf("exit %d, %s", code, errs)
	}
}

// local sends a request to the handler in this process, as commands do.
func local(t *testing.T, dsn, method, path string, body io.Reader) (status int) {
	t.Helper()
	var out, errs bytes.Buffer
	a := newApp(strings.NewReader(""), &out, &errs, func(string) string { return "" })
	a.databaseURL, a.actor, a.timeout = dsn, "test", time.Minute
	defer a.close()
	if _, err := a.inProcess(t.Context()); err != nil {
		t.Fatal(err)
	}
	r := httptest.NewRequestWithContext(t.Context(), method, localURL+path, body)
	r.Header.Set("Content-Type", "application/json")
	w := httptest.NewRecorder()
	a.handler.ServeHTTP(w, r)
	return w.Code
}

// A database administrator may tune tables: that is no broken schema.
func TestVerifyWarnsOfParametersOfStorage(t *testing.T) {
	dsn := pgtest.DSN(t)
	db, err := pgx.Connect(t.Context(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close(t.Context())
	for _, c := range []struct {
		set, want string
		code      int
	}{
		{"fillfactor = 91", "table lock: fillfactor is 91, Penstock's is not set", exitWarning},
		{"autovacuum_enabled = off", "table lock was changed", exitCritical},
	} {
		if _, err := db.Exec(t.Context(), `ALTER TABLE penstock.lock SET (`+c.set+`)`); err != nil {
			t.Fatal(err)
		}
		out, errs, code := command(t, nil, "migrate", "verify", "--database-url", dsn)
		if code != c.code || !strings.Contains(out, c.want) {
			t.Errorf("%s: exit %d, %s%s", c.set, code, out, errs)
		}
	}
}
