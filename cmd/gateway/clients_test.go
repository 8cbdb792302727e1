package main

import (
	"os"
	"os/exec"
	"strings"
	"testing"
)

const clientsFolder = "../../examples/clients"

// The npm packages openai and replicate work against a gateway as they are.
func TestClientsOfOpenAIAndReplicateAreUnchanged(t *testing.T) {
	node, err := exec.LookPath("node")
	if err != nil {
		t.Skip("node is missing")
	}
	if _, err := os.Stat(clientsFolder + "/node_modules/openai"); err != nil {
		t.Skip("the clients are missing: npm ci --prefix examples/clients")
	}
	const key = "0123456789abcdef0123456789abcdef"
	t.Setenv("PENSTOCK_SECRET_WEBHOOK", key)
	s := newSite(t, 8)
	f := s.startGateway(func(c *Config) { c.Gateway.WebhookKey = "env:PENSTOCK_SECRET_WEBHOOK" })
	s.startNode(16)
	s.startDeliverer(key)
	check := exec.CommandContext(t.Context(), node, "check.mjs") //nolint:gosec // found above
	check.Dir = clientsFolder
	check.Env = append(os.Environ(), "GATEWAY="+f.url, "MODEL=m", "EMBEDDER=m", "WEBHOOK=1")
	output, err := check.CombinedOutput()
	t.Logf("%s", output)
	if err != nil || strings.Contains(string(output), "not ok") {
		t.Errorf("a client does not work: %v", err)
	}
	if n := strings.Count("\n"+string(output), "\nok "); n < 15 {
		t.Errorf("%d features were checked", n)
	}
}
