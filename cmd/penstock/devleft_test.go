package main

import (
	"bytes"
	"context"
	"encoding/json"
	"os"
	"path/filepath"
	"testing"

	"github.com/penstock/penstock/pkg/scale"
	"github.com/penstock/penstock/pkg/scale/backend"
)

// Workers of a platform that was killed are ended by the next one, and those of one that lives are not.
func TestWorkersOfAKilledPlatformAreEnded(t *testing.T) {
	temp := t.TempDir()
	target := scale.BackendTarget{Name: "faces-local", Model: "faces", Target: json.RawMessage(`{"command": "sleep"}`)}
	platform := func(name string) *backend.Local {
		local, err := backend.NewLocal(backend.LocalConfig{
			Dir: filepath.Join(temp, devPrefix+name, "instances"), Commands: map[string]backend.LocalCommand{"sleep": {
				Command: []string{"sleep", "600"}, Endpoint: "http://127.0.0.1:${PORT}", Slots: 1,
			}},
		})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() {
			if err := local.StopAll(context.WithoutCancel(t.Context())); err != nil {
				t.Error(err)
			}
		})
		if err := local.Apply(t.Context(), scale.Order{BackendTarget: target, Count: 1}); err != nil {
			t.Fatal(err)
		}
		return local
	}
	killed, lives := platform("killed"), platform("lives")
	owner, err := holdDir(filepath.Join(temp, devPrefix+"lives"))
	if err != nil {
		t.Fatal(err)
	}
	if dead, err := holdDir(filepath.Join(temp, devPrefix+"killed")); err != nil {
		t.Fatal(err)
	} else {
		dead.Close() // as the end of its process does
	}
	if err := os.Mkdir(filepath.Join(temp, "other"), 0o700); err != nil {
		t.Fatal(err)
	}
	var out bytes.Buffer
	if err := endLeftovers(t.Context(), temp, &out); err != nil || out.Len() > 0 {
		t.Fatalf("%v, %s", err, &out)
	}
	for name, c := range map[string]struct {
		of   *backend.Local
		want int
	}{"killed": {killed, 0}, "lives": {lives, 1}} {
		found, err := c.of.List(t.Context(), target)
		if err != nil || len(found) != c.want {
			t.Errorf("%s has %v, %v, want %d", name, found, err, c.want)
		}
	}
	owner.Close()
	if err := endLeftovers(t.Context(), temp, &out); err != nil {
		t.Fatal(err)
	}
	if found, err := lives.List(t.Context(), target); err != nil || len(found) != 0 {
		t.Errorf("after its end the other one has %v, %v", found, err)
	}
}
