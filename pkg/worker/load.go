package worker

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"net"
	"net/http"
	"strconv"
	"strings"
)

// parseLoad reads the load that a worker reports, in any of the forms that are
// about: a JSON object, llama.cpp's list of slots, or Prometheus text. What it
// does not find stays nil.
func parseLoad(body []byte) Health {
	trimmed := bytes.TrimSpace(body)
	switch {
	case len(trimmed) == 0:
		return Health{}
	case trimmed[0] == '{':
		return parseLoadObject(trimmed)
	case trimmed[0] == '[':
		return parseSlots(trimmed)
	default:
		return parseMetrics(trimmed)
	}
}

func parseLoadObject(body []byte) Health {
	var o struct {
		ActiveJobs    *int `json:"active_jobs"`
		MaxConcurrent *int `json:"max_concurrent"`
		MaxJobs       *int `json:"max_jobs"` // the project's own worker
		Capacity      *int `json:"capacity"`
		Queued        *int `json:"queued"`
		ServerLoad    *int `json:"server_load"` // vLLM /load
		Concurrency   struct {
			Max     *int `json:"max"` // cog-runtime
			Current *int `json:"current"`
		} `json:"concurrency"`
	}
	if json.Unmarshal(body, &o) != nil {
		return Health{}
	}
	return Health{
		Active:   sane(firstInt(o.ActiveJobs, o.ServerLoad, o.Concurrency.Current)),
		Capacity: sane(firstInt(o.MaxConcurrent, o.MaxJobs, o.Capacity, o.Concurrency.Max)),
		Queued:   sane(o.Queued),
	}
}

// parseSlots reads llama.cpp's GET /slots.
func parseSlots(body []byte) Health {
	var slots []struct {
		Processing bool `json:"is_processing"`
	}
	if json.Unmarshal(body, &slots) != nil {
		return Health{}
	}
	active, capacity := 0, len(slots)
	for _, s := range slots {
		if s.Processing {
			active++
		}
	}
	return Health{Active: &active, Capacity: &capacity}
}

// Metric names under which servers report their load. Those of several
// replicas or models in one process are added up.
var (
	runningMetrics = []string{
		"vllm:num_requests_running", "sglang:num_running_reqs",
		"trtllm_num_requests_running", "llamacpp:requests_processing",
	}
	queuedMetrics = []string{
		"vllm:num_requests_waiting", "sglang:num_queue_reqs", "trtllm_num_requests_waiting",
		"llamacpp:requests_deferred", "nv_inference_pending_request_count",
	}
	cacheMetrics = []string{
		"vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage",
		"trtllm_kv_cache_utilization",
	}
)

func parseMetrics(text []byte) Health {
	sums := map[string]float64{}
	lines := bufio.NewScanner(bytes.NewReader(text))
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		if name, value, ok := sampleOf(lines.Text()); ok {
			sums[name] += value
		}
	}
	h := Health{Active: count(sums, runningMetrics), Queued: count(sums, queuedMetrics)}
	for _, name := range cacheMetrics {
		if value, ok := sums[name]; ok && h.KVUsage == nil {
			h.KVUsage = &value
		}
	}
	return h
}

// sampleOf splits a line of Prometheus text into its name, without labels, and
// its value.
func sampleOf(line string) (string, float64, bool) {
	if line == "" || line[0] == '#' {
		return "", 0, false
	}
	name, rest, labelled := strings.Cut(line, "{")
	if labelled {
		end := strings.LastIndexByte(rest, '}')
		if end < 0 {
			return "", 0, false
		}
		rest = rest[end+1:]
	} else {
		name, rest, _ = strings.Cut(line, " ")
	}
	fields := strings.Fields(rest)
	if len(fields) == 0 {
		return "", 0, false
	}
	value, err := strconv.ParseFloat(fields[0], 64)
	return strings.TrimSpace(name), value, err == nil
}

func count(sums map[string]float64, names []string) *int {
	for _, name := range names {
		if value, ok := sums[name]; ok && value >= 0 && value < 1e9 {
			n := int(value)
			return &n
		}
	}
	return nil
}

func firstInt(values ...*int) *int {
	for _, v := range values {
		if v != nil {
			return v
		}
	}
	return nil
}

func sane(n *int) *int {
	if n != nil && *n < 0 {
		return nil
	}
	return n
}

// withLoad adds what the model's load_path reports to a probe. A server that
// does not answer there is no less healthy for it.
func (w *wire) withLoad(ctx context.Context, h Health) Health {
	if w.model.LoadPath == "" {
		return h
	}
	at := *w.base
	if w.model.LoadPort != 0 {
		at.Host = net.JoinHostPort(at.Hostname(), strconv.Itoa(w.model.LoadPort))
	}
	status, _, body, err := w.ask(ctx, w.model.Timeouts.Control.Duration(), request{
		method: http.MethodGet, url: at.Scheme + "://" + at.Host + w.model.LoadPath, accept: "application/json, text/plain;q=0.9, */*;q=0.1",
	})
	if err != nil || status/100 != 2 {
		return h
	}
	load := parseLoad(body)
	h.Active, h.Capacity = firstInt(load.Active, h.Active), firstInt(load.Capacity, h.Capacity)
	h.Queued = firstInt(load.Queued, h.Queued)
	if load.KVUsage != nil {
		h.KVUsage = load.KVUsage
	}
	if h.State == StateReady && h.Active != nil && h.Capacity != nil && *h.Active >= *h.Capacity {
		h.State = StateBusy
	}
	return h
}
