package worker

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/penstock/penstock/pkg/worker/workertest"
)

// vLLM answers 200 for every running request when its engine stops: what was generated until then is no answer.
func TestTruncatedGenerationIsATransientFailure(t *testing.T) {
	for _, reason := range []string{"abort", "error", "cancelled"} {
		last := `data: {"id":"c1","choices":[{"index":0,"delta":{},"finish_reason":"` + reason + `"}]}` + "\n\n"
		whole := `{"choices":[{"index":0,"finish_reason":"` + reason + `","message":{"content":"The answer is"}}]}`
		for _, c := range []contract{
			{"stream " + reason, streams(token("The answer is"), last, doneEvent), want{kind: Failed, class: ClassTransient}},
			{"whole " + reason, workertest.Says(200, whole), want{kind: Failed, class: ClassTransient}},
		} {
			t.Run(c.name, func(t *testing.T) {
				s := workertest.NewScript(t, c.answer)
				o := newAdapter(t, streamModel(), s.URL, 1).Submit(t.Context(), testCall(`{"messages":[]}`))
				c.want.check(t, o)
				if !o.Aborted || !strings.Contains(o.Reason, reason) {
					t.Errorf("aborted %v, reason %q", o.Aborted, o.Reason)
				}
			})
		}
	}
}

// Answers of /v1/responses have no choices: whether one was given up, its status says.
func TestTruncatedResponseIsATransientFailure(t *testing.T) {
	const output = `"error":null,"output":[{"type":"message","content":[{"type":"output_text","text":"The answer is"}]}]}`
	for status, kind := range map[string]OutcomeKind{"cancelled": Failed, "completed": Done, "incomplete": Done} {
		answer := `{"id":"r1","object":"response","status":"` + status + `",` + output
		s := workertest.NewScript(t, workertest.Says(200, answer))
		o := newAdapter(t, streamModel(), s.URL, 1).Submit(t.Context(), testCall(`{"operation":"responses","input":"x"}`))
		if o.Kind != kind || o.Aborted != (kind == Failed) {
			t.Errorf("%s: got %s, aborted %v, reason %q", status, o.Kind, o.Aborted, o.Reason)
		}
		if kind == Done && string(o.Result) != answer {
			t.Errorf("%s: the result is %s", status, o.Result)
		}
	}
}

func TestFinishReasonsThatAreNotKnownAreTakenAsTheyAre(t *testing.T) {
	const answer = `{"choices":[{"index":0,"finish_reason":"repetition","message":{"content":"x"}}]}`
	s := workertest.NewScript(t, workertest.Says(200, answer))
	o := newAdapter(t, streamModel(), s.URL, 1).Submit(t.Context(), testCall(`{"messages":[]}`))
	if o.Kind != Done || string(o.Result) != answer {
		t.Errorf("got %s, %s", o.Kind, o.Result)
	}
}

func choiceOf(delta, rest string) string {
	return `data: {"id":"c1","model":"m","service_tier":"flex","choices":[{"index":0,"delta":` + delta + rest + `}]}` + "\n\n"
}

// A server renames members of a delta; what is not known is kept all the same.
func TestEveryMemberOfADeltaIsKept(t *testing.T) {
	s := workertest.NewScript(t, streams(
		choiceOf(`{"role":"assistant","reasoning":"Let me ","audio":{"id":"a1","data":"AAA","transcript":"He"}}`,
			`,"logprobs":{"content":[{"token":"a","logprob":-1}]},"token_ids":[1,2]`),
		choiceOf(`{"reasoning":"think.","reasoning_content":"old","annotations":[{"type":"url"}],"audio":{"id":"a1","data":"BBB","transcript":"llo","expires_at":7}}`,
			`,"logprobs":{"content":[{"token":"b","logprob":-2}]},"token_ids":[3]`),
		choiceOf(`{"content":"Hi","annotations":[{"type":"file"}],"newly_named":"one "}`, `,"logprobs":null`),
		choiceOf(`{"newly_named":"two"}`, `,"finish_reason":"stop","stop_reason":128001`),
		doneEvent,
	))
	o := newAdapter(t, streamModel(), s.URL, 1).Submit(t.Context(), testCall(`{}`))
	const want = `{"choices":[{"finish_reason":"stop","index":0,` +
		`"logprobs":{"content":[{"token":"a","logprob":-1},{"token":"b","logprob":-2}]},` +
		`"message":{"annotations":[{"type":"url"},{"type":"file"}],` +
		`"audio":{"data":"AAABBB","expires_at":7,"id":"a1","transcript":"Hello"},` +
		`"content":"Hi","newly_named":"one two","reasoning":"Let me think.","reasoning_content":"old","role":"assistant"},` +
		`"stop_reason":128001,"token_ids":[1,2,3]}],"id":"c1","model":"m","service_tier":"flex"}`
	if string(o.Result) != want {
		t.Errorf("got  %s (%s)\nwant %s", o.Result, o.Reason, want)
	}
}

// Minutes of reasoning are work: an error after them is a failure, not a lack of capacity that costs nothing.
func TestErrorAfterReasoningCounts(t *testing.T) {
	for _, member := range []string{"reasoning", "reasoning_content", "newly_named"} {
		s := workertest.NewScript(t, streams(
			choiceOf(`{"`+member+`":"hm"}`, ""),
			`data: {"error":{"message":"server busy, the request queue is full","code":503}}`+"\n\n",
		))
		o := newAdapter(t, streamModel(), s.URL, 1).Submit(t.Context(), testCall(`{}`))
		if o.Kind != Failed || o.Class != ClassTransient {
			t.Errorf("%s: got %s, class %s", member, o.Kind, o.Class)
		}
	}
}

// Older vLLM takes X-Request-Id as its own id and refuses one that still runs.
func TestEveryAttemptHasARequestIDOfItsOwn(t *testing.T) {
	s := workertest.NewScript(t, workertest.Says(200, `{"choices":[]}`))
	a := newAdapter(t, Model{Name: "m", Protocol: ProtocolOpenAI}, s.URL, 1)
	for _, token := range []int64{42, 43} {
		call := testCall(`{"messages":[]}`)
		call.Token = token
		a.Submit(t.Context(), call)
	}
	seen := s.Requests()
	for _, name := range []string{"X-Request-Id", "Idempotency-Key"} {
		first, second := seen[0].Header.Get(name), seen[1].Header.Get(name)
		if first == second || !strings.Contains(first, "entry-17") || !strings.Contains(first, "42") {
			t.Errorf("%s: %q and then %q", name, first, second)
		}
	}
}

func TestWorkerThatKnowsEntriesByTheirKeyIsGivenTheSameAgain(t *testing.T) {
	s := workertest.NewScript(t, workertest.Says(200, `{"status":"success"}`))
	a := newAdapter(t, Model{Name: "m", Protocol: ProtocolGeneric, OnUnknown: Reattach}, s.URL, 1)
	a.Submit(t.Context(), testCall(`{}`))
	if key := s.Requests()[0].Header.Get("Idempotency-Key"); key != "entry-17" {
		t.Errorf("Idempotency-Key is %q", key)
	}
}

func TestStreamsAskForTheirUsage(t *testing.T) {
	for payload, want := range map[string]string{
		`{"messages":[]}`: `{"include_usage":true}`,
		`{"messages":[],"stream_options":{"continuous_usage_stats":true}}`: `{"continuous_usage_stats":true,"include_usage":true}`,
		`{"messages":[],"stream_options":{"include_usage":false}}`:         `{"include_usage":false}`,
	} {
		s := workertest.NewScript(t, workertest.Says(200, `{"choices":[]}`))
		newAdapter(t, streamModel(), s.URL, 1).Submit(t.Context(), testCall(payload))
		var body map[string]json.RawMessage
		if err := json.Unmarshal([]byte(s.Requests()[0].Body), &body); err != nil {
			t.Fatal(err)
		}
		if string(body["stream_options"]) != want {
			t.Errorf("%s: stream_options are %s, want %s", payload, body["stream_options"], want)
		}
	}
}

// A server that answers before the run has ended frees the slot too soon, and its run has no answer for the entry.
func TestAResponseDoesNotGoOnBehindItsAnswer(t *testing.T) {
	s := workertest.NewScript(t, workertest.Says(200, `{"object":"response","status":"completed","output":[]}`))
	a := newAdapter(t, Model{Name: "m", Protocol: ProtocolOpenAI}, s.URL, 1)
	for payload, want := range map[string]OutcomeKind{
		`{"operation":"responses","background":true}`:       Rejected,
		`{"operation":"responses","background":"true"}`:     Rejected, // which pydantic takes for true
		`{"operation":"responses","background":1}`:          Rejected,
		`{"operation":"responses","background":false}`:      Done,
		`{"operation":"responses","background":null}`:       Done,
		`{"operation":"responses"}`:                         Done,
		`{"operation":"images","background":"transparent"}`: Done,
	} {
		if o := a.Submit(t.Context(), testCall(payload)); o.Kind != want {
			t.Errorf("%s: %s %q, want %s", payload, o.Kind, o.Reason, want)
		}
	}
	for _, status := range []string{"queued", "in_progress"} {
		s := workertest.NewScript(t, workertest.Says(200, `{"object":"response","status":"`+status+`","output":[]}`))
		a := newAdapter(t, Model{Name: "m", Protocol: ProtocolOpenAI}, s.URL, 1)
		want{kind: Unknown, running: true}.check(t, a.Submit(t.Context(), testCall(`{"operation":"responses"}`)))
	}
}

func TestUsageIsReported(t *testing.T) {
	usage := `"usage":{"prompt_tokens":12,"completion_tokens":5,"prompt_tokens_details":{"cached_tokens":8}}`
	want := Tokens{In: 12, Cached: 8, Out: 5}
	for name, answer := range map[string]contract{
		"whole":  {answer: workertest.Says(200, `{"choices":[],`+usage+`}`)},
		"stream": {answer: streams(token("x"), stopEvent, `data: {"choices":[],`+usage+"}\n\n", doneEvent)},
	} {
		s := workertest.NewScript(t, answer.answer)
		o := newAdapter(t, streamModel(), s.URL, 1).Submit(t.Context(), testCall(`{}`))
		if o.Tokens != want {
			t.Errorf("%s: got %+v, want %+v", name, o.Tokens, want)
		}
	}
	response := `{"input_tokens":12,"output_tokens":5,"input_tokens_details":{"cached_tokens":8},"prompt_tokens_details":null}`
	if got := TokensOf(json.RawMessage(response)); got != want {
		t.Errorf("response: got %+v, want %+v", got, want)
	}
	half := `{"prompt_tokens":12,"completion_tokens":5,"total_tokens":"17","prompt_tokens_details":"none"}`
	if got := TokensOf(json.RawMessage(half)); got != (Tokens{In: 12, Out: 5}) {
		t.Errorf("usage with a member of another type: got %+v", got)
	}
}

// Of two choices only one has begun when the server closes without [DONE]: the answer is not whole.
func TestEndOfAStreamBeforeAllChoicesBeganIsNotItsEnd(t *testing.T) {
	s := workertest.NewScript(t, streams(token("x"), stopEvent))
	for _, payload := range []string{`{"n":2}`, `{"operation":"completions","prompt":["a","b"]}`} {
		if o := newAdapter(t, streamModel(), s.URL, 1).Submit(t.Context(), testCall(payload)); o.Kind != Unknown {
			t.Errorf("%s: got %s", payload, o.Kind)
		}
	}
}

// Indexes of choices that come from outside are bounded: a call for more is refused before it costs a run.
func TestAStreamOfMoreChoicesThanAreReadIsNotAskedFor(t *testing.T) {
	s := workertest.NewScript(t, streams(token("x"), stopEvent, doneEvent))
	for _, payload := range []string{
		`{"n":1025}`, `{"operation":"completions","prompt":["a"` + strings.Repeat(`,"a"`, 1024) + `]}`,
	} {
		o := newAdapter(t, streamModel(), s.URL, 1).Submit(t.Context(), testCall(payload))
		if o.Kind != Rejected || len(s.Requests()) != 0 {
			t.Errorf("%.60s: %s %q", payload, o.Kind, o.Reason)
		}
	}
}

// The bound is on the answer as it is stored, not on the frames that carried it.
func TestFramesDoNotCountAgainstTheAnswer(t *testing.T) {
	model := streamModel()
	model.MaxResponseBytes = 4 << 10
	var events []string
	for range 200 {
		events = append(events, token("word "))
	}
	s := workertest.NewScript(t, streams(append(events, stopEvent, doneEvent)...))
	if o := newAdapter(t, model, s.URL, 1).Submit(t.Context(), testCall(`{}`)); o.Kind != Done {
		t.Errorf("1,000 bytes of text in 30,000 bytes of frames: %s, %s", o.Kind, o.Reason)
	}
}
