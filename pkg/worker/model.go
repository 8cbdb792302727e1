package worker

import (
	"bytes"
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"strings"
	"time"

	"github.com/penstock/penstock/internal/duration"
)

// Protocol of a model's workers.
type Protocol string

// The worker protocols.
const (
	ProtocolGeneric Protocol = "dispatcher" // generic HTTP worker, sync or polled; the project's own
	ProtocolCog     Protocol = "cog"        // Cog HTTP API
	ProtocolOIP     Protocol = "oip"        // Open Inference Protocol (KServe v2)
	ProtocolOpenAI  Protocol = "openai"     // OpenAI-compatible servers
)

// Model says how the instances of a model are to be spoken to. It is stored as
// JSON; a field that is absent takes its default, so that deleting an override
// brings the default back.
type Model struct {
	Name     string   `json:"name"`
	Protocol Protocol `json:"protocol"`

	// Type is "sync" (the answer comes on the submitting connection) or "async".
	Type string `json:"model_type,omitempty"`

	// RemoteName and Version name the model at its server, for protocols that
	// serve several. RemoteName defaults to Name.
	RemoteName string `json:"remote_name,omitempty"`
	Version    string `json:"version,omitempty"`

	// RemoteNames are the other names of models at an OpenAI-compatible server that a payload may
	// choose, as those of adapters; "*" allows any.
	RemoteNames []string `json:"remote_names,omitempty"`

	// Operation is the call of the server where the payload names none: of OpenAI-compatible
	// servers chat, completions, embeddings, images, responses, rerank, score, pooling or classify;
	// by the Open Inference Protocol infer or generate. Stream asks for server-sent events.
	Operation string `json:"operation,omitempty"`
	Stream    bool   `json:"stream,omitempty"`

	// Paths at the instance; {id} is replaced by the remote id. LoadPort is for
	// servers that report load on another port, as Triton does on 8002.
	PollPath   string `json:"poll_endpoint_template,omitempty"`
	CancelPath string `json:"cancel_endpoint_template,omitempty"`
	HealthPath string `json:"health_path,omitempty"`
	LoadPath   string `json:"load_path,omitempty"`
	LoadPort   int    `json:"load_port,omitempty"`

	// IDField is the field of an accepting answer that holds the remote id;
	// dots descend into objects. Statuses are matched without regard to case.
	IDField  string   `json:"id_field,omitempty"`
	Statuses Statuses `json:"statuses,omitzero"`

	PollInterval Seconds  `json:"poll_interval,omitempty"`
	MaxPollTime  Seconds  `json:"max_poll_time,omitempty"` // run time limit of accepted runs
	MaxRetries   *int     `json:"max_retries,omitempty"`   // attempts after the first; read by the queue
	Timeouts     Timeouts `json:"timeouts,omitzero"`

	// Body is a JSON template of the request body; nil passes the payload on.
	// See expand for its placeholders.
	Body json.RawMessage `json:"body,omitempty"`

	// Headers are sent with every request. A value may hold references to
	// secrets: env:NAME or file:/path as the whole value, ${env:NAME} within.
	Headers map[string]string `json:"headers,omitempty"`

	Batch            BatchLimits `json:"batch,omitzero"`
	MaxResponseBytes int64       `json:"max_response_bytes,omitempty"`

	// ChoicesMax bounds the sequences of a generation, which are n or best_of for each of its prompts: the server
	// computes them beside each other, and their call holds one slot. 0: any.
	ChoicesMax int `json:"choices_max,omitempty"`

	// KeepOutput keeps the streamed output of runs as long as their results. Otherwise it is
	// deleted about an hour after the run: the result holds all of it.
	KeepOutput bool `json:"keep_output,omitempty"`

	// OnUnknown is the policy for calls of which it is unknown whether they ran: "at_least_once"
	// runs it again, "at_most_once" ends the entry as failed with class unknown, "reattach" asks
	// the same instance again, under the same entry id, and is for workers that know it by that.
	OnUnknown string `json:"on_unknown,omitempty"`

	// AffinityField is a field of the payload, by dotted path, that names what a worker loads for
	// an entry: an adapter, a variant. Entries go by preference to the instance that ran the same
	// last. "$flow" means the flow of the entry: then nodes go on with the flow that they have
	// loaded. AffinityWait bounds how long an entry waits for that, or is waited for.
	AffinityField string  `json:"affinity_field,omitempty"`
	AffinityWait  Seconds `json:"affinity_wait,omitempty"`

	// LabelsField is a field of the payload, by dotted path, that holds labels: {"gpu": "h100"}. The
	// entry goes only to instances that have them all.
	LabelsField string `json:"labels_field,omitempty"`

	// AbortStops overrides whether closing the connection of a call is known to stop it. Nil: the operation of a call
	// decides, true for cog and openai, except for images, whose servers go on; false for dispatcher and oip. It never
	// is of an asynchronous call.
	AbortStops *bool `json:"abort_stops,omitempty"`
}

// Statuses are the words in which a worker reports a run. Any other word means
// that it is running.
type Statuses struct {
	Success   []string `json:"success,omitempty"`
	Failed    []string `json:"failed,omitempty"`
	Cancelled []string `json:"cancelled,omitempty"`
	Starting  []string `json:"starting,omitempty"` // accepted, not begun: not charged
}

// Timeouts of one call. Run is for answers on the submitting connection;
// accepted runs are limited by MaxPollTime.
type Timeouts struct {
	Connect    Seconds `json:"connect,omitempty"`
	Run        Seconds `json:"run,omitempty"`
	NoProgress Seconds `json:"no_progress,omitempty"` // 0: no such limit
	Start      Seconds `json:"start,omitempty"`       // longest cold start of an accepted run
	Silence    Seconds `json:"silence,omitempty"`     // longest time without an answered poll
	Control    Seconds `json:"control,omitempty"`     // one poll or cancel
	Probe      Seconds `json:"probe,omitempty"`       // one health check
}

// The types of a model.
const (
	TypeSync  = "sync"
	TypeAsync = "async"
)

// AffinityFlow as affinity field is the flow of an entry.
const AffinityFlow = "$flow"

// What follows an unknown outcome.
const (
	AtLeastOnce = "at_least_once"
	AtMostOnce  = "at_most_once"
	Reattach    = "reattach"
)

// WithDefaults sets the default of each field that the model leaves empty. All defaults are here.
func (m Model) WithDefaults() Model {
	m.Type = cmp.Or(m.Type, TypeSync)
	m.OnUnknown = cmp.Or(m.OnUnknown, AtLeastOnce)
	m.RemoteName = cmp.Or(m.RemoteName, m.Name)
	m.IDField = cmp.Or(m.IDField, "job_id")
	m.PollInterval = cmp.Or(m.PollInterval, Seconds(2*time.Second))
	m.MaxPollTime = cmp.Or(m.MaxPollTime, Seconds(600*time.Second))
	m.MaxResponseBytes = cmp.Or(m.MaxResponseBytes, 32<<20)
	m.Timeouts.Connect = cmp.Or(m.Timeouts.Connect, Seconds(5*time.Second))
	m.Timeouts.Run = cmp.Or(m.Timeouts.Run, Seconds(600*time.Second))
	m.Timeouts.Start = cmp.Or(m.Timeouts.Start, Seconds(30*time.Minute))
	m.Timeouts.Silence = cmp.Or(m.Timeouts.Silence, Seconds(time.Minute))
	m.Timeouts.Control = cmp.Or(m.Timeouts.Control, Seconds(10*time.Second))
	m.Timeouts.Probe = cmp.Or(m.Timeouts.Probe, Seconds(25*time.Second)) // SGLang's health check may take 20 s
	setDefaultList(&m.Statuses.Success, "success", "succeeded", "completed", "done")
	setDefaultList(&m.Statuses.Failed, "failed", "error")
	setDefaultList(&m.Statuses.Cancelled, "cancelled", "canceled")
	setDefaultList(&m.Statuses.Starting, "starting", "queued", "pending", "loading")
	switch m.Protocol {
	case ProtocolGeneric:
		m.HealthPath = cmp.Or(m.HealthPath, "/health")
	case ProtocolCog:
		m.HealthPath = cmp.Or(m.HealthPath, "/health-check")
	case ProtocolOpenAI:
		m.HealthPath = cmp.Or(m.HealthPath, "/health")
		m.Operation = cmp.Or(m.Operation, OperationChat)
	case ProtocolOIP:
		m.Operation = cmp.Or(m.Operation, OperationInfer)
	}
	if m.MaxRetries == nil {
		retries := 50
		m.MaxRetries = &retries
	}
	m.Batch = m.Batch.WithDefaults()
	return m
}

// With lays an override, a JSON object with some of the model's fields, over
// the model. Unknown fields are errors.
func (m Model) With(override json.RawMessage) (Model, error) {
	m.Headers = maps.Clone(m.Headers)
	if len(bytes.TrimSpace(override)) == 0 {
		return m, nil
	}
	decoder := json.NewDecoder(bytes.NewReader(override))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&m); err != nil {
		return Model{}, fmt.Errorf("settings of model %q: %w", m.Name, unprefixed(err))
	}
	return m, nil
}

// unprefixed is an error of encoding/json without the name of that package.
func unprefixed(err error) error {
	return errors.New(strings.TrimPrefix(err.Error(), "json: "))
}

// ReadModel makes a model of its stored config and override, with defaults, and checks it.
func ReadModel(name string, config, override []byte) (Model, error) {
	m, err := Model{Name: name}.With(config)
	if err != nil {
		return Model{}, err
	}
	if m, err = m.With(override); err != nil {
		return Model{}, err
	}
	m.Name = name
	m = m.WithDefaults()
	if err := m.Validate(); err != nil {
		return Model{}, fmt.Errorf("check model %q: %w", name, err)
	}
	return m, nil
}

// EffectiveConfig is ReadModel for callers that pass the result on as JSON.
func EffectiveConfig(name string, config, override []byte) ([]byte, error) {
	m, err := ReadModel(name, config, override)
	if err != nil {
		return nil, err
	}
	return json.Marshal(m)
}

// FieldError names the invalid field and its valid values.
type FieldError struct{ Field, Problem string }

func (e *FieldError) Error() string { return e.Field + " " + e.Problem }

func fieldError(field, format string, args ...any) error {
	return &FieldError{Field: field, Problem: fmt.Sprintf(format, args...)}
}

// Validate checks a model that has its defaults. The error is a *FieldError.
func (m Model) Validate() error {
	if m.Name == "" {
		return fieldError("name", "is missing")
	}
	for _, check := range []func(Model) error{checkProtocol, checkPaths, checkTimes, checkHeaders} {
		if err := check(m); err != nil {
			return err
		}
	}
	if m.Body != nil {
		if err := checkTemplate(m.Body); err != nil {
			return err
		}
	}
	if m.Batch.Items > 1 {
		switch {
		case m.Type == TypeAsync || m.OnUnknown == Reattach:
			return fieldError("batch.items",
				"is for sync models that do not reattach: a run of several entries has no id to be found by")
		case m.Protocol == ProtocolCog || (m.Protocol == ProtocolOpenAI && m.Operation != OperationEmbeddings) ||
			m.Operation == OperationGenerate:
			return fieldError("batch.items", "is for protocols dispatcher and oip (infer), and for embeddings")
		}
	}
	if m.AffinityWait < 0 {
		return fieldError("affinity_wait", "must not be negative")
	}
	return m.Batch.validate()
}

func checkProtocol(m Model) error {
	switch m.Protocol {
	case ProtocolGeneric, ProtocolCog:
	case ProtocolOIP, ProtocolOpenAI:
		if m.Type == TypeAsync {
			return fieldError("model_type", "must be sync: protocol %s has no asynchronous calls", m.Protocol)
		}
	default:
		return fieldError("protocol", "must be dispatcher, cog, oip or openai, not %q", m.Protocol)
	}
	if m.Type != TypeSync && m.Type != TypeAsync {
		return fieldError("model_type", "must be sync or async, not %q", m.Type)
	}
	if m.OnUnknown != AtLeastOnce && m.OnUnknown != AtMostOnce && m.OnUnknown != Reattach {
		return fieldError("on_unknown", "must be at_least_once, at_most_once or reattach, not %q", m.OnUnknown)
	}
	if generates := m.Protocol == ProtocolOIP && m.Operation == OperationGenerate; m.Stream && !generates &&
		m.Protocol != ProtocolOpenAI {
		return fieldError("stream", "is for protocol openai, and for protocol oip with operation generate")
	}
	if m.Protocol == ProtocolOpenAI && operationPaths[m.Operation] == "" {
		return fieldError("operation", "must be %s, not %q", operationList, m.Operation)
	}
	if m.Protocol == ProtocolOIP && m.Operation != OperationInfer && m.Operation != OperationGenerate {
		return fieldError("operation", "must be infer or generate, not %q", m.Operation)
	}
	return nil
}

func checkPaths(m Model) error {
	for _, p := range []struct{ field, path string }{
		{"poll_endpoint_template", m.PollPath},
		{"cancel_endpoint_template", m.CancelPath},
	} {
		if p.path == "" {
			continue
		}
		if !strings.HasPrefix(p.path, "/") || strings.HasPrefix(p.path, "//") {
			return fieldError(p.field, "must be a path that begins with one /")
		}
		if strings.Count(p.path, "{id}") != 1 {
			return fieldError(p.field, "must contain {id} once")
		}
	}
	for _, p := range []struct{ field, path string }{{"health_path", m.HealthPath}, {"load_path", m.LoadPath}} {
		if p.path != "" && (!strings.HasPrefix(p.path, "/") || strings.HasPrefix(p.path, "//")) {
			return fieldError(p.field, "must be a path that begins with one /")
		}
	}
	if m.LoadPort < 0 || m.LoadPort > 65535 {
		return fieldError("load_port", "must be a port number")
	}
	if m.Protocol == ProtocolGeneric && m.Type == TypeAsync && m.PollPath == "" {
		return fieldError("poll_endpoint_template", "is needed by an async model, for example /status/{id}")
	}
	return nil
}

func checkTimes(m Model) error {
	for _, t := range []struct {
		field string
		value Seconds
	}{
		{"poll_interval", m.PollInterval},
		{"max_poll_time", m.MaxPollTime},
		{"timeouts.connect", m.Timeouts.Connect},
		{"timeouts.run", m.Timeouts.Run},
		{"timeouts.start", m.Timeouts.Start},
		{"timeouts.silence", m.Timeouts.Silence},
		{"timeouts.control", m.Timeouts.Control},
		{"timeouts.probe", m.Timeouts.Probe},
	} {
		if t.value <= 0 {
			return fieldError(t.field, "must be a positive number of seconds")
		}
	}
	switch {
	case m.Timeouts.NoProgress < 0:
		return fieldError("timeouts.no_progress", "must not be negative")
	case m.MaxRetries != nil && *m.MaxRetries < 0:
		return fieldError("max_retries", "must not be negative")
	case m.ChoicesMax < 0:
		return fieldError("choices_max", "must not be negative")
	case m.MaxResponseBytes <= 0:
		return fieldError("max_response_bytes", "must be positive")
	}
	return nil
}

// CloseEndsRun says whether closing the connection of a call of the model's operation ends its run. That of an
// asynchronous call is closed anyhow, and its run goes on.
func (m Model) CloseEndsRun() bool {
	return m.Type != TypeAsync && *m.calledFor(m.Operation).AbortStops
}

// StopsOnClose says whether closing the connection of a call ends its run, as Submit has it.
func (m Model) StopsOnClose(call Call) bool {
	if m.AbortStops == nil && m.Protocol == ProtocolOpenAI { // else its body would be read for nothing
		m = m.calledFor(m.operationOf(call, m.fields(call)))
	}
	return m.CloseEndsRun()
}

// fields are those of the body of a call, none where that is refused.
func (m Model) fields(call Call) (fields map[string]json.RawMessage) {
	if body, err := m.body(call, call.FinishBy); err == nil {
		_ = json.Unmarshal(body, &fields)
	}
	return fields
}

// stopsOnClose says whether servers of a protocol are known to end a run of an operation when its connection closes.
func stopsOnClose(p Protocol, operation string) bool {
	return p == ProtocolCog || p == ProtocolOpenAI && operation != OperationImages
}

// calledFor is the model for a call of an operation, which may be another than its own. It has AbortStops.
func (m Model) calledFor(operation string) Model {
	if m.AbortStops == nil {
		m.AbortStops = new(stopsOnClose(m.Protocol, operation))
	}
	return m
}

func setDefaultList(field *[]string, values ...string) {
	if len(*field) == 0 {
		*field = values
	}
}

// Seconds is a duration that JSON writes as a number of seconds. It reads
// numbers and Go durations ("90s", "10m").
type Seconds = duration.Seconds
