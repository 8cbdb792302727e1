package validate

import (
	"encoding/json"
	"maps"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"sigs.k8s.io/kustomize/api/krusty"
	"sigs.k8s.io/kustomize/kyaml/filesys"
)

func loaded(t *testing.T, version string) *schemas {
	t.Helper()
	s, err := loadSchemas(version)
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// rendered are the objects of a kustomization as JSON, by kind and name.
func rendered(t *testing.T, dir string) map[string]string {
	t.Helper()
	made, err := krusty.MakeKustomizer(krusty.MakeDefaultOptions()).Run(filesys.MakeFsOnDisk(), dir)
	if err != nil {
		t.Fatal(err)
	}
	all := map[string]string{}
	for _, resource := range made.Resources() {
		text, err := resource.MarshalJSON()
		if err != nil {
			t.Fatal(err)
		}
		all[resource.GetKind()+" "+resource.GetName()] = string(text)
	}
	return all
}

// Each object of each kustomization is what the API of Kubernetes publishes, in the oldest version that will do and in
// a new one.
func TestManifestsFollowThePublishedSchemas(t *testing.T) {
	dirs, err := filepath.Glob(root + "/overlays/*")
	if err != nil || len(dirs) == 0 {
		t.Fatalf("no overlays: %v", err)
	}
	for _, version := range Versions {
		s := loaded(t, version)
		for _, dir := range append(dirs, root+"/base") {
			objects := rendered(t, dir)
			if len(objects) < 15 {
				t.Errorf("%s makes %d objects", dir, len(objects))
			}
			for name, object := range objects {
				if err := s.check([]byte(object)); err != nil {
					t.Errorf("%s, Kubernetes %s, %s: %v", dir, version, name, err)
				}
			}
		}
	}
}

// field is the part of an object at the end of a path; of a list it takes the first element.
func field(t *testing.T, object map[string]any, path ...string) map[string]any {
	t.Helper()
	for _, step := range path {
		below := object[step]
		if list, isList := below.([]any); isList && len(list) > 0 {
			below = list[0]
		}
		next, isObject := below.(map[string]any)
		if !isObject {
			t.Fatalf("at %s of %v is %v", step, path, below)
		}
		object = next
	}
	return object
}

// rename gives a field another name.
func rename(object map[string]any, from, to string) {
	object[to] = object[from]
	delete(object, from)
}

// A change of an object of the manifests that makes it something else than what Kubernetes knows is found, in each version.
func TestAnObjectThatDiffersFromItsSchemaIsRefused(t *testing.T) {
	objects := rendered(t, root+"/base")
	type object = map[string]any
	for _, c := range []struct {
		what, name string
		change     func(o object)
		complaint  string
	}{
		{"a misspelt field", "Deployment penstock-leader", func(o object) {
			rename(field(t, o, "spec"), "replicas", "replicaz")
		}, "additional properties 'replicaz' not allowed"},
		{"a misspelt field deep inside", "Deployment penstock-leader", func(o object) {
			rename(field(t, o, "spec", "template", "spec", "containers"), "readinessProbe", "readynessProbe")
		}, "additional properties 'readynessProbe' not allowed"},
		{"a misspelt field of metadata", "Service penstock-leader", func(o object) {
			rename(field(t, o, "metadata"), "labels", "label")
		}, "additional properties 'label' not allowed"},
		{"a missing field", "Deployment penstock-leader", func(o object) {
			delete(field(t, o, "spec"), "selector")
		}, "missing property 'selector'"},
		{"a text instead of a number", "Deployment penstock-leader", func(o object) {
			field(t, o, "spec")["replicas"] = "two"
		}, "got string, want integer"},
		{"a number instead of a text", "Job penstock-schema", func(o object) {
			field(t, o, "spec", "template", "spec")["restartPolicy"] = 1
		}, "got number, want string"},
		{"a text instead of a list", "NetworkPolicy penstock", func(o object) {
			field(t, o, "spec")["policyTypes"] = "Ingress"
		}, "got string, want array"},
		{"an apiVersion that is gone", "Deployment penstock-leader", func(o object) {
			o["apiVersion"] = "apps/v1beta1"
		}, `no schema of apps/v1beta1 "Deployment"`},
		{"the apiVersion of another group", "PodDisruptionBudget penstock-leader", func(o object) {
			o["apiVersion"] = "apps/v1"
		}, `no schema of apps/v1 "PodDisruptionBudget"`},
	} {
		t.Run(c.what, func(t *testing.T) {
			var changed object
			if err := json.Unmarshal([]byte(objects[c.name]), &changed); err != nil {
				t.Fatalf("%q of %v: %v", c.name, slices.Sorted(maps.Keys(objects)), err)
			}
			c.change(changed)
			text, err := json.Marshal(changed)
			if err != nil {
				t.Fatal(err)
			}
			for _, version := range Versions {
				if err := loaded(t, version).check(text); err == nil || !strings.Contains(err.Error(), c.complaint) {
					t.Errorf("Kubernetes %s says %v, want %q", version, err, c.complaint)
				}
			}
		})
	}
}
