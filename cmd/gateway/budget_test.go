package main

import (
	"crypto/sha256"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock/penstock/pkg/gateway"
	"github.com/penstock/penstock/pkg/gateway/openaibatch"
	"github.com/penstock/penstock/pkg/gateway/prediction"
)

// A client whose budget of GPU time is spent can still cancel: that creates no work. The database is away here, which
// a request is told that was let in.
func TestASpentBudgetDoesNotRefuseACancel(t *testing.T) {
	t.Parallel()
	db, err := pgxpool.New(t.Context(), "host="+t.TempDir()+" user=none")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(db.Close)
	g := gateway.New(gateway.Config{})
	g.SetTokens([]gateway.TokenState{{
		Hash: sha256.Sum256([]byte("spent")), Name: "spent", Flows: []string{"spent"},
		Budget: gateway.Budget{MS: 1, Spent: 1, Period: "hour", Ends: time.Now().Add(time.Hour)},
	}})
	openaibatch.New(openaibatch.Config{}, g, db).Mount()
	prediction.New(prediction.Config{}, g, db).Mount()
	for path, want := range map[string]int{
		"/v1/batches":                http.StatusTooManyRequests,
		"/v1/batches/batch_1/cancel": http.StatusServiceUnavailable,
		"/v1/predictions":            http.StatusTooManyRequests,
		"/v1/predictions/1-1/cancel": http.StatusServiceUnavailable,
	} {
		r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, path, strings.NewReader("{}"))
		r.Header.Set("Authorization", "Bearer spent")
		r.Header.Set("Content-Type", "application/json")
		w := httptest.NewRecorder()
		g.ServeHTTP(w, r)
		if w.Code != want {
			t.Errorf("%s: got %d %s, want %d", path, w.Code, w.Body, want)
		}
	}
}
