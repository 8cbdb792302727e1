package api

import (
	"encoding/json"
	"fmt"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// twoLeaders are two processes on one database, which know nothing of one another.
func twoLeaders(t *testing.T) (leaders [2]*API, dsn string) {
	dsn = pgtest.DSN(t)
	for i := range leaders {
		pool, err := postgres.Open(t.Context(), Pool(postgres.Config{DSN: dsn, MaxConns: 8}))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(pool.Close)
		leaders[i] = New(pool, Config{Open: true})
	}
	if _, err := invalidation.Create(t.Context(), leaders[0].db, "work", invalidation.Config{}); err != nil {
		t.Fatal(err)
	}
	return leaders, dsn
}

func pushAs(a *API, media, key, body string) *httptest.ResponseRecorder {
	r := httptest.NewRequest("POST", "http://localhost"+pushTo, strings.NewReader(body)) //nolint:noctx // a test
	r.Header.Set("Content-Type", media)
	r.Header.Set("Idempotency-Key", key)
	w := httptest.NewRecorder()
	a.ServeHTTP(w, r)
	return w
}

func TestKeyThatIsUnderWayAtAnotherLeaderIs409AndAReplayOnceItIsDone(t *testing.T) {
	leaders, dsn := twoLeaders(t)
	other, err := postgres.Open(t.Context(), postgres.Config{DSN: dsn})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(other.Close)
	tx, err := other.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	var id int64
	if err := tx.QueryRow(t.Context(), `SELECT penstock.push('work', '1', idempotency_key => 'k')`).Scan(&id); err != nil {
		t.Fatal(err)
	}
	start := time.Now()
	w := pushAs(leaders[0], "application/json", "k", `{"payload": 1}`)
	var p Problem
	if err := json.Unmarshal(w.Body.Bytes(), &p); err != nil || w.Code != 409 || p.Code != "idempotency_key_in_use" || w.Header().Get("Retry-After") == "" {
		t.Errorf("while it is under way: %d %s", w.Code, w.Body)
	}
	// The other transaction is open, so that an answer is one that did not wait for its end.
	if took := time.Since(start); took < keyPatience {
		t.Errorf("it took %s to say so, less than the time in which the other one might end", took)
	}
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	w = pushAs(leaders[1], "application/json", "k", `{"payload": 1}`)
	if w.Code != 200 || w.Header().Get("Idempotent-Replayed") != "true" || !strings.Contains(w.Body.String(), fmt.Sprintf(`"id":%d`, id)) {
		t.Errorf("once it is done: %d %s", w.Code, w.Body)
	}
	if w := pushAs(leaders[1], "application/json", "k", `{"payload": 2}`); w.Code != 422 {
		t.Errorf("with another body: %d %s", w.Code, w.Body)
	}
}

func TestPushThatWaitsForAnotherTransactionIsToldForWhichOne(t *testing.T) {
	leaders, dsn := twoLeaders(t)
	other, err := postgres.Open(t.Context(), postgres.Config{DSN: dsn})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(other.Close)
	if _, err := other.Exec(t.Context(), `SELECT penstock.register_model('m', '{"protocol": "dispatcher"}')`); err != nil {
		t.Fatal(err)
	}
	tx, err := other.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(t.Context())
	const both = `SELECT penstock.push('work', '1', unique_key => 'u', unique_policy => 'while_active'), penstock.push('m', '1', idempotency_key => 'k')`
	if _, err := tx.Exec(t.Context(), both); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		path, key, body string
		status          int
		code            string
	}{
		{pushTo, "", `{"payload": 1, "unique_key": "u", "unique_policy": "while_active"}`, 503, "timeout"},
		{"/queue/submit", "k", `{"model": "m", "payload": 1}`, 409, "idempotency_key_in_use"},
	} {
		r := httptest.NewRequest("POST", "http://localhost"+c.path, strings.NewReader(c.body)) //nolint:noctx // a test
		r.Header.Set("Content-Type", "application/json")
		if c.key != "" {
			r.Header.Set("Idempotency-Key", c.key)
		}
		w := httptest.NewRecorder()
		leaders[0].ServeHTTP(w, r)
		var p Problem
		if err := json.Unmarshal(w.Body.Bytes(), &p); err != nil || w.Code != c.status || p.Code != c.code || w.Header().Get("Retry-After") == "" {
			t.Errorf("%s: %d %s, want %d %s", c.path, w.Code, w.Body, c.status, c.code)
		}
	}
}

func TestSameKeyAtTwoLeadersAtOnceIsAcceptedOnce(t *testing.T) {
	leaders, _ := twoLeaders(t)
	both := func(media, key, body string) (answers [2]*httptest.ResponseRecorder) {
		var wg sync.WaitGroup
		for i, a := range leaders {
			wg.Go(func() { answers[i] = pushAs(a, media, key, body) })
		}
		wg.Wait()
		return answers
	}
	for i := range 40 {
		codes := map[int]int{}
		for _, w := range both("application/json", fmt.Sprint("one-", i), fmt.Sprintf(`[{"payload": %d}, {"payload": 0}]`, i)) {
			codes[w.Code]++
		}
		if codes[201] != 1 || codes[200] != 1 {
			t.Fatalf("push %d: %v, want it accepted once and replayed once", i, codes)
		}
	}
	const lines = 5000
	var sum Streamed
	for _, w := range both("application/x-ndjson", "night", strings.Repeat(`{"payload": {"n": 1}}`+"\n", lines)) {
		var end streamEnd
		if err := json.Unmarshal(w.Body.Bytes(), &end); err != nil || w.Code != 200 || end.Summary.Lines != lines || end.Summary.Refused != 0 {
			t.Fatalf("stream: %d %s", w.Code, w.Body)
		}
		sum.Inserted += end.Summary.Inserted
		sum.Replayed += end.Summary.Replayed
	}
	var stored int64
	if err := leaders[0].db.QueryRow(t.Context(), `SELECT count(*) FROM penstock.entry_work WHERE payload = '{"n": 1}'`).Scan(&stored); err != nil {
		t.Fatal(err)
	}
	if sum.Inserted != lines || sum.Replayed != lines || stored != lines {
		t.Errorf("%+v and %d entries, want %d inserted, replayed and stored", sum, stored, lines)
	}
}
