package worker

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/worker/workertest"

	"pgregory.net/rapid"
)

func batchOf(payloads ...string) []Call {
	calls := make([]Call, len(payloads))
	for i, p := range payloads {
		calls[i] = Call{RunRef: RunRef{Entry: fmt.Sprintf("e%d", i+1), Token: int64(10 + i), Attempt: 1 + i}, Payload: json.RawMessage(p)}
	}
	return calls
}

func batcher(t *testing.T, model Model, endpoint string) (Adapter, BatchCodec) {
	t.Helper()
	a := newAdapter(t, model, endpoint, 1)
	b, ok := a.(BatchCodec)
	if !ok {
		t.Fatalf("%s takes no batches", model.Protocol)
	}
	return a, b
}

var embedding = Model{Name: "e5", Protocol: ProtocolOpenAI, Operation: OperationEmbeddings}

func TestBatchesOfEachProtocol(t *testing.T) {
	for _, c := range []struct {
		name     string
		model    Model
		calls    []Call
		sent     string
		answer   string
		outcomes []want
	}{
		{
			"dispatcher",
			Model{Name: "m", Protocol: ProtocolGeneric},
			batchOf(`{"p":1}`, `{"p":2}`, `{"p":3}`),
			`{"items":[{"p":1},{"p":2},{"p":3}]}`,
			`{"status":"success","result":[{"status":"success","result":"a"},{"status":"failed","error":"CUDA out of memory"},{"status":"failed","error":"bad","error_class":"input"}]}`,
			[]want{{kind: Done, result: `"a"`}, {kind: Failed, class: ClassOOM}, {kind: Failed, class: ClassInput}},
		},
		{
			"embeddings", embedding, batchOf(`{"input":"x"}`, `{"input":["y","z"]}`),
			`{"input":["x","y","z"],"model":"e5"}`,
			`{"object":"list","model":"e5","data":[{"index":2,"embedding":[3]},{"index":0,"embedding":[1]},{"index":1,"embedding":[2]}],"usage":{"prompt_tokens":3}}`,
			[]want{
				{kind: Done, result: `{"data":[{"embedding":[1],"index":0}],"model":"e5","object":"list","usage":{"prompt_tokens":1,"total_tokens":1}}`},
				{kind: Done, result: `{"data":[{"embedding":[2],"index":0},{"embedding":[3],"index":1}],"model":"e5","object":"list","usage":{"prompt_tokens":2,"total_tokens":2}}`},
			},
		},
		{
			"tensors",
			Model{Name: "m", Protocol: ProtocolOIP},
			batchOf(`{"inputs":[{"name":"i","shape":[1,2],"datatype":"FP32","data":[1,2]}]}`, `{"inputs":[{"name":"i","shape":[2,2],"datatype":"FP32","data":[[3,4],[5,6]]}]}`),
			`{"id":"BATCH","inputs":[{"name":"i","shape":[3,2],"datatype":"FP32","data":[1,2,3,4,5,6]}]}`,
			`{"model_name":"m","id":"x","outputs":[{"name":"o","shape":[3,1],"datatype":"FP32","data":[[7],[8],[9]]}]}`,
			[]want{
				{kind: Done, result: `{"id":"e1","model_name":"m","outputs":[{"name":"o","shape":[1,1],"datatype":"FP32","data":[7]}]}`},
				{kind: Done, result: `{"id":"e2","model_name":"m","outputs":[{"name":"o","shape":[2,1],"datatype":"FP32","data":[8,9]}]}`},
			},
		},
		{
			"tensors with ids of their own",
			Model{Name: "m", Protocol: ProtocolOIP},
			batchOf(`{"id":"mine","inputs":[{"name":"i","shape":[1],"datatype":"FP32","data":[1]}]}`,
				`{"id":null,"inputs":[{"name":"i","shape":[1],"datatype":"FP32","data":[2]}]}`),
			`{"id":"BATCH","inputs":[{"name":"i","shape":[2],"datatype":"FP32","data":[1,2]}]}`,
			`{"model_name":"m","id":"BATCH","outputs":[{"name":"o","shape":[2],"datatype":"FP32","data":[7,8]}]}`,
			[]want{
				{kind: Done, result: `{"id":"mine","model_name":"m","outputs":[{"name":"o","shape":[1],"datatype":"FP32","data":[7]}]}`},
				{kind: Done, result: `{"id":"e2","model_name":"m","outputs":[{"name":"o","shape":[1],"datatype":"FP32","data":[8]}]}`},
			},
		},
	} {
		t.Run(c.name, func(t *testing.T) {
			s := workertest.NewScript(t, workertest.Says(200, c.answer))
			a, b := batcher(t, c.model, s.URL)
			whole, err := b.Join(c.calls)
			if err != nil {
				t.Fatal(err)
			}
			outcomes := b.Split(c.calls, a.Submit(t.Context(), whole))
			if len(outcomes) != len(c.outcomes) {
				t.Fatalf("%d outcomes for %d calls", len(outcomes), len(c.calls))
			}
			for i, w := range c.outcomes {
				w.check(t, outcomes[i])
			}
			r := s.Requests()[0]
			if got := strings.ReplaceAll(r.Body, whole.Entry, "BATCH"); got != c.sent {
				t.Errorf("worker was sent\n%s, want\n%s", got, c.sent)
			}
			if r.Header.Get("Penstock-Entry") != whole.Entry || r.Header.Get("Penstock-Token") != fmt.Sprint(9+len(c.calls)) {
				t.Errorf("batch is named %q with token %s", r.Header.Get("Penstock-Entry"), r.Header.Get("Penstock-Token"))
			}
		})
	}
}

// A member of a batch that goes wrong as a whole is not charged for the others.
func TestInnocentMembersDoNotPayForABatch(t *testing.T) {
	calls := batchOf(`{"input":"x"}`, `{"input":"y"}`)
	_, b := batcher(t, embedding, "http://127.0.0.1:9")
	for name, whole := range map[string]Outcome{
		"rejected":       {Kind: Rejected, Class: ClassInput},
		"too big":        {Kind: Failed, Class: ClassOOM},
		"failed":         {Kind: Failed, Class: ClassTransient},
		"one missing":    done([]byte(`{"data":[{"index":0,"embedding":[1]}]}`), 200),
		"one too many":   done([]byte(`{"data":[{"index":0},{"index":1},{"index":2}]}`), 200),
		"not an answer":  done([]byte(`[]`), 200),
		"same one twice": done([]byte(`{"data":[{"index":0},{"index":0}]}`), 200),
	} {
		for _, o := range b.Split(calls, whole) {
			if !o.FreeOfCharge() || !o.Alone {
				t.Errorf("%s: got %s, alone %t", name, o.Kind, o.Alone)
			}
		}
	}
	// Alone, an entry pays for itself; and what is nobody's fault stays as it is.
	want{kind: Rejected, class: ClassInput}.check(t, b.Split(calls[:1], Outcome{Kind: Rejected, Class: ClassInput})[0])
	for _, kind := range []OutcomeKind{Busy, NotReady, Unknown, Cancelled} {
		if o := b.Split(calls, Outcome{Kind: kind})[1]; o.Kind != kind || o.Alone {
			t.Errorf("%s became %s", kind, o.Kind)
		}
	}
}

func TestWhoMayShareACall(t *testing.T) {
	at := time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	tensors := Model{Name: "m", Protocol: ProtocolOIP}
	sized := Model{Name: "m", Protocol: ProtocolGeneric, Batch: BatchLimits{Items: 8, ShapeField: "size", TokensField: "n"}}
	for _, c := range []struct {
		name  string
		model Model
		a, b  string
		share bool
	}{
		{"same size", sized, `{"size":512,"x":1}`, `{"x":2,"size":512}`, true},
		{"other size", sized, `{"size":512}`, `{"size":1024}`, false},
		{"embeddings", embedding, `{"input":"a"}`, `{"input":["b","c"]}`, true},
		{"embeddings of other width", embedding, `{"input":"a","dimensions":8}`, `{"input":"b","dimensions":16}`, false},
		{"tensors of other length", tensors, `{"inputs":[{"name":"i","shape":[1,2],"datatype":"FP32","data":[1,2]}]}`, `{"inputs":[{"name":"i","shape":[1,3],"datatype":"FP32","data":[1,2,3]}]}`, false},
		{"tensors of other count", tensors, `{"inputs":[{"name":"i","shape":[1,2],"datatype":"FP32","data":[1,2]}]}`, `{"inputs":[{"name":"i","shape":[2,2],"datatype":"FP32","data":[1,2,3,4]}]}`, true},
		{"other outputs wanted", tensors, `{"inputs":[{"name":"i","shape":[1],"datatype":"FP32","data":[1]}],"outputs":[{"name":"o"}]}`, `{"inputs":[{"name":"i","shape":[1],"datatype":"FP32","data":[1]}]}`, false},
	} {
		_, b := batcher(t, c.model, "http://127.0.0.1:9")
		calls := batchOf(c.a, c.b)
		first, err1 := b.Measure(calls[0], at)
		second, err2 := b.Measure(calls[1], at)
		if err := errors.Join(err1, err2); err != nil || (first.Shape == second.Shape) != c.share {
			t.Errorf("%s: shapes %q and %q (%v)", c.name, first.Shape, second.Shape, err)
		}
	}
	_, b := batcher(t, sized, "http://127.0.0.1:9")
	if m, err := b.Measure(batchOf(`{"n":77}`)[0], at); err != nil || m.Tokens != 77 || m.Bytes != 8 {
		t.Errorf("measured %+v, %v", m, err)
	}
	for _, c := range []struct {
		model   Model
		payload string
	}{
		{Model{Name: "m", Protocol: ProtocolOpenAI}, `{"messages":[]}`},
		{embedding, `{"input":[[1,2]]}`},
		{embedding, `{}`},
		{tensors, `{"inputs":[{"name":"sr","shape":[],"datatype":"INT64","data":[1]}]}`},
		{tensors, `{}`},
		{sized, `{`},
	} {
		_, b := batcher(t, c.model, "http://127.0.0.1:9")
		if _, err := b.Measure(Call{Payload: json.RawMessage(c.payload)}, at); err == nil {
			t.Errorf("%s may travel in a batch", c.payload)
		}
	}
	if _, ok := newAdapter(t, ocrSync, "http://127.0.0.1:9", 1).(BatchCodec); ok {
		t.Error("cog takes no batches: a prediction is one entry")
	}
}

func TestBatchIsNamedByItsMembers(t *testing.T) {
	one, again := joined(batchOf(`1`, `2`), nil), joined(batchOf(`1`, `2`), nil)
	other := batchOf(`1`, `2`)
	other[1].Token++
	if one.Entry != again.Entry || one.Entry == joined(other, nil).Entry || one.Entry == joined(batchOf(`1`), nil).Entry {
		t.Error("the same batch must have the same name, and no other")
	}
	calls := batchOf(`1`, `2`)
	calls[0].FinishBy = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC)
	if !joined(calls, nil).FinishBy.IsZero() {
		t.Error("a member without a deadline was given one")
	}
	calls[1].FinishBy = time.Date(2026, 3, 1, 12, 0, 0, 0, time.UTC).Add(time.Minute)
	if got := joined(calls, nil).FinishBy; !got.Equal(calls[1].FinishBy) {
		t.Errorf("deadline is %s, want the later one", got)
	}
}

// Whatever is joined comes back to its owner: the worker here negates each row.
func TestTensorsComeBackToTheirOwners(t *testing.T) {
	s := workertest.NewScript(t, func(w http.ResponseWriter, r *http.Request) {
		var body inferRequest
		text, _ := io.ReadAll(r.Body)
		if err := json.Unmarshal(text, &body); err != nil {
			workertest.Says(400, `{}`)(w, r)
			return
		}
		var values []int
		_ = json.Unmarshal(body.Inputs[0].Data, &values) // what is wrong with it shows below
		for i := range values {
			values[i] = -values[i]
		}
		data, _ := json.Marshal(values)
		body.Inputs[0].Data = data
		workertest.AnswerJSON(w, 200, map[string]any{"outputs": body.Inputs})
	})
	a, b := batcher(t, Model{Name: "m", Protocol: ProtocolOIP}, s.URL)
	rapid.Check(t, func(rt *rapid.T) {
		width := rapid.IntRange(1, 4).Draw(rt, "width")
		var payloads []string
		next := 1
		for range rapid.IntRange(1, 6).Draw(rt, "members") {
			rows := rapid.IntRange(1, 3).Draw(rt, "rows")
			values := make([]int, rows*width)
			for i := range values {
				values[i], next = next, next+1
			}
			data, _ := json.Marshal(values)
			payloads = append(payloads, fmt.Sprintf(`{"inputs":[{"name":"i","shape":[%d,%d],"datatype":"INT64","data":%s}]}`, rows, width, data))
		}
		calls := batchOf(payloads...)
		whole, err := b.Join(calls)
		if err != nil {
			rt.Fatal(err)
		}
		next = 1
		for i, o := range b.Split(calls, a.Submit(t.Context(), whole)) {
			var reply struct{ Outputs []tensor }
			var values []int
			if o.Kind != Done || json.Unmarshal(o.Result, &reply) != nil || json.Unmarshal(reply.Outputs[0].Data, &values) != nil {
				rt.Fatalf("member %d: %s %s", i, o.Kind, o.Reason)
			}
			for _, v := range values {
				if v != -next {
					rt.Fatalf("member %d got %d, want %d", i, v, -next)
				}
				next++
			}
		}
	})
}

// A list of 100,000 brackets is a payload of 200 KB; it must not cost more than its length.
func TestDeeplyNestedTensorIsRefusedAtOnce(t *testing.T) {
	deep := strings.Repeat("[", 9000) + "1" + strings.Repeat("]", 9000)
	if _, err := flatten(json.RawMessage(deep), 2, 1); err == nil || !strings.Contains(err.Error(), "2 dimensions") {
		t.Errorf("got %v", err)
	}
	wide := "[" + strings.Repeat("0,", 100_000) + "0]"
	if _, err := flatten(json.RawMessage(wide), 1, 8); err == nil || !strings.Contains(err.Error(), "8 values") {
		t.Errorf("got %v", err)
	}
}

func TestFlattenKeepsValuesAsTheyAre(t *testing.T) {
	for data, want := range map[string]string{
		`[[1, 2.50],[3e5 ,-4]]`:         `1|2.50|3e5|-4`,
		`["a,]b","\\\"[c",true , null]`: `"a,]b"|"\\\"[c"|true|null`,
		`[ ]`:                           ``,
	} {
		flat, err := flatten(json.RawMessage(data), 2, 10)
		if err != nil {
			t.Fatal(data, err)
		}
		var texts []string
		for _, v := range flat {
			texts = append(texts, string(v))
		}
		if got := strings.Join(texts, "|"); got != want {
			t.Errorf("%s gave %s, want %s", data, got, want)
		}
	}
}
