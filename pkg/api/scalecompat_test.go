package api

import (
	"context"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"slices"
	"testing"
	"time"
)

// scaled is a world with deployment d of model m.
func scaled(t *testing.T) *world {
	t.Helper()
	w := newWorld(t)
	w.exec(`SELECT penstock.register_model('m', '{"protocol":"openai"}'), penstock.set_deployment('d', 'm', '{"mode": "advise"}', 'a test')`)
	return w
}

// A browser sends a GET for any page that names the address, and this one changes something.
func TestAddressesOfAnOpenServerAreNotForPagesOfOtherSitesWhateverTheMethod(t *testing.T) {
	w := scaled(t)
	for _, from := range []map[string]string{
		{"Sec-Fetch-Site": "cross-site"},
		{"Sec-Fetch-Site": "cross-site", "Sec-Fetch-Mode": "navigate"},
		{"Sec-Fetch-Site": "same-site"},
		{"Origin": "https://evil.example"},
	} {
		for _, method := range []string{http.MethodGet, http.MethodHead, http.MethodPost} {
			for _, path := range []string{"/models/scale?model=m&amount=1400&until=9999h", "/v1/queues"} {
				r := httptest.NewRequestWithContext(t.Context(), method, "http://localhost"+path, nil)
				for name, value := range from {
					r.Header.Set(name, value)
				}
				answered := httptest.NewRecorder()
				w.api.ServeHTTP(answered, r)
				if answered.Code != http.StatusMisdirectedRequest {
					t.Errorf("%s %s with %v: %d %s, want 421", method, path, from, answered.Code, answered.Body)
				}
			}
		}
	}
	for _, own := range []map[string]string{{}, {"Sec-Fetch-Site": "none"}, {"Sec-Fetch-Site": "same-origin"}, {"Origin": "http://localhost"}} {
		headers := make([]string, 0, 2)
		for name, value := range own {
			headers = append(headers, name, value)
		}
		if status, answer := w.send("GET", "/v1/queues", "", headers...); status != http.StatusOK {
			t.Errorf("GET with %v: %d %v", own, status, answer)
		}
	}
	var ordered bool
	if err := w.pool.QueryRow(t.Context(), `SELECT override IS NOT NULL FROM penstock.deployment`).Scan(&ordered); err != nil || ordered {
		t.Errorf("a page of another site has set an override: %t (%v)", ordered, err)
	}
}

// Callers that ask for more instances at once are each given theirs.
func TestAdditionsOfInstancesAtOnceAddUp(t *testing.T) {
	w := scaled(t)
	held, err := w.pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer held.Rollback(context.WithoutCancel(t.Context()))
	if _, err := held.Exec(t.Context(), `SELECT FROM penstock.deployment FOR NO KEY UPDATE`); err != nil {
		t.Fatal(err)
	}
	answers := make(chan map[string]any, 2)
	for range 2 {
		go func() {
			_, answer := w.send("POST", "/models/scale?model=m&amount=2", "")
			answers <- answer
		}()
	}
	const waitingSQL = `SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'`
	for waiting := 0; waiting < 2; time.Sleep(10 * time.Millisecond) {
		// on another connection: in a transaction pg_stat_activity stays as it was first read
		if err := w.pool.QueryRow(t.Context(), waitingSQL).Scan(&waiting); err != nil {
			t.Fatal(err)
		}
	}
	if err := held.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	steps := map[string]bool{}
	for range 2 {
		answer := <-answers
		steps[fmt.Sprint(answer["before"], " to ", answer["instances"])] = true
	}
	if got := slices.Sorted(maps.Keys(steps)); !slices.Equal(got, []string{"0 to 2", "2 to 4"}) {
		t.Errorf("two additions of 2 went %v, want from 0 to 2 and from 2 to 4", got)
	}
}
