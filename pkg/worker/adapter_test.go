package worker

import (
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/worker/workertest"
)

// sends streams a body far beyond any limit without a length.
func huge(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	chunk := []byte(strings.Repeat(" ", 32<<10))
	for range 64 {
		if _, err := w.Write(chunk); err != nil {
			return
		}
	}
}

func newAdapter(t *testing.T, model Model, endpoint string, slots int) Adapter {
	t.Helper()
	a, err := New(model, Instance{Endpoint: endpoint, Slots: slots}, Config{})
	if err != nil {
		t.Fatal(err)
	}
	return a
}

func testCall(payload string) Call {
	return Call{
		RunRef:      RunRef{Entry: "entry-17", Token: 42, Attempt: 3},
		Payload:     json.RawMessage(payload),
		TraceParent: "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
		Callback:    "http://127.0.0.1:9/callback/unguessable",
	}
}

// want is the part of an outcome that a contract is about.
type want struct {
	kind       OutcomeKind
	class      Class
	running    bool
	retryAfter time.Duration
	result     string
	remote     string
	starting   bool
}

func (w want) check(t *testing.T, got Outcome) {
	t.Helper()
	g := want{
		kind: got.Kind, class: got.Class, running: got.MaybeRunning, retryAfter: got.RetryAfter,
		result: string(got.Result), remote: got.Remote, starting: got.Starting,
	}
	if g != w {
		t.Errorf("outcome\n got %+v (reason %q, err %v)\nwant %+v", g, got.Reason, got.Err, w)
	}
}

// submitAbandoned submits and ends the context once the worker has the request.
func submitAbandoned(t *testing.T, model Model, call Call) Outcome {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	s := workertest.NewScript(t, func(w http.ResponseWriter, r *http.Request) {
		cancel()
		workertest.Hangs(w, r)
	})
	return newAdapter(t, model, s.URL, 1).Submit(ctx, call)
}

// nobody is an address on which nothing listens.
func nobody(t *testing.T) string {
	t.Helper()
	s := httptest.NewServer(http.NotFoundHandler())
	s.Close()
	return s.URL
}
