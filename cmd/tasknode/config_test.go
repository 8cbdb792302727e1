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
