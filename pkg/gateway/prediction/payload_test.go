package prediction

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"reflect"
	"strings"
	"testing"
	"time"

	"github.com/penstock/penstock/internal/stream"
	"github.com/penstock/penstock/pkg/gateway"
	"github.com/penstock/penstock/pkg/worker"
)

func TestInputBecomesWhatTheWorkerTakes(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		protocol    worker.Protocol
		stream      bool
		input, want string
	}{
		{worker.ProtocolCog, true, `{"prompt":"a","stream":1}`, `{"prompt":"a","stream":1}`},
		{
			worker.ProtocolOpenAI, false, `{"prompt":"a","system_prompt":"b","max_tokens":3,"model":"x"}`,
			`{"messages":[{"role":"system","content":"b"},{"role":"user","content":"a"}],"max_tokens":3,"operation":"chat"}`,
		},
		{worker.ProtocolOpenAI, true, `{"messages":[]}`, `{"messages":[],"operation":"chat","stream":true}`},
		{worker.ProtocolOpenAI, true, `{"input":["a"]}`, `{"input":["a"]}`},
	} {
		got, err := payloadOf(json.RawMessage(c.input), gateway.Offer{Protocol: c.protocol}, c.stream)
		if err != nil || !sameJSON(t, got, c.want) {
			t.Errorf("%s became %s, want %s: %v", c.input, got, c.want, err)
		}
	}
	for _, bad := range []string{`[]`, `null`, `"x"`, `1`} {
		if _, err := payloadOf(json.RawMessage(bad), gateway.Offer{Protocol: worker.ProtocolOpenAI}, false); err == nil {
			t.Errorf("%s passed", bad)
		}
	}
}

// Numbers of seconds that a duration cannot have are none, and not the rest of them.
func TestCancelAfterIsReadUpToWhatADurationCanBe(t *testing.T) {
	t.Parallel()
	for text, want := range map[string]time.Duration{"10": 10 * time.Second, "90s": 90 * time.Second, "1m 30s": 90 * time.Second} {
		if got, err := durationOf(text); got != want || err != nil {
			t.Errorf("%s is %s (%v), want %s", text, got, err, want)
		}
	}
	for _, text := range []string{"18446744084", "9999999999999999999", "", "soon"} {
		if got, err := durationOf(text); err == nil {
			t.Errorf("%q is %s", text, got)
		}
	}
}

func sameJSON(t *testing.T, a json.RawMessage, b string) bool {
	t.Helper()
	var x, y any
	if json.Unmarshal(a, &x) != nil || json.Unmarshal([]byte(b), &y) != nil {
		return false
	}
	return reflect.DeepEqual(x, y)
}

// Clients of Replicate know succeeded, failed and canceled as ends, and wait for ever for any other.
func TestEveryOutcomeEndsAPredictionForItsClient(t *testing.T) {
	t.Parallel()
	now := time.Now()
	for state, want := range map[string]string{
		"waiting": "starting", "running": "processing", "done": "succeeded", "failed": "failed", "expired": "canceled",
		"cancelled": "canceled",
	} {
		p := row{State: state, Result: json.RawMessage(`{"choices":[{"message":{"content":"x"}}]}`), RunsChat: true, EndedAt: &now}
		if v := p.view(""); v.Status != want || (want == "succeeded") != (string(v.Output) == `["x"]`) {
			t.Errorf("%s: got %s with %s", state, v.Status, v.Output)
		}
	}
}

// A result in the object store is neither output for clients nor an address that they are to see.
func TestAResultInTheObjectStoreIsNoOutput(t *testing.T) {
	t.Parallel()
	now := time.Now()
	for _, chat := range []bool{false, true} {
		p := row{State: "done", Result: json.RawMessage(`{"$object":{"url":"file:///shared/x"}}`), RunsChat: chat, EndedAt: &now}
		if v := p.view(""); v.Status != "succeeded" || string(v.Output) != "null" || !v.DataRemoved {
			t.Errorf("got %s with %s, removed %t", v.Status, v.Output, v.DataRemoved)
		}
		answered := httptest.NewRecorder()
		r := httptest.NewRequestWithContext(t.Context(), http.MethodGet, "/", nil)
		reader := &reading{follower: newFollower(place{}), events: stream.NewEvents(answered, r, streamStall)}
		if err := reader.end(p); err != nil {
			t.Fatal(err)
		}
		if text := answered.Body.String(); !strings.Contains(text, "event: error") || strings.Contains(text, "shared") {
			t.Errorf("the stream of an output that was not streamed ends with %s", text)
		}
	}
}

func TestOutputBehindTheTextsIsTheResultWithoutThem(t *testing.T) {
	t.Parallel()
	calls := json.RawMessage(`{"id":"1","choices":[{"index":0,"finish_reason":"tool_calls","message":{"role":"assistant",` +
		`"content":"a < b","tool_calls":[{"id":"c"}]}},{"index":1,"text":"no message"}],"usage":{"total_tokens":3}}`)
	want := `{"id":"1","choices":[{"index":0,"finish_reason":"tool_calls","message":{"role":"assistant",` +
		`"content":null,"tool_calls":[{"id":"c"}]}},{"index":1,"text":"no message"}],"usage":{"total_tokens":3}}`
	if got, err := withoutTexts(calls); err != nil || !sameJSON(t, got, want) {
		t.Errorf("got %s, %v", got, err)
	}
	without := json.RawMessage(`{"choices":[{"message":null},null,{"message":{"tool_calls":[{"id":"c"}],"content":"a"}}]}`)
	rest := `{"choices":[{"message":null},null,{"message":{"tool_calls":[{"id":"c"}],"content":null}}]}`
	if got, err := withoutTexts(without); err != nil || !sameJSON(t, got, rest) {
		t.Errorf("beside choices without a message: got %s, %v", got, err)
	}
	r := &reading{follower: newFollower(place{7, 1, 1, 5})}
	if got, err := r.rest(nil, calls); err != nil || !sameJSON(t, json.RawMessage(got), want) {
		t.Errorf("behind texts: got %s, %v", got, err)
	}
	if got, err := r.rest(nil, json.RawMessage(`{"choices":[{"message":{"content":"a < b"}}]}`)); got != "" || err != nil {
		t.Errorf("behind all there is: got %s, %v", got, err)
	}
	r.follower = newFollower(place{7, endSeq, endOutput, 5})
	if got, err := r.rest(nil, calls); got != "" || err != nil {
		t.Errorf("behind the rest: got %s, %v", got, err)
	}
}
