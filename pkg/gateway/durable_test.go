package gateway

import (
	"encoding/json"
	"testing"
)

func TestPayloadNamesItsOperation(t *testing.T) {
	t.Parallel()
	for _, body := range []string{`{}`, ` { } `, `{"a":1}`, "{\"a\":1 \n}\n", `{"operation":"chat","a":1}`} {
		var got map[string]any
		if err := json.Unmarshal(DurablePayload(json.RawMessage(body), "embeddings"), &got); err != nil || got["operation"] != "embeddings" {
			t.Errorf("%s became %v: %v", body, got, err)
		}
	}
	for path, want := range map[string]string{"/v1/embeddings": "embeddings", "/v1/audio/speech": "", "/chat/completions": ""} {
		if got, ok := Operation(path); got != want || ok != (want != "") {
			t.Errorf("%s: got %q %v", path, got, ok)
		}
	}
}
