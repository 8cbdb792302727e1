package gateway

import (
	"net/http"
	"net/http/httptest"
	"slices"
	"testing"
	"time"
)

// answers is a RequestObserver that keeps the answers of mounted routes.
type answers []string

func (*answers) Ended(RequestRecord, Dropped, time.Duration) {}

func (a *answers) Answered(route string, status int) {
	*a = append(*a, route+" "+http.StatusText(status))
}

// Operators see what clients of mounted routes are told, as they do of the gateway's own.
func TestAnswersOfMountedRoutesAreObserved(t *testing.T) {
	t.Parallel()
	var seen answers
	g := New(Config{Open: true, Observer: &seen})
	g.Mount("GET /v1/things/{id}", func(w http.ResponseWriter, r *http.Request) {
		if r.PathValue("id") == "none" {
			AnswerError(w, BadRequest(http.StatusUnauthorized, "invalid_api_key", "", "the token has ended"))
			return
		}
		if err := http.NewResponseController(w).Flush(); err != nil {
			t.Error(err)
		}
	})
	for _, id := range []string{"none", "one"} {
		g.ServeHTTP(httptest.NewRecorder(), httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/v1/things/"+id, nil))
	}
	if want := []string{"GET /v1/things/{id} Unauthorized", "GET /v1/things/{id} OK"}; !slices.Equal(seen, want) {
		t.Errorf("observed %q, want %q", seen, want)
	}
}
