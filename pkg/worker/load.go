package worker

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"maps"
	"math"
	"net"
	"regexp"
	"strconv"
	"strings"
)

// parseLoad reads the load that a worker reports on a model, in any of the forms that are about: a
// JSON object, llama.cpp's list of slots, or Prometheus text. What it does not find stays nil.
func parseLoad(body []byte, model string) Health {
	trimmed := bytes.TrimSpace(body)
	switch {
	case len(trimmed) == 0:
		return Health{}
	case trimmed[0] == '{':
		return parseLoadObject(trimmed)
	case trimmed[0] == '[':
		return parseSlots(trimmed)
	default:
		return parseMetrics(trimmed, model)
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

// Metric names under which servers report their load. Calls of several replicas of a model in one
// process are added up; of their caches the fullest counts.
var (
	runningMetrics = []string{
		"vllm:num_requests_running", "sglang:num_running_reqs",
		"trtllm_num_requests_running", "llamacpp:requests_processing",
	}
	queuedMetrics = []string{
		"vllm:num_requests_waiting", "sglang:num_queue_reqs", "trtllm_num_requests_waiting",
		"llamacpp:requests_deferred", "nv_inference_pending_request_count", "tgi_queue_size",
	}
	cacheMetrics = []string{
		"vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage",
		"trtllm_kv_cache_utilization",
	}
)

// series is what the samples of one metric come to.
type series struct{ sum, most float64 }

// parseMetrics reads Prometheus text. Where samples of a metric name the model, those that name
// another one are left out.
func parseMetrics(text []byte, model string) Health {
	all, own := map[string]series{}, map[string]series{}
	lines := bufio.NewScanner(bytes.NewReader(text))
	lines.Buffer(nil, 1<<20)
	for lines.Scan() {
		name, labels, value, ok := sampleOf(lines.Text())
		if !ok || math.IsNaN(value) {
			continue
		}
		all[name] = all[name].with(value)
		if names := modelLabel.FindStringSubmatch(labels); names != nil && names[1] == model {
			own[name] = own[name].with(value)
		}
	}
	maps.Copy(all, own)
	h := Health{Active: count(all, runningMetrics), Queued: count(all, queuedMetrics)}
	for _, name := range cacheMetrics {
		if s, ok := all[name]; ok && h.KVUsage == nil {
			share := min(max(s.most, 0), 1)
			h.KVUsage = &share
		}
	}
	return h
}

func (s series) with(value float64) series { return series{s.sum + value, max(s.most, value)} }

// modelLabel is how samples name their model: vLLM, SGLang and TensorRT-LLM, then Triton.
var modelLabel = regexp.MustCompile(`(?:^|,)(?:model_name|model)="([^"]*)"`)

// sampleOf splits a line of Prometheus text into its name, its labels and its value.
func sampleOf(line string) (name, labels string, value float64, ok bool) {
	if line == "" || line[0] == '#' {
		return "", "", 0, false
	}
	name, rest, labelled := strings.Cut(line, "{")
	if labelled {
		end := strings.LastIndexByte(rest, '}')
		if end < 0 {
			return "", "", 0, false
		}
		labels, rest = rest[:end], rest[end+1:]
	} else {
		name, rest, _ = strings.Cut(line, " ")
	}
	fields := strings.Fields(rest)
	if len(fields) == 0 {
		return "", "", 0, false
	}
	value, err := strconv.ParseFloat(fields[0], 64)
	return strings.TrimSpace(name), labels, value, err == nil
}

func count(found map[string]series, names []string) *int {
	for _, name := range names {
		if s, ok := found[name]; ok && s.sum >= 0 && s.sum < figureMax {
			n := int(s.sum)
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

// figureMax bounds counts that workers report: they are stored as 32 bits.
const figureMax = 1e9

// sane drops a count that cannot be one.
func sane(n *int) *int {
	if n != nil && (*n < 0 || *n > figureMax) {
		return nil
	}
	return n
}

// withLoad adds what the model's load_path reports to a probe: below root, or at the origin where the
// load has a port of its own. A server that does not answer there is no less healthy for it.
func (w *wire) withLoad(ctx context.Context, root string, h Health) Health {
	if w.model.LoadPath == "" {
		return h
	}
	at := *w
	if w.model.LoadPort != 0 {
		base := *w.base
		base.Host, root = net.JoinHostPort(base.Hostname(), strconv.Itoa(w.model.LoadPort)), ""
		at.base = &base
	}
	status, body, err := at.askBelow(ctx, w.model.Timeouts.Control.Duration(), root, w.model.LoadPath)
	if err != nil || status/100 != 2 {
		return h
	}
	load := parseLoad(body, w.model.RemoteName)
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
