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
	want, err := config.Page(string(text), "gateway", &cfg)
	if err != nil {
		t.Fatal(err)
	}
	if want == string(text) {
		return
	}
	if !*update {
		t.Fatalf("%s is not what the program knows; run: go test ./cmd/gateway -run ConfigurationPage -update", page)
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

// In package gateway 0 means the default.
func TestToRememberZeroRequestsIsNone(t *testing.T) {
	s := &server{cfg: defaults()}
	s.cfg.Gateway.Remember = 0
	if err := s.cfg.validate(); err != nil || s.config().Remember >= 0 {
		t.Errorf("0 requests to remember are %d for the gateway (%v), want less than 0", s.config().Remember, err)
	}
}

func TestBadValueIsNamed(t *testing.T) {
	cfg := defaults()
	cfg.Gateway.Open, cfg.Gateway.Listen, cfg.Gateway.Lease = true, "0.0.0.0:1", 0
	cfg.Gateway.Static = []string{"m=ftp"}
	err := cfg.validate()
	for _, key := range []string{"gateway.open", "gateway.lease", "gateway.static", "gateway.insecure_listen"} {
		if err == nil || !strings.Contains(err.Error(), key) {
			t.Errorf("%v does not name %s", err, key)
		}
	}
}

func TestStaticModelsNeedNoDatabase(t *testing.T) {
	none := func(string) string { return "" }
	cfg := defaults()
	if err := cfg.check(none); err == nil || !strings.Contains(err.Error(), "database.url") {
		t.Errorf("without models and without a database: %v", err)
	}
	cfg.Gateway.Static = []string{"llama=http://gpu-1:8000#16"}
	if err := cfg.check(none); err != nil {
		t.Errorf("with a static model: %v", err)
	}
}
