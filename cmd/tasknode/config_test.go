package main

import (
	"flag"
	"os"
	"strings"
	"testing"

	"github.com/penstock/penstock/internal/config"
)

var update = flag.Bool("update", false, "write this program's table in docs/configuration.md")

const page = "../../docs/configuration.md"

func TestConfigurationPageListsEveryOption(t *testing.T) {
	text, err := os.ReadFile(page)
	if err != nil {
		t.Fatal(err)
	}
	cfg := defaults()
	want, err := config.Page(string(text), "tasknode", &cfg)
	if err != nil {
		t.Fatal(err)
	}
	if want == string(text) {
		return
	}
	if !*update {
		t.Fatalf("%s is not what the program knows; run: go test ./cmd/tasknode -run ConfigurationPage -update", page)
	}
	if err := os.WriteFile(page, []byte(want), 0o600); err != nil {
		t.Fatal(err)
	}
}

func TestDefaultsAreValid(t *testing.T) {
	if err := defaults().validate(); err != nil {
		t.Error(err)
	}
}

func TestBadValueIsNamed(t *testing.T) {
	cfg := defaults()
	cfg.TaskNode.Lease = cfg.TaskNode.Beat
	cfg.TaskNode.Application = ""
	err := cfg.validate()
	for _, key := range []string{"tasknode.lease", "tasknode.application"} {
		if err == nil || !strings.Contains(err.Error(), key) {
			t.Errorf("%v does not name %s", err, key)
		}
	}
	if _, err := (Webhook{AllowNetworks: []string{"10.1"}}).policy(); err == nil || !strings.Contains(err.Error(), "allow_networks") {
		t.Errorf("%v does not name allow_networks", err)
	}
}

func TestNeedsAreReadAndBadOnesNamed(t *testing.T) {
	needs, err := TaskNode{Needs: []string{"thumbs=0.5/256"}}.needs()
	if n := needs["thumbs"]; err != nil || n.CPU != 0.5 || n.MemoryBytes != 256<<20 {
		t.Errorf("needs are %+v (%v)", needs, err)
	}
	for _, bad := range []string{"thumbs", "=1/1", "thumbs=1", "thumbs=-1/5", "thumbs=x/5"} {
		if _, err := (TaskNode{Needs: []string{bad}}).needs(); err == nil || !strings.Contains(err.Error(), "tasknode.needs") {
			t.Errorf("needs %q: %v", bad, err)
		}
	}
}
