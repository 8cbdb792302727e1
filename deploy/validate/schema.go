package validate

import (
	"embed"
	"encoding/json"
	"fmt"
	"strings"

	"github.com/santhosh-tekuri/jsonschema/v6"
)

//go:generate go run ./trim v1.30.14 v1.34.1

//go:embed schemas
var published embed.FS

// Versions are the versions of Kubernetes whose published schemas are in schemas/: the oldest minor one in which what
// the manifests use needs no feature gate (the sleep before a stop), and the one whose types they are decoded into.
var Versions = []string{"v1.30.14", "v1.34.1"}

// schemas checks objects against the published schemas of a version of Kubernetes.
type schemas struct {
	version string
	byKind  map[kind]*jsonschema.Schema
}

// kind is what an object says that it is.
type kind struct {
	APIVersion string `json:"apiVersion"`
	Kind       string `json:"kind"`
}

// refPrefix begins the references of an OpenAPI document to its schemas.
const refPrefix = "#/components/schemas/"

// loadSchemas compiles the schemas of a version. An object may have no other fields than those of its schema.
func loadSchemas(version string) (*schemas, error) {
	text, err := published.ReadFile("schemas/" + version + ".json")
	if err != nil {
		return nil, err
	}
	var byName map[string]any
	if err := json.Unmarshal(text, &byName); err != nil {
		return nil, fmt.Errorf("read schemas of Kubernetes %s: %w", version, err)
	}
	closeObjects(byName)
	compiler := jsonschema.NewCompiler()
	compiler.DefaultDraft(jsonschema.Draft7)
	url := "https://kubernetes.io/" + version
	document := map[string]any{"components": map[string]any{"schemas": byName}}
	if err := compiler.AddResource(url, document); err != nil {
		return nil, err
	}
	s := &schemas{version: version, byKind: map[kind]*jsonschema.Schema{}}
	for name, schema := range byName {
		for _, k := range kindsOf(schema) {
			if s.byKind[k], err = compiler.Compile(url + refPrefix + name); err != nil {
				return nil, fmt.Errorf("compile %s: %w", name, err)
			}
		}
	}
	return s, nil
}

// closeObjects has each object with named properties refuse others: the schemas say what fields there are, and let a
// misspelt one pass.
func closeObjects(part any) {
	switch x := part.(type) {
	case map[string]any:
		_, hasProperties := x["properties"].(map[string]any)
		if _, isSet := x["additionalProperties"]; hasProperties && !isSet {
			x["additionalProperties"] = false
		}
		for _, below := range x {
			closeObjects(below)
		}
	case []any:
		for _, below := range x {
			closeObjects(below)
		}
	}
}

// kindsOf are the kinds of objects that a schema describes, none where it describes a part of one.
func kindsOf(schema any) []kind {
	object, _ := schema.(map[string]any)
	listed, _ := object["x-kubernetes-group-version-kind"].([]any)
	var kinds []kind
	for _, one := range listed {
		names, _ := one.(map[string]any)
		group, _ := names["group"].(string)
		version, _ := names["version"].(string)
		name, _ := names["kind"].(string)
		kinds = append(kinds, kind{APIVersion: strings.TrimPrefix(group+"/"+version, "/"), Kind: name})
	}
	return kinds
}

// check returns how a JSON object differs from the schema of its apiVersion and kind.
func (s *schemas) check(object []byte) error {
	var k kind
	if err := json.Unmarshal(object, &k); err != nil {
		return err
	}
	schema := s.byKind[k]
	if schema == nil {
		return fmt.Errorf("no schema of %s %q in Kubernetes %s", k.APIVersion, k.Kind, s.version)
	}
	value, err := jsonschema.UnmarshalJSON(strings.NewReader(string(object)))
	if err != nil {
		return err
	}
	return schema.Validate(value)
}
