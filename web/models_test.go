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
