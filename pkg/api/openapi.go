package api

import (
	"fmt"
	"net/http"
	"sync"
)

// OpenAPI returns the description of the API (OpenAPI 3.1, YAML), as it is committed in docs/openapi.yaml.
func (a *API) OpenAPI() ([]byte, error) {
	doc := a.huma.OpenAPI()
	// The library's own model of errors, in whose place Problem stands.
	for _, name := range []string{"ErrorModel", "ErrorDetail"} {
		delete(doc.Components.Schemas.Map(), name)
	}
	text, err := doc.YAML()
	if err != nil {
		return nil, fmt.Errorf("describe the API: %w", err)
	}
	return text, nil
}

func (a *API) openAPIRoutes() {
	describe := sync.OnceValues(a.OpenAPI)
	a.raw(route{method: "GET", path: "/openapi.yaml"}, nil, func(w http.ResponseWriter, _ *http.Request) error {
		text, err := describe()
		if err != nil {
			return err
		}
		w.Header().Set("Content-Type", "application/yaml")
		_, _ = w.Write(text) // the client has gone
		return nil
	})
}
