package main

import (
	"flag"
	"os"
	"strings"
	"testing"

	"github.com/penstock/penstock/internal/config"
	"github.com/penstock/penstock/pkg/worker"
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

// In package tasknode 0 means the default.
func TestAGraceOfZeroIsNone(t *testing.T) {
	cfg := defaults()
	cfg.TaskNode.Grace = 0
	if err := cfg.validate(); err != nil || cfg.TaskNode.grace() >= 0 {
		t.Errorf("a grace of 0 is %s for the node (%v), want less than 0", cfg.TaskNode.grace(), err)
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
	with := func(a config.Addresses) error {
		_, err := Webhook{Addresses: a}.config(worker.SecretStore{})
		return err
	}
	if err := with(config.Addresses{Ports: []string{"https"}}); err == nil || !strings.Contains(err.Error(), "tasknode.webhook.ports") {
		t.Errorf("%v does not name ports", err)
	}
	if err := with(config.Addresses{AllowNetworks: []string{"10.1"}}); err == nil || !strings.Contains(err.Error(), "allow_networks") {
		t.Errorf("%v does not name allow_networks", err)
	}
}

func TestReportsOfWorkersAreNotTakenInPlainTextFromTheNetwork(t *testing.T) {
	cfg := defaults()
	cfg.TaskNode.Listen = "0.0.0.0:8421"
	if err := cfg.validate(); err != nil {
		t.Errorf("a listener for probes and metrics alone: %v", err)
	}
	cfg.TaskNode.Inference.CallbackURL = "http://node:8421"
	if err := cfg.validate(); err == nil || !strings.Contains(err.Error(), "tasknode.insecure_listen") {
		t.Errorf("with reports: %v", err)
	}
	for _, change := range []func(*TaskNode){
		func(c *TaskNode) { c.Insecure = true },
		func(c *TaskNode) { c.TLS = config.TLS{Cert: "c", Key: "k"} },
		func(c *TaskNode) { c.Listen = "127.0.0.1:8421" },
	} {
		changed := cfg
		change(&changed.TaskNode)
		if err := changed.validate(); err != nil {
			t.Error(err)
		}
	}
}

// However many receivers are slow, most threads are left for other queues.
func TestCallbacksHaveAQuarterOfTheThreads(t *testing.T) {
	for _, c := range []struct{ option, all, want int }{{0, 32, 8}, {0, 4, 2}, {0, 1, 2}, {5, 32, 5}} {
		if got := (Webhook{Threads: c.option}).threads(c.all); got != c.want {
			t.Errorf("webhook.threads %d of %d: %d, want %d", c.option, c.all, got, c.want)
		}
	}
	b := newBudget(3)
	b.add("webhook")
	if n, _ := b.Take("work", 7); n != 7 {
		t.Errorf("another queue gets %d of 7", n)
	}
	n, release := b.Take("webhook", 5)
	more, _ := b.Take("webhook", 1)
	if n != 3 || more != 0 {
		t.Errorf("%d and %d are allowed, want 3 and none", n, more)
	}
	release(2)
	if n, _ := b.Take("webhook", 5); n != 2 {
		t.Errorf("%d are allowed after two came back", n)
	}
}

func TestNeedsAreReadAndBadOnesNamed(t *testing.T) {
	needs, err := TaskNode{Needs: []string{"thumbs=0.5/256"}}.needs()
	if n := needs["thumbs"]; err != nil || n.CPU != 0.5 || n.MemoryBytes != 256<<20 {
		t.Errorf("needs are %+v (%v)", needs, err)
	}
	for _, bad := range []string{"thumbs", "=1/1", "thumbs=1", "thumbs=-1/5", "thumbs=x/5", "thumbs=NaN/256", "thumbs=1/NaN", "thumbs=2000000/1", "thumbs=1/1e14"} {
		if _, err := (TaskNode{Needs: []string{bad}}).needs(); err == nil || !strings.Contains(err.Error(), "tasknode.needs") {
			t.Errorf("needs %q: %v", bad, err)
		}
	}
}

// One address that may connect takes no more than half of the listener to which workers report.
func TestOneAddressHasHalfOfTheConnections(t *testing.T) {
	cfg := defaults()
	if cfg.TaskNode.PerAddress != cfg.TaskNode.ConnsMax/2 {
		t.Errorf("one address has %d of %d connections, want half", cfg.TaskNode.PerAddress, cfg.TaskNode.ConnsMax)
	}
	cfg.TaskNode.PerAddress = 0
	if err := cfg.validate(); err == nil || !strings.Contains(err.Error(), "tasknode.connections_per_address_max") {
		t.Errorf("0 connections: %v", err)
	}
}
