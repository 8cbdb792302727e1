// Command trim writes the schemas of the Kubernetes API that the manifests are checked against, schemas/VERSION.json.
// It takes them from api/openapi-spec/v3 of the module k8s.io/kubernetes, whose content the checksum database of Go
// guards, and keeps the kinds below with everything that they refer to, without descriptions.
package main

import (
	"bytes"
	"encoding/json"
	"fmt"
	"log"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

// kinds are the kinds of the manifests by the document that describes them.
var kinds = map[string][]string{
	"api__v1": {
		"io.k8s.api.core.v1.ConfigMap", "io.k8s.api.core.v1.Namespace", "io.k8s.api.core.v1.Secret",
		"io.k8s.api.core.v1.Service", "io.k8s.api.core.v1.ServiceAccount",
	},
	"apis__apps__v1":              {"io.k8s.api.apps.v1.Deployment"},
	"apis__batch__v1":             {"io.k8s.api.batch.v1.Job"},
	"apis__networking.k8s.io__v1": {"io.k8s.api.networking.v1.NetworkPolicy"},
	"apis__policy__v1":            {"io.k8s.api.policy.v1.PodDisruptionBudget"},
	"apis__rbac.authorization.k8s.io__v1": {
		"io.k8s.api.rbac.v1.Role", "io.k8s.api.rbac.v1.RoleBinding",
	},
}

func main() {
	if len(os.Args) < 2 {
		log.Fatal("usage: trim VERSION..., such as v1.34.1")
	}
	for _, version := range os.Args[1:] {
		if err := write(version); err != nil {
			log.Fatal(err)
		}
	}
}

// write writes the schemas of a version of Kubernetes.
func write(version string) error {
	dir, err := download("k8s.io/kubernetes@" + version)
	if err != nil {
		return err
	}
	kept := map[string]any{}
	for document, names := range kinds {
		path := filepath.Join(dir, "api/openapi-spec/v3", document+"_openapi.json")
		text, err := os.ReadFile(path) //nolint:gosec // of a module
		if err != nil {
			return err
		}
		var openAPI struct {
			Components struct {
				Schemas map[string]any `json:"schemas"`
			} `json:"components"`
		}
		if err := json.Unmarshal(text, &openAPI); err != nil {
			return fmt.Errorf("read %s of %s: %w", document, version, err)
		}
		for _, name := range names {
			if err := keep(kept, openAPI.Components.Schemas, name); err != nil {
				return fmt.Errorf("%s of %s: %w", document, version, err)
			}
		}
	}
	var out bytes.Buffer
	encoder := json.NewEncoder(&out)
	encoder.SetEscapeHTML(false)
	encoder.SetIndent("", " ")
	if err := encoder.Encode(kept); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join("schemas", version+".json"), out.Bytes(), 0o600)
}

// keep adds a schema and those that it refers to.
func keep(kept, from map[string]any, name string) error {
	if kept[name] != nil {
		return nil
	}
	schema, found := from[name]
	if !found {
		return fmt.Errorf("no schema %s", name)
	}
	kept[name] = schema
	return follow(kept, from, schema)
}

// follow removes the descriptions of a part of a schema, and keeps the schemas that it refers to.
func follow(kept, from map[string]any, part any) error {
	switch x := part.(type) {
	case map[string]any:
		if _, isText := x["description"].(string); isText { // a property may have this name, too
			delete(x, "description")
		}
		if ref, isRef := x["$ref"].(string); isRef {
			return keep(kept, from, strings.TrimPrefix(ref, "#/components/schemas/"))
		}
		for _, below := range x {
			if err := follow(kept, from, below); err != nil {
				return err
			}
		}
	case []any:
		for _, below := range x {
			if err := follow(kept, from, below); err != nil {
				return err
			}
		}
	}
	return nil
}

// download returns the directory of a module in the module cache.
func download(module string) (string, error) {
	command := exec.Command("go", "mod", "download", "-json", module) //nolint:gosec,noctx // a module and a version
	command.Dir = os.TempDir()                                        // no go.mod: nothing is required
	text, err := command.Output()
	var answer struct{ Dir, Error string }
	if jsonErr := json.Unmarshal(text, &answer); jsonErr != nil || answer.Error != "" || err != nil {
		return "", fmt.Errorf("download %s: %s %w", module, answer.Error, err)
	}
	return answer.Dir, nil
}
