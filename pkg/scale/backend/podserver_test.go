package backend

import (
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/scale"
)

// podServer is the part of an API server that lists and watches pods, without a network: a connection is a pipe, so
// that it runs under synctest. It keeps every event, and sends a watch those after its version.
type podServer struct {
	mu      sync.Mutex
	version int
	pods    map[string]map[string]any
	history []change
	least   int // versions before it are forgotten
	open    []*stream
	watched []url.Values // queries of watches
	lists   int
	scaled  int // replicas

	twice   bool     // each event is sent twice
	stalled bool     // nothing is sent and no watch ends
	refuse  []answer // to the next watches
	busy    answer   // to all other requests; the zero value: they are answered
	asked   int      // other requests
}

type change struct {
	version int
	line    string
}

type answer struct {
	status int
	after  string // Retry-After
}

func (a answer) reply() *http.Response {
	refusal := reply(a.status, `{"message": "told to"}`)
	refusal.Header.Set("Retry-After", a.after)
	return refusal
}

// stream is a watch that was asked for. Its lines are written by a goroutine of its own.
type stream struct {
	lines chan string // closed: the server ends it
	pipe  *io.PipeWriter
}

func newPodServer() *podServer {
	return &podServer{version: 100, pods: map[string]map[string]any{}}
}

func (s *podServer) RoundTrip(r *http.Request) (*http.Response, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := r.Context().Err(); err != nil {
		return nil, err
	}
	query := r.URL.Query()
	if !query.Has("watch") {
		s.asked++
		if s.busy.status != 0 {
			return s.busy.reply(), nil
		}
	}
	switch {
	case strings.HasSuffix(r.URL.Path, "/scale"):
		if r.Method == http.MethodPatch {
			var patch scaleObject
			if err := json.NewDecoder(r.Body).Decode(&patch); err != nil {
				return nil, err
			}
			s.scaled = patch.Spec.Replicas
		}
		const object = `{"metadata": {"resourceVersion": "1"}, "spec": {"replicas": %d}, "status": {"selector": "app=llama"}}`
		return reply(http.StatusOK, fmt.Sprintf(object, s.scaled)), nil
	case !strings.HasSuffix(r.URL.Path, "/pods"):
		return reply(http.StatusOK, `{"items": []}`), nil
	case query.Get("labelSelector") != "app=llama":
		return reply(http.StatusBadRequest, `{}`), nil
	case query.Has("watch"):
		return s.watch(r.Context(), query), nil
	}
	s.lists++
	items := make([]map[string]any, 0, len(s.pods))
	for _, p := range s.pods {
		items = append(items, p)
	}
	text, err := json.Marshal(map[string]any{
		"kind": "PodList", "metadata": map[string]any{"resourceVersion": strconv.Itoa(s.version)}, "items": items,
	})
	return reply(http.StatusOK, string(text)), err
}

func reply(status int, text string) *http.Response {
	return &http.Response{StatusCode: status, Header: http.Header{}, Body: io.NopCloser(strings.NewReader(text))}
}

func (s *podServer) watch(ctx context.Context, query url.Values) *http.Response {
	s.watched = append(s.watched, query)
	if len(s.refuse) > 0 {
		a := s.refuse[0]
		s.refuse = s.refuse[1:]
		return a.reply()
	}
	from, err := strconv.Atoi(query.Get("resourceVersion"))
	if err != nil || query.Get("allowWatchBookmarks") != "true" {
		return reply(http.StatusBadRequest, `{}`)
	}
	if from < s.least {
		return reply(http.StatusGone, `{"message": "too old resource version"}`)
	}
	body, pipe := io.Pipe()
	one := &stream{lines: make(chan string, 1000), pipe: pipe}
	s.open = append(s.open, one)
	for _, c := range s.history {
		if c.version > from {
			s.send(one, c.line)
		}
	}
	seconds, err := strconv.Atoi(query.Get("timeoutSeconds"))
	if err != nil {
		return reply(http.StatusBadRequest, `{}`)
	}
	lasts := time.AfterFunc(time.Duration(seconds)*time.Second, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if !s.stalled {
			s.drop(one)
		}
	})
	context.AfterFunc(ctx, func() { _ = pipe.CloseWithError(ctx.Err()) })
	go func() {
		defer lasts.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case line, more := <-one.lines:
				if !more {
					_ = pipe.Close()
					return
				}
				if _, err := pipe.Write([]byte(line)); err != nil {
					return
				}
			}
		}
	}()
	return &http.Response{StatusCode: http.StatusOK, Header: http.Header{}, Body: body}
}

func (s *podServer) send(one *stream, line string) {
	if s.stalled {
		return
	}
	one.lines <- line
	if s.twice {
		one.lines <- line
	}
}

// drop ends a stream after what was sent.
func (s *podServer) drop(one *stream) {
	if i := slices.Index(s.open, one); i >= 0 {
		s.open = slices.Delete(s.open, i, i+1)
		close(one.lines)
	}
}

// lose ends all streams; with half, in the middle of a line.
func (s *podServer) lose(half bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, one := range slices.Clone(s.open) {
		if half {
			one.lines <- `{"type": "MODIFIED", "object": {"metadata": {"name": "llama-0", "resourceV`
		}
		s.drop(one)
	}
}

// say sends a line that is of no pod.
func (s *podServer) say(line string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, one := range s.open {
		s.send(one, line)
	}
}

// bookmark sends a version without a change.
func (s *podServer) bookmark(version int) {
	s.say(fmt.Sprintf(`{"type": "BOOKMARK", "object": {"kind": "Pod", "metadata":
		{"resourceVersion": "%d", "creationTimestamp": null}}}`, version))
}

// forget has versions until now forgotten, as a compaction of etcd does.
func (s *podServer) forget() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.version++
	s.least, s.history = s.version, nil
}

func (s *podServer) event(kind string, object map[string]any) {
	text, err := json.Marshal(map[string]any{"type": kind, "object": object})
	if err != nil {
		panic(err)
	}
	line := string(text) + "\n"
	s.history = append(s.history, change{s.version, line})
	for _, one := range s.open {
		s.send(one, line)
	}
}

// set makes or changes a pod; without an address it is not ready.
func (s *podServer) set(name, ip string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.version++
	kind, uid := "MODIFIED", ""
	if before, was := s.pods[name]; was {
		uid = fmt.Sprint(metadata(before)["uid"])
	} else {
		kind, uid = "ADDED", fmt.Sprint("uid-", s.version)
	}
	p := map[string]any{
		"metadata": map[string]any{
			"name": name, "uid": uid, "resourceVersion": strconv.Itoa(s.version),
			"creationTimestamp": "2026-01-01T12:00:00Z",
		},
		"status": map[string]any{"phase": "Pending"},
	}
	if ip != "" {
		ready := []any{map[string]any{"type": "Ready", "status": "True"}}
		p["status"] = map[string]any{"phase": "Running", "podIP": ip, "conditions": ready}
	}
	s.pods[name] = p
	s.event(kind, p)
}

func metadata(p map[string]any) map[string]any {
	m, is := p["metadata"].(map[string]any)
	if !is {
		panic("a pod without metadata")
	}
	return m
}

// remove deletes a pod, or is what a watch sees where its labels change: an event DELETED with the pod as it is now.
func (s *podServer) remove(name string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	p, was := s.pods[name]
	if !was {
		return
	}
	s.version++
	metadata(p)["resourceVersion"] = strconv.Itoa(s.version)
	delete(s.pods, name)
	s.event("DELETED", p)
}

func (s *podServer) figures() (lists, watches int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.lists, len(s.watched)
}

func (s *podServer) requests() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.asked
}

func (s *podServer) configure(change func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	change()
}

func clientOf(s *podServer) *http.Client { return &http.Client{Transport: s, Timeout: 5 * time.Second} }

// follower is a backend that watches a podServer, and what it told.
type follower struct {
	*podServer
	t       *testing.T
	k       *Kubernetes
	d       scale.BackendTarget
	changed chan string
	stop    context.CancelFunc
}

func follow(t *testing.T) *follower {
	t.Helper()
	f := &follower{
		podServer: newPodServer(), t: t, changed: make(chan string, 10_000),
		d: scale.BackendTarget{Name: "own", Model: "llama", Target: []byte(`{"name": "llama", "port": 8000}`)},
	}
	f.k = NewKubernetes(KubernetesConfig{Server: "http://api", Namespace: "models", Client: clientOf(f.podServer)})
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() {
		defer close(done)
		f.k.Watch(ctx, func(model string) { f.changed <- model })
	}()
	f.stop = func() { cancel(); <-done }
	return f
}

// list is what List returns, as "name endpoint" in order.
func (f *follower) list() string {
	f.t.Helper()
	found, err := f.k.List(f.t.Context(), f.d)
	if err != nil {
		f.t.Fatal(err)
	}
	var all []string
	for _, i := range found {
		all = append(all, strings.TrimSpace(i.Name+" "+strings.TrimPrefix(i.Endpoint, "http://")))
	}
	slices.Sort(all)
	return strings.Join(all, ", ")
}

// truth is what list has to return.
func (f *follower) truth() string {
	f.mu.Lock()
	defer f.mu.Unlock()
	var all []string
	for name, p := range f.pods {
		status, _ := p["status"].(map[string]any)
		if ip, has := status["podIP"]; has {
			name += fmt.Sprintf(" %s:8000", ip)
		}
		all = append(all, name)
	}
	slices.Sort(all)
	return strings.Join(all, ", ")
}

// told waits for a call of changed. Under synctest it fails where none comes.
func (f *follower) told() {
	f.t.Helper()
	select {
	case model := <-f.changed:
		if model != f.d.Model {
			f.t.Errorf("told of %q", model)
		}
	case <-time.After(5 * time.Minute):
		f.t.Fatal("not told")
	}
}

func (f *follower) order(count int) scale.Order {
	return scale.Order{BackendTarget: f.d, Count: count}
}
