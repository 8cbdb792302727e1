package worker

import (
	"net/http"
	"strings"
	"testing"
	"time"
)

func TestErrorTextsOfRealFrameworks(t *testing.T) {
	for text, want := range map[string]Class{
		"torch.cuda.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB": ClassOOM,
		"CUDA error: out of memory":                                         ClassOOM,
		"RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED":              ClassOOM,
		"std::bad_alloc":                                                    ClassOOM,
		"onnxruntime: Failed to allocate memory for requested buffer":       ClassOOM,
		"CUDA error: device-side assert triggered":                          ClassContextLost,
		"cudaErrorIllegalAddress: an illegal memory access was encountered": ClassContextLost,
		"NVRM: Xid 79, GPU has fallen off the bus":                          ClassContextLost,
		"Xid (PCI:0000:3b:00): 48":                                          ClassContextLost,
		"vllm.v1.engine.exceptions.EngineDeadError":                         ClassContextLost,
		"VK_ERROR_DEVICE_LOST":                                              ClassContextLost,
		"GPU busy":                                                          ClassBusy,
		"At capacity - all prediction slots busy":                           ClassBusy,
		"The request queue is full.":                                        ClassBusy,
		"Exceeds maximum queue size":                                        ClassBusy,
		"an image of iron oxide on a busy street":                           ClassNone,
		"dioxide":                 ClassNone,
		"KeyError: 'xid'":         ClassNone,
		"list index out of range": ClassNone,
		"":                        ClassNone,
	} {
		if got := classifyText(text, nil); got != want {
			t.Errorf("%q is %q, want %q", text, got, want)
		}
	}
}

func TestProxyThatLostTheWorkerIsBelieved(t *testing.T) {
	const envoy = "upstream connect error or disconnect/reset before headers. "
	for _, c := range []struct {
		status int
		body   string
		want   bool
	}{
		{502, "", true},
		{504, "", true},
		{408, "", true},
		{520, "", true},
		{524, "", true},
		{503, envoy + "reset reason: connection termination", true},
		{503, envoy + "retried and the latest reset reason: connection termination", true},
		{503, envoy + "reset reason: remote reset", true},
		{503, envoy + "reset reason: protocol error", true},
		{503, `{"error":"` + envoy + `reset reason: connection termination"}`, true},
		{503, envoy + "reset reason: connection failure", false},
		{503, envoy + "reset reason: connection timeout", false},
		{503, envoy + "reset reason: overflow", false},
		{503, envoy + "reset reason: remote refused stream reset", false},
		{503, "no healthy upstream", false},
		{503, `{"error":"Loading model"}`, false},
		{500, envoy + "reset reason: connection termination", false},
		{522, "", false},
		{303, "", false},
		{200, "", false},
	} {
		if got := LostByProxy(c.status, []byte(c.body)); got != c.want {
			t.Errorf("%d %q: lost is %v, want %v", c.status, c.body, got, c.want)
		}
	}
}

func TestErrorTextIsFoundInEveryShape(t *testing.T) {
	for body, want := range map[string]string{
		`{"error":"a"}`:                      "a",
		`{"error":{"message":"b","code":1}}`: "b",
		`{"detail":"c"}`:                     "c",
		`{"detail":[{"msg":"d"}]}`:           `[{"msg":"d"}]`,
		`{"message":"e"}`:                    "e",
		`{"error":null,"detail":"f"}`:        "f",
		"plain text\n":                       "plain text",
		``:                                   "",
		`{"other":1}`:                        `{"other":1}`,
	} {
		if got := errorText([]byte(body)); got != want {
			t.Errorf("%s gave %q, want %q", body, got, want)
		}
	}
}

func TestRetryAfterInBothForms(t *testing.T) {
	for _, c := range []struct {
		value, date string
		want        time.Duration
	}{
		{"", "", 0},
		{"120", "", 2 * time.Minute},
		{"0.5", "", 500 * time.Millisecond},
		{"-3", "", 0},
		{"NaN", "", 0},
		{"1e300", "", 0},
		{strings.Repeat("9", 400), "", time.Hour},
		{"soon", "", 0},
		// The worker's clock is years off; only the difference counts.
		{"Wed, 21 Oct 2015 07:28:30 GMT", "Wed, 21 Oct 2015 07:28:00 GMT", 30 * time.Second},
		{"Wed, 21 Oct 2015 07:28:00 GMT", "Wed, 21 Oct 2015 07:29:00 GMT", 0},
	} {
		h := http.Header{"Retry-After": {c.value}, "Date": {c.date}}
		if got := retryAfter(h); got != c.want {
			t.Errorf("%q at %q is %s, want %s", c.value, c.date, got, c.want)
		}
	}
}

func TestReasonsAreOneShortLine(t *testing.T) {
	if got := Clip("a\nb\x00c"); got != "a b c" {
		t.Errorf("got %q", got)
	}
	if got := Clip(string(make([]rune, 10_000))); len([]rune(got)) > 501 {
		t.Errorf("reason has %d characters", len([]rune(got)))
	}
}
