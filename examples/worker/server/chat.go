package server

import (
	"crypto/rand"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"strings"
	"time"

	"github.com/penstock/penstock/examples/worker/model"
)

// chatRequest is the part of a chat completion that the worker reads.
type chatRequest struct {
	Model    string `json:"model"`
	Messages []struct {
		Role    string          `json:"role"`
		Content json.RawMessage `json:"content"`
	} `json:"messages"`
	Stream  bool `json:"stream"`
	Options struct {
		Usage bool `json:"include_usage"`
	} `json:"stream_options"`
}

// last returns the text of the last message; parts of other kinds are left out.
func (c chatRequest) last() string {
	if len(c.Messages) == 0 {
		return ""
	}
	content := c.Messages[len(c.Messages)-1].Content
	var text string
	if json.Unmarshal(content, &text) == nil {
		return text
	}
	var parts []struct {
		Text string `json:"text"`
	}
	if json.Unmarshal(content, &parts) != nil {
		return ""
	}
	for _, p := range parts {
		text += p.Text
	}
	return text
}

// serveChat answers in the form of OpenAI's chat completions, with the model language: it says in which
// language the last message is written. It shows a stream on a machine without a GPU; the slots are those
// of all calls.
func (s *Server) serveChat(w http.ResponseWriter, r *http.Request) {
	var ask chatRequest
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, s.cfg.BodyBytes))
	if err != nil || json.Unmarshal(body, &ask) != nil || ask.last() == "" {
		chatError(w, http.StatusBadRequest, "messages must end with a text")
		return
	}
	m, known := s.modelNamed("language")
	if !known {
		chatError(w, http.StatusServiceUnavailable, "the worker is loading its models")
		return
	}
	payload, err := json.Marshal(model.LanguageInput{Text: ask.last()})
	if err != nil {
		chatError(w, http.StatusBadRequest, err.Error())
		return
	}
	work, err := m.Prepare(payload)
	if err != nil {
		chatError(w, http.StatusBadRequest, err.Error())
		return
	}
	if !s.takeSlot() {
		chatError(w, http.StatusServiceUnavailable, "GPU busy")
		return
	}
	defer s.leaveSlot()
	result, err := work(r.Context())
	found, is := result.(*model.LanguageResult)
	if err != nil || !is {
		chatError(w, http.StatusInternalServerError, "the text could not be examined")
		return
	}
	reply := fmt.Sprintf("This is %s (%s), I am %.0f percent sure.", found.Name, found.Language, 100*found.Confidence)
	usage := chatUsage{Prompt: len(strings.Fields(ask.last())), Completion: len(strings.Fields(reply))}
	usage.Total = usage.Prompt + usage.Completion
	if ask.Stream {
		s.streamChat(w, r, ask, reply, usage)
		return
	}
	stop := "stop"
	w.Header().Set("Content-Type", "application/json")
	_ = json.NewEncoder(w).Encode(chatAnswer{
		ID: "chatcmpl-" + rand.Text(), Object: "chat.completion", Created: time.Now().Unix(), Model: ask.Model,
		Usage:   &usage,
		Choices: []chatChoice{{Message: &chatText{Role: "assistant", Content: reply}, Finish: &stop}},
	}) // the client may be gone
}

// wordPause is between two words of a stream, so that it can be seen to flow.
const wordPause = 60 * time.Millisecond

func (s *Server) streamChat(w http.ResponseWriter, r *http.Request, ask chatRequest, reply string, usage chatUsage) {
	w.Header().Set("Content-Type", "text/event-stream")
	flush := http.NewResponseController(w)
	chunk := chatAnswer{
		ID: "chatcmpl-" + rand.Text(), Object: "chat.completion.chunk", Created: time.Now().Unix(), Model: ask.Model,
	}
	send := func(c chatAnswer) {
		text, _ := json.Marshal(c) // of texts and numbers
		fmt.Fprintf(w, "data: %s\n\n", text)
		_ = flush.Flush() // the client may be gone
	}
	for _, word := range strings.SplitAfter(reply, " ") {
		chunk.Choices = []chatChoice{{Delta: &chatText{Content: word}}}
		send(chunk)
		select {
		case <-r.Context().Done():
			return
		case <-time.After(wordPause):
		}
	}
	stop := "stop"
	chunk.Choices = []chatChoice{{Delta: &chatText{}, Finish: &stop}}
	send(chunk)
	if ask.Options.Usage {
		chunk.Choices, chunk.Usage = []chatChoice{}, &usage
		send(chunk)
	}
	fmt.Fprint(w, "data: [DONE]\n\n")
}

type chatAnswer struct {
	ID      string       `json:"id"`
	Object  string       `json:"object"`
	Created int64        `json:"created"`
	Model   string       `json:"model"`
	Choices []chatChoice `json:"choices"`
	Usage   *chatUsage   `json:"usage,omitempty"`
}

type chatChoice struct {
	Index   int       `json:"index"`
	Message *chatText `json:"message,omitempty"`
	Delta   *chatText `json:"delta,omitempty"`
	Finish  *string   `json:"finish_reason"`
}

type chatText struct {
	Role    string `json:"role,omitempty"`
	Content string `json:"content"`
}

type chatUsage struct {
	Prompt     int `json:"prompt_tokens"`
	Completion int `json:"completion_tokens"`
	Total      int `json:"total_tokens"`
}

func chatError(w http.ResponseWriter, status int, message string) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	// the client may be gone
	_ = json.NewEncoder(w).Encode(map[string]any{"error": map[string]any{
		"message": message,
		"type":    "server_error",
	}})
}

// takeSlot takes a slot for a call that does not wait for one; leaveSlot must follow.
func (s *Server) takeSlot() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.draining || s.active >= s.cfg.Slots || len(s.direct) > 0 {
		return false
	}
	s.active++
	s.live.Add(1)
	return true
}

func (s *Server) leaveSlot() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.active--
	s.live.Done()
	s.grantNext()
}
