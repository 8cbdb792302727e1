package main

import (
	"net/http"
	"strings"
	"testing"

	"github.com/penstock/penstock/pkg/operator"
)

// A list of nodes that has an end would call a node that stands behind it gone.
func TestADrainAsksForItsNodeAlone(t *testing.T) {
	for state, want := range map[string]string{"": "gone, with nothing left behind", "dead": "dead: its lease lapsed"} {
		mux := http.NewServeMux()
		mux.HandleFunc("GET /v1/nodes", func(w http.ResponseWriter, r *http.Request) {
			found := listed[operator.Node]{Items: []operator.Node{{ID: 7, Name: "gpu-1", State: "live"}}}
			if r.URL.Query().Get("node") != "gpu-1" {
				found.Items = nil
			}
			writeAnswer(w, http.StatusOK, found)
		})
		mux.HandleFunc("POST /v1/nodes/7/drain", func(w http.ResponseWriter, _ *http.Request) {
			w.WriteHeader(http.StatusNoContent)
		})
		mux.HandleFunc("GET /v1/nodes/7", func(w http.ResponseWriter, _ *http.Request) {
			if state == "" {
				writeAnswer(w, http.StatusNotFound, map[string]any{"code": "not_found", "detail": "no such node"})
				return
			}
			writeAnswer(w, http.StatusOK, operator.Node{ID: 7, Name: "gpu-1", State: state})
		})
		out, errs, code := command(t, mux, "node", "drain", "gpu-1", "--wait", "--yes", "--reason", "r")
		if code != 0 || !strings.Contains(out, want) {
			t.Errorf("exit %d: %s%s, want %s", code, out, errs, want)
		}
	}
}
