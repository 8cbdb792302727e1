package web

import (
	"net/http"
	"strings"
	"testing"
)

// A page about a model that does not exist does not say that there is no model at all.
func TestAPageOfAnUnknownModelSaysSo(t *testing.T) {
	s := newSite(t)
	s.exec(`SELECT penstock.register_model('llama', '{"protocol": "openai"}')`)
	b := s.as(viewer)
	if got := b.get("models?model=lama"); got.status != http.StatusNotFound ||
		strings.Contains(got.text, "No model is registered") || !strings.Contains(got.text, "lama") {
		t.Errorf("GET models?model=lama: %d: %s", got.status, got.text)
	}
	if got := b.get("models?model=llama"); got.status != http.StatusOK {
		t.Errorf("GET models?model=llama: %d", got.status)
	}
	s.exec(`SELECT penstock.set_deployment('llama-own', 'llama', '{}')`)
	for _, page := range []struct{ path, want string }{
		{"autoscaler?model=lama", "Model lama has no deployment"}, {"autoscaler?model=llama", "llama-own"},
	} {
		if got := b.get(page.path); !strings.Contains(got.text, page.want) {
			t.Errorf("GET %s lacks %q: %s", page.path, page.want, got.text)
		}
	}
}

// Forms find a pool and an instance of which the pages have no row.
func TestFormsFindAPoolAndAnInstanceBeyondThoseThatPagesList(t *testing.T) {
	s := newSite(t)
	s.exec(`INSERT INTO penstock.model (name, config) SELECT 'model-' || to_char(n, 'FM0000'), '{"protocol": "openai"}'
	          FROM generate_series(1, $1) n`, modelsMax+1)
	s.exec(`INSERT INTO penstock.instance (model, server, endpoint, slots)
	        SELECT 'model-0501', 'gpu-' || to_char(n, 'FM0000'), 'http://gpu', 7 FROM generate_series(1, $1) n`, instancesMax+1)
	b := s.as(administrator)
	for form, want := range map[string]string{
		"do/set_pool?model=model-0501":                        "kept for online calls",
		"do/drain_instance?model=model-0501&server=gpu-1001":  "7 slots",
		"do/remove_instance?model=model-0501&server=gpu-1001": "7 slots",
	} {
		if got := b.get(form); got.status != http.StatusOK || !strings.Contains(got.text, want) {
			t.Errorf("GET %s: %d, lacks %q: %s", form, got.status, want, got.text)
		}
	}
}
