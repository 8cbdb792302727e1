package e2e_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"github.com/penstock/penstock/internal/machine"
	"github.com/penstock/penstock/internal/pgtest"
)

// serveAsVLLM serves one model by its own name alone, as vLLM does.
func serveAsVLLM(t *testing.T, model string) (address string) {
	t.Helper()
	mux := http.NewServeMux()
	mux.HandleFunc("GET /health", func(http.ResponseWriter, *http.Request) {})
	mux.HandleFunc("GET /v1/models", func(w http.ResponseWriter, _ *http.Request) {
		_, _ = fmt.Fprintf(w, `{"object":"list","data":[{"id":%q,"object":"model","owned_by":"vllm"}]}`, model)
	})
	mux.HandleFunc("POST /v1/chat/completions", func(w http.ResponseWriter, r *http.Request) {
		var ask struct{ Model string }
		if err := json.NewDecoder(r.Body).Decode(&ask); err != nil || ask.Model != model {
			http.Error(w, fmt.Sprintf(`{"error":{"message":"The model %q does not exist.","code":404}}`, ask.Model), http.StatusNotFound)
			return
		}
		w.Header().Set("Content-Type", "text/event-stream")
		for _, word := range []string{"How", " can", " I", " help?"} {
			_, _ = fmt.Fprintf(w, "data: {\"choices\":[{\"index\":0,\"delta\":{\"content\":%q},\"finish_reason\":null}]}\n\n", word)
			_ = http.NewResponseController(w).Flush()
		}
		_, _ = fmt.Fprint(w, "data: [DONE]\n\n")
	})
	server := httptest.NewServer(mux)
	t.Cleanup(server.Close)
	return server.URL
}

func TestTheFirstStepsOfTheGatewayDoWhatTheirPageSays(t *testing.T) {
	t.Parallel()
	page, err := os.ReadFile("../docs/gateway.md")
	if err != nil {
		t.Fatal(err)
	}
	programs, err := binaries()
	if err != nil {
		t.Fatal(err)
	}
	steps, _, found := strings.Cut(string(page), "## What clients see")
	blocks := shellBlock.FindAllStringSubmatch(steps, -1)
	if !found || len(blocks) != 2 {
		t.Fatalf("docs/gateway.md has %d blocks of commands before its part about clients, want 2", len(blocks))
	}
	script := "set -eu\ntrap 'kill $(jobs -p) 2>/dev/null || true' EXIT\n" + blocks[0][1] + blocks[1][1]
	listen, debug := fmt.Sprintf("127.0.0.1:%d", machine.FreePort(t)), fmt.Sprintf("127.0.0.1:%d", machine.FreePort(t))
	script = strings.ReplaceAll(script, "127.0.0.1:8430", listen)
	script = strings.ReplaceAll(script, "penstock gateway status", "penstock gateway status --gateway http://"+debug)

	const model = "meta-llama/Llama-3.1-8B-Instruct"
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Minute)
	defer cancel()
	run := exec.CommandContext(ctx, "bash", "-c", script)
	run.WaitDelay = 10 * time.Second
	run.Env = []string{
		"PATH=" + programs + ":" + os.Getenv("PATH"), "HOME=" + t.TempDir(), "PENSTOCK_DATABASE_URL=" + pgtest.Empty(t),
		"PENSTOCK_GATEWAY_LISTEN=" + listen, "PENSTOCK_GATEWAY_DEBUG_LISTEN=" + debug,
		"VLLM=" + serveAsVLLM(t, model), "MODEL=" + model,
	}
	out, err := run.CombinedOutput()
	if err != nil {
		t.Fatalf("%v\n%s", err, out)
	}
	if n := strings.Count(string(out), "data: [DONE]"); n != 2 {
		t.Errorf("%d streams came to their end, want one without a database and one with", n)
	}
	if _, status, found := strings.Cut(string(out), "MODEL"); !found || !strings.Contains(status, "llama") {
		t.Error("the pool is not listed")
	}
	t.Logf("they printed:\n%s", out)
}
