package main

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
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
	s.token("client", "{}", "{}")
	s.token("limited", "{}", "{}")
	s.exec(`SELECT penstock.set_gateway_token('limited', rate => 2, reason => 'test')`)
	f := s.startGateway(func(c *Config) {
		c.Gateway.Open, c.Gateway.WebhookKey = false, "env:PENSTOCK_SECRET_WEBHOOK"
	})
	s.startNode(16)
	s.startDeliverer(key)
	check := exec.CommandContext(t.Context(), node, "check.mjs") //nolint:gosec // found above
	check.Dir = clientsFolder
	check.Env = append(os.Environ(), "GATEWAY="+f.url, "TOKEN=client", "MODEL=m", "EMBEDDER=m", "WEBHOOK=1",
		"LIMITED=limited", "LENGTHS=1")
	output, err := check.CombinedOutput()
	t.Logf("%s", output)
	if err != nil || strings.Contains(string(output), "not ok") {
		t.Errorf("a client does not work: %v", err)
	}
	if n := strings.Count("\n"+string(output), "\nok "); n < 22 {
		t.Errorf("%d features were checked", n)
	}
}

// media answers operations of the OpenAI protocol other than chat, as far as clients look at the answer. It is false for
// others.
func media(w http.ResponseWriter, r *http.Request, body []byte) bool {
	_, operation, _ := strings.Cut(r.URL.Path, "/v1/")
	kind, answer := "application/json", ""
	switch operation {
	case "responses":
		answer = `{"id":"r","object":"response","output":[{"type":"message","role":"assistant",` +
			`"content":[{"type":"output_text","text":"x","annotations":[]}]}]}`
	case "images/generations":
		answer = `{"created":1,"data":[{"b64_json":"AA=="}]}`
	case "audio/speech":
		kind, answer = "audio/mpeg", "\x00\xff"
	case "audio/transcriptions":
		r.Body = io.NopCloser(bytes.NewReader(body))
		_, file, err := r.FormFile("file")
		if err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return true
		}
		answer = fmt.Sprintf(`{"text":"%d bytes of %s"}`, file.Size, file.Filename)
	default:
		return false
	}
	w.Header().Set("Content-Type", kind)
	_, _ = io.WriteString(w, answer)
	return true
}
