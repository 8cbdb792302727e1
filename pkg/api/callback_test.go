package api

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	"github.com/penstock/penstock/pkg/invalidation"
)

// reports stands for pkg/inference, which has tests of what becomes of a report.
type reports struct{}

func (reports) Known(_, token int64, key string) bool { return token == 7 && key == "good" }

func (reports) Take(_ context.Context, entry, _ int64, body []byte) (bool, error) {
	switch {
	case entry >= 987654:
		return false, fmt.Errorf("report on entry %d: %w", entry, invalidation.ErrEntryNotFound)
	case !json.Valid(body):
		return false, fmt.Errorf("%w: no JSON", invalidation.ErrInvalid)
	}
	switch entry {
	case 2:
		return false, nil
	case 3:
		return false, fmt.Errorf("report on entry 3: %w: stop it", invalidation.ErrLockLost)
	case 4:
		return false, fmt.Errorf("report on entry 4: %w: it has ended (done)", invalidation.ErrState)
	}
	return true, nil
}

func TestWorkersReportIsAnsweredSoThatAWorkerKnowsWhatToDo(t *testing.T) {
	a := NewProbes(Config{Reports: reports{}, BodyBytesMax: 1000})
	send := func(path, body string) *httptest.ResponseRecorder {
		return call(a, "POST", "/tasks/callback/"+path, body, "")
	}
	const good = `{"status": "success", "result": 1}`
	for _, c := range []struct {
		name, path, body string
		status           int
		code             string
	}{
		{"good", "1?token=7&key=good", good, 200, ""},
		{"wrong key", "1?token=7&key=guessed", good, 404, "not_found"},
		{"key of another token", "1?token=8&key=good", good, 404, "not_found"},
		{"no key", "1", good, 404, "not_found"},
		{"not an id", "x?token=7&key=good", good, 404, "not_found"},
		{"unknown entry", "987654?token=7&key=good", good, 404, "entry_not_found"},
		{"unknown parameter", "1?token=7&key=good&x=1", good, 422, "invalid"},
		{"no JSON", "1?token=7&key=good", "{", 422, "invalid"},
		{"too large", "1?token=7&key=good", `{"result": "` + strings.Repeat("x", 1000) + `"}`, 413, "payload_too_large"},
		{"before the run is stored", "2?token=7&key=good", good, 503, "not_yet"},
		{"of a dead run", "3?token=7&key=good", good, 409, "lock_lost"},
		{"after the end", "4?token=7&key=good", good, 409, "state_conflict"},
	} {
		w := send(c.path, c.body)
		var answer Problem
		if err := json.Unmarshal(w.Body.Bytes(), &answer); err != nil && c.status > 200 || w.Code != c.status || answer.Code != c.code || c.status > 200 && answer.Detail == "" {
			t.Errorf("%s: %d %s", c.name, w.Code, w.Body)
		}
		if again := w.Header().Get("Retry-After") != ""; again != (c.status == 503) {
			t.Errorf("%s: Retry-After %v", c.name, again)
		}
	}
	var all sync.WaitGroup
	for range 50 {
		all.Go(func() {
			if w := send("1?token=7&key=good", good); w.Code != 200 {
				t.Errorf("one of many: %d", w.Code)
			}
		})
	}
	all.Wait()
	if w := call(NewProbes(Config{}), "POST", "/tasks/callback/1?token=7&key=good", good, ""); w.Code != 404 {
		t.Errorf("where nobody takes reports: %d", w.Code)
	}
}
