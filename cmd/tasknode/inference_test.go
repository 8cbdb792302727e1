package main

import (
	"log/slog"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/penstock/penstock"
	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/pkg/api"
	"github.com/penstock/penstock/pkg/worker"
)

func TestPlacesOfResultsAreRead(t *testing.T) {
	t.Setenv("S3_ID", "id")
	t.Setenv("SHORT", "x")
	for name, c := range map[string]struct {
		section Inference
		wrong   string
	}{
		"nothing":        {Inference{}, ""},
		"a directory":    {Inference{Objects: "/srv/results"}, ""},
		"a bucket":       {Inference{Objects: "s3://results/penstock", S3Endpoint: "https://s3.example", S3AccessKey: "env:S3_ID", S3SecretKey: "env:S3_ID"}, ""},
		"no endpoint":    {Inference{Objects: "s3://results"}, "endpoint"},
		"no key":         {Inference{CallbackURL: "http://here:8421"}, "callback_key is missing"},
		"key not there":  {Inference{CallbackURL: "http://here:8421", CallbackKey: "env:NOT_SET"}, "callback_key"},
		"key too short":  {Inference{CallbackURL: "http://here:8421", CallbackKey: "env:SHORT"}, "callback_key has 1 bytes"},
		"secret is none": {Inference{Objects: "s3://results", S3Endpoint: "https://s3.example", S3AccessKey: "plain", S3SecretKey: "plain"}, "env:NAME"},
	} {
		service, err := c.section.service(nil, nil)
		if (err == nil) != (c.wrong == "") || (err != nil && !strings.Contains(err.Error(), c.wrong)) {
			t.Errorf("%s: %v, want %q", name, err, c.wrong)
		}
		if err == nil && (service.Objects == nil) != (c.section.Objects == "") {
			t.Errorf("%s: results go to %v", name, service.Objects)
		}
	}
}

// Workers report to the node's own listener, beside its probes; nobody else can.
func TestNodeTakesInReportsBesideItsProbes(t *testing.T) {
	t.Setenv("REPORTS", "key of the installation")
	cfg := defaults()
	cfg.TaskNode.Governor, cfg.TaskNode.Hints = false, false
	cfg.TaskNode.Inference = Inference{CallbackURL: "http://node:8421/", CallbackKey: "env:REPORTS"}
	n, err := newNode(cfg, &penstock.DB{Pool: pgtest.New(t)}, nil, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	routes := n.routes(api.Check{})
	post := func(key string) int {
		w := httptest.NewRecorder()
		routes.ServeHTTP(w, httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/tasks/callback/17?token=5&key="+key, strings.NewReader(`{"id":"17","status":"succeeded"}`)))
		if w.Code != http.StatusOK && w.Header().Get("Content-Type") != "application/problem+json" {
			t.Errorf("answered %d with %s", w.Code, w.Header().Get("Content-Type"))
		}
		return w.Code
	}
	if code := post("guessed"); code != http.StatusNotFound {
		t.Errorf("a guessed address answered %d", code)
	}
	if code := post(worker.CallbackToken([]byte("key of the installation"), "17", 5)); code != http.StatusNotFound {
		t.Errorf("a report on an entry that is not known was answered %d", code)
	}
}
