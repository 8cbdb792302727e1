package workertest

import (
	"bytes"
	"context"
	"encoding/base64"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"os/exec"
	"strings"
	"sync"
	"testing"
	"time"
)

// CogServer speaks the Cog HTTP API around tesseract: a prediction's input is
// {"image": data URL, "pages": how often to read it}, its output the text. It
// keeps the API's traits that matter here: an id in flight is never run twice,
// an id that completed is forgotten, terminal callbacks are repeated on 5xx, a
// closed connection cancels a synchronous prediction.
type CogServer struct {
	*httptest.Server
	t     *testing.T
	slots int

	mu      sync.Mutex
	running map[string]*cogRun
	runs    int
	callers sync.WaitGroup
}

type cogRun struct {
	cancel context.CancelFunc
	done   chan struct{}
	last   map[string]any
}

// StartCog reports the test as not run where tesseract is not installed.
func StartCog(t *testing.T, slots int) *CogServer {
	t.Helper()
	if _, err := exec.LookPath("tesseract"); err != nil {
		t.Skip("not run: tesseract is not installed (Debian: tesseract-ocr)")
	}
	s := &CogServer{t: t, slots: slots, running: map[string]*cogRun{}}
	mux := http.NewServeMux()
	mux.HandleFunc("GET /health-check", s.health)
	mux.HandleFunc("PUT /predictions/{id}", s.predict)
	mux.HandleFunc("POST /predictions/{id}/cancel", s.cancel)
	s.Server = httptest.NewServer(mux)
	t.Cleanup(func() {
		s.mu.Lock()
		for _, run := range s.running {
			run.cancel()
		}
		s.mu.Unlock()
		s.CloseClientConnections()
		s.Close()
		s.callers.Wait()
	})
	return s
}

func (s *CogServer) health(w http.ResponseWriter, _ *http.Request) {
	s.mu.Lock()
	defer s.mu.Unlock()
	status := "READY"
	if len(s.running) >= s.slots {
		status = "BUSY"
	}
	AnswerJSON(w, 200, map[string]any{"status": status, "setup": map[string]any{"status": "succeeded"}})
}

func (s *CogServer) predict(w http.ResponseWriter, r *http.Request) {
	var body struct {
		ID    string `json:"id"`
		Input struct {
			Image string `json:"image"`
			Pages int    `json:"pages"`
		} `json:"input"`
		Webhook string `json:"webhook"`
	}
	err := json.NewDecoder(r.Body).Decode(&body)
	image, found := strings.CutPrefix(body.Input.Image, "data:image/png;base64,")
	png, badImage := base64.StdEncoding.DecodeString(image)
	if err != nil || body.ID != r.PathValue("id") || !found || badImage != nil {
		AnswerJSON(w, 422, map[string]any{"detail": []any{map[string]any{
			"loc": []string{"body", "input", "image"},
			"msg": "not a PNG", "type": "value_error",
		}}})
		return
	}
	async := r.Header.Get("Prefer") == "respond-async"
	ctx, cancel := context.WithCancel(context.Background())
	if !async {
		ctx, cancel = context.WithCancel(r.Context())
	}
	defer func() {
		if !async {
			cancel()
		}
	}()
	run := &cogRun{
		cancel: cancel, done: make(chan struct{}),
		last: map[string]any{"id": body.ID, "status": "processing", "input": body.Input},
	}
	s.mu.Lock()
	if known := s.running[body.ID]; known != nil {
		snapshot := known.last
		s.mu.Unlock()
		AnswerJSON(w, 202, snapshot)
		return
	}
	if len(s.running) >= s.slots {
		s.mu.Unlock()
		AnswerJSON(w, 409, map[string]any{"error": "At capacity - all prediction slots busy", "status": "failed"})
		return
	}
	s.running[body.ID] = run
	s.runs++
	s.mu.Unlock()
	if !async {
		AnswerJSON(w, 200, s.compute(ctx, body.ID, png, body.Input.Pages, run))
		return
	}
	AnswerJSON(w, 202, map[string]any{"id": body.ID, "status": "starting", "input": body.Input})
	s.callers.Go(func() {
		s.report(body.Webhook, map[string]any{"id": body.ID, "status": "processing", "logs": ""}, false)
		s.report(body.Webhook, s.compute(ctx, body.ID, png, body.Input.Pages, run), true)
	})
}

// compute reads the picture, and frees the slot only when tesseract has gone.
func (s *CogServer) compute(ctx context.Context, id string, png []byte, pages int, run *cogRun) map[string]any {
	began := time.Now()
	var text strings.Builder
	var failure error
	for range max(pages, 1) {
		cmd := exec.CommandContext(ctx, "tesseract", "stdin", "stdout", "--psm", "6")
		cmd.Stdin = bytes.NewReader(png)
		page, err := cmd.Output()
		if failure = err; err != nil {
			break
		}
		text.Write(page)
	}
	reply := map[string]any{
		"id": id, "logs": "",
		"metrics": map[string]any{"predict_time": time.Since(began).Seconds()},
	}
	switch {
	case ctx.Err() != nil:
		reply["status"] = "canceled"
	case failure != nil:
		reply["status"], reply["error"] = "failed", failure.Error()
	default:
		reply["status"], reply["output"] = "succeeded", strings.TrimSpace(text.String())
	}
	s.mu.Lock()
	delete(s.running, id) // from here on the same id would run again
	s.mu.Unlock()
	close(run.done)
	return reply
}

// report posts to the callback; a terminal one up to 12 times more on 5xx.
func (s *CogServer) report(to string, body map[string]any, terminal bool) {
	text, _ := json.Marshal(body)
	for try := range 13 {
		req, err := http.NewRequestWithContext(context.Background(), http.MethodPost, to, bytes.NewReader(text))
		if err != nil {
			return
		}
		reply, err := http.DefaultClient.Do(req)
		if err == nil {
			reply.Body.Close()
			if reply.StatusCode < 500 {
				return
			}
		}
		if !terminal {
			return
		}
		time.Sleep(time.Millisecond << min(try, 6))
	}
}

func (s *CogServer) cancel(w http.ResponseWriter, r *http.Request) {
	s.mu.Lock()
	run := s.running[r.PathValue("id")]
	s.mu.Unlock()
	if run == nil {
		AnswerJSON(w, 404, map[string]any{})
		return
	}
	run.cancel()
	AnswerJSON(w, 200, map[string]any{})
}

func (s *CogServer) Idle() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.running) == 0
}

func (s *CogServer) Started() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.runs
}

func AnswerJSON(w http.ResponseWriter, status int, body any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(body)
}
