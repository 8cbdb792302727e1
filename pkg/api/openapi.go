package api

import (
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"

	"github.com/danielgtaylor/huma/v2"
)

// OpenAPI returns the description of the API (OpenAPI 3.1, YAML), as it is committed in docs/openapi.yaml.
func (a *API) OpenAPI() ([]byte, error) {
	doc := a.huma.OpenAPI()
	// The library's own model of errors, which Problem replaces.
	for _, name := range []string{"ErrorModel", "ErrorDetail"} {
		delete(doc.Components.Schemas.Map(), name)
	}
	sent := map[string]bool{}
	for _, path := range doc.Paths {
		for _, op := range []*huma.Operation{path.Post, path.Put, path.Patch} {
			if op != nil && op.RequestBody != nil {
				for _, media := range op.RequestBody.Content {
					reach(doc, media.Schema, sent)
				}
			}
		}
	}
	// Clients must expect answers to have more fields one day; bodies are refused that have more.
	for name, schema := range doc.Components.Schemas.Map() {
		if schema.AdditionalProperties == false && !sent["#/components/schemas/"+name] {
			schema.AdditionalProperties = nil
		}
	}
	text, err := doc.YAML()
	if err != nil {
		return nil, fmt.Errorf("describe the API: %w", err)
	}
	return text, nil
}

// FirstSegments returns the first segments of all addresses of the API and of its probes, each once.
func FirstSegments() []string {
	segments := []string{"metrics"} // where Config.Metrics is given
	for _, r := range New(nil, Config{}).routes {
		if first, _, _ := strings.Cut(strings.TrimPrefix(r.path, "/"), "/"); first != "" {
			segments = append(segments, first)
		}
	}
	slices.Sort(segments)
	return slices.Compact(segments)
}

// reach notes the components that a schema refers to, directly or through others.
func reach(doc *huma.OpenAPI, schema *huma.Schema, found map[string]bool) {
	if schema == nil || found[schema.Ref] {
		return
	}
	if schema.Ref != "" {
		found[schema.Ref] = true
		schema = doc.Components.Schemas.SchemaFromRef(schema.Ref)
	}
	for _, property := range schema.Properties {
		reach(doc, property, found)
	}
	for _, one := range schema.OneOf {
		reach(doc, one, found)
	}
	reach(doc, schema.Items, found)
}

// indexRoute answers at the root with where to go from there.
func (a *API) indexRoute() {
	a.raw(route{method: "GET", path: "/{$}"}, nil, func(w http.ResponseWriter, _ *http.Request) error {
		writeJSON(w, "application/json", http.StatusOK, map[string]any{
			"name": "Penstock", "description": "A durable task queue on Postgres.",
			"openapi": "/openapi.yaml", "api": "/v1/queues", "live": "/livez", "ready": "/readyz",
		})
		return nil
	})
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
