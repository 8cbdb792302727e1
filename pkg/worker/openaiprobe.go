package worker

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"slices"
	"strings"
)

// Probe asks for health, and whether the server lists the model. A server without a health route, as
// Ollama, is healthy when it lists its models.
func (p *openAI) Probe(ctx context.Context) Health {
	limit := p.model.Timeouts.Probe.Duration()
	status, body, err := p.askBelow(ctx, limit, p.root(), p.model.HealthPath)
	switch {
	case err != nil:
		return probeFailed(err)
	case status/100 != 2 && status != http.StatusNotFound:
		return refusedProbe(status, body)
	}
	listing, names, err := p.askBelow(ctx, limit, p.root(), "/v1/models")
	switch {
	case status == http.StatusNotFound && err != nil:
		return probeFailed(err)
	case status == http.StatusNotFound && listing/100 != 2:
		return refusedProbe(listing, names)
	case err == nil && listing/100 == 2:
		if reason := p.missing(names); reason != "" {
			return Health{State: StateUnhealthy, Reason: Clip(reason)}
		}
	}
	return p.withLoad(ctx, p.root(), Health{State: StateReady})
}

// missing says that a list of models does not have the model; empty if it does, or if there is no list
// or nothing in it: some servers list what they have loaded so far.
func (p *openAI) missing(body []byte) string {
	var list struct {
		Data []struct {
			ID string `json:"id"`
		} `json:"data"`
	}
	if json.Unmarshal(body, &list) != nil || len(list.Data) == 0 {
		return ""
	}
	names := make([]string, len(list.Data))
	for i, m := range list.Data {
		names[i] = m.ID
	}
	// Ollama lists a model under its tag and takes calls without it.
	if slices.Contains(names, p.model.RemoteName) || slices.Contains(names, p.model.RemoteName+":latest") {
		return ""
	}
	return fmt.Sprintf("/v1/models does not list %q, which is the model's remote_name; it lists %s",
		p.model.RemoteName, strings.Join(names[:min(len(names), 8)], ", "))
}
