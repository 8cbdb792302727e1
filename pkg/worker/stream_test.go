package worker

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/penstock/penstock/pkg/worker/workertest"
)

// log is a sink in memory. gate, when set, holds every append back.
type log struct {
	mu     sync.Mutex
	chunks []Chunk
	gate   chan struct{}
	err    error
}

func (l *log) Append(ctx context.Context, c Chunk) error {
	if l.gate != nil {
		select {
		case <-l.gate:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.chunks = append(l.chunks, c)
	return l.err
}

func (l *log) count() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return len(l.chunks)
}

func (l *log) text() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	var b strings.Builder
	for _, c := range l.chunks {
		b.Write(c.Data)
	}
	return b.String()
}

func streams(events ...string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
		for _, e := range events {
			_, _ = io.WriteString(w, e)
			_ = http.NewResponseController(w).Flush()
		}
	}
}

func token(text string) string {
	return `data: {"id":"c1","object":"chat.completion.chunk","created":5,"model":"llama","choices":[{"index":0,"delta":{"content":` + string(quote(text)) + `},"finish_reason":null}]}` + "\n\n"
}

const (
	stopEvent = `data: {"id":"c1","choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}` + "\n\n"
	doneEvent = "data: [DONE]\n\n"
)

func streamModel() Model {
	return Model{
		Name: "llama", Protocol: ProtocolOpenAI, Stream: true, MaxResponseBytes: 64 << 10,
		Timeouts: Timeouts{Run: Seconds(5 * time.Minute), NoProgress: Seconds(time.Minute)},
	}
}

// impatientModel is for streams that stall: the pieces of others may take as long on a busy machine.
func impatientModel() Model {
	m := streamModel()
	m.Timeouts.NoProgress = Seconds(2 * time.Second)
	return m
}

func TestStreamContract(t *testing.T) {
	cut := func(events ...string) http.HandlerFunc {
		return func(w http.ResponseWriter, r *http.Request) {
			streams(events...)(w, r)
			hijackAfterFlush(w)
		}
	}
	stall := func(w http.ResponseWriter, r *http.Request) {
		streams(token("a"))(w, r)
		workertest.Hangs(w, r)
	}
	endless := func(w http.ResponseWriter, r *http.Request) {
		for range 4000 {
			streams(token(strings.Repeat("x", 100)))(w, r)
		}
	}
	const whole = `{"choices":[{"finish_reason":"stop","index":0,"message":{"content":"Hello","role":"assistant"}}],"created":5,"id":"c1","model":"llama","object":"chat.completion"}`
	for _, c := range []contract{
		{"done", streams(token("Hel"), token("lo"), stopEvent, doneEvent), want{kind: Done, result: whole}},
		{"done, CRLF and comments", streams(": ping\r\n\r\n", strings.ReplaceAll(token("Hello"), "\n", "\r\n"), stopEvent, doneEvent), want{kind: Done, result: whole}},
		{"done, with a null error", streams(strings.Replace(token("Hello"), `{"id"`, `{"error":null,"id"`, 1), stopEvent, doneEvent), want{kind: Done, result: whole}},
		{"done without [DONE]", streams(token("Hello"), stopEvent), want{kind: Done, result: whole}},
		{"ends without a finish", streams(token("Hello")), want{kind: Unknown}},
		{"ends inside an event", streams(token("Hello"), "data: {\"cho"), want{kind: Unknown}},
		{"connection cut", cut(token("Hello")), want{kind: Unknown}},
		{"stalls", stall, want{kind: Unknown}},
		{"no choice at all", streams(doneEvent), want{kind: Failed, class: ClassTransient}},
		{"SGLang: first event is a refusal", streams(`data: {"error":{"message":"The request queue is full."},"code":503}`+"\n\n", doneEvent), want{kind: Busy, class: ClassBusy}},
		{"refusal of the input", streams(`data: {"error":{"message":"context too long","code":400}}` + "\n\n"), want{kind: Rejected, class: ClassInput}},
		{"error event before output", streams("event: error\ndata: {\"error\":\"CUDA out of memory\"}\n\n"), want{kind: Failed, class: ClassOOM}},
		{"error after output", streams(token("Hel"), `data: {"error":{"message":"boom","code":503}}`+"\n\n"), want{kind: Failed, class: ClassTransient}},
		{"context lost after output", streams(token("Hel"), `data: {"error":"CUDA error: unspecified launch failure"}`+"\n\n"), want{kind: Failed, class: ClassContextLost}},
		{"not JSON", streams("data: {nonsense\n\n"), want{kind: Failed, class: ClassTransient}},
		{"absurd index", streams(`data: {"choices":[{"index":999999999,"text":"x"}]}` + "\n\n"), want{kind: Failed, class: ClassTransient}},
		{"endless", endless, want{kind: Failed, class: ClassInput}},
		{"not a stream after all", workertest.Says(200, `{"choices":[]}`), want{kind: Done, result: `{"choices":[]}`}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := workertest.NewScript(t, c.answer)
			call, model := testCall(`{"messages":[]}`), streamModel()
			if c.name == "stalls" {
				model = impatientModel()
			}
			call.Output = &log{}
			c.want.check(t, newAdapter(t, model, s.URL, 1).Submit(t.Context(), call))
		})
	}
}

// hijackAfterFlush cuts the connection in the middle of a chunked body.
func hijackAfterFlush(http.ResponseWriter) { panic(http.ErrAbortHandler) }

func TestStalledStreamSaysWhy(t *testing.T) {
	s := workertest.NewScript(t, func(w http.ResponseWriter, r *http.Request) {
		streams(token("a"))(w, r)
		workertest.Hangs(w, r)
	})
	o := newAdapter(t, impatientModel(), s.URL, 1).Submit(t.Context(), testCall(`{}`))
	if !errors.Is(o.Err, ErrNoProgress) {
		t.Errorf("error is %v, want ErrNoProgress", o.Err)
	}
}

// slowStream is a transport whose answer is a stream of pieces, each of which takes so long, until the call ends.
type slowStream struct {
	takes  time.Duration
	pieces []string
	call   context.Context
}

func (s *slowStream) RoundTrip(r *http.Request) (*http.Response, error) {
	_, _ = io.Copy(io.Discard, r.Body)
	r.Body.Close()
	s.call = r.Context()
	return &http.Response{
		StatusCode: 200, Header: http.Header{"Content-Type": {"text/event-stream"}},
		Body: io.NopCloser(s), ContentLength: -1,
		Request: r, Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
	}, nil
}

func (s *slowStream) Read(p []byte) (int, error) {
	if len(s.pieces) == 0 {
		return 0, io.EOF
	}
	time.Sleep(s.takes)
	if s.call.Err() != nil {
		return 0, s.call.Err()
	}
	n := copy(p, s.pieces[0])
	if s.pieces[0] = s.pieces[0][n:]; s.pieces[0] == "" {
		s.pieces = s.pieces[1:]
	}
	return n, nil
}

func TestSlowStreamIsNotStalled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		pieces := append(slices.Repeat([]string{token("a")}, 6), stopEvent, doneEvent)
		slow := &slowStream{takes: 1900 * time.Millisecond, pieces: pieces} // each within the limit of 2 s
		o := answering(t, impatientModel(), slow).Submit(t.Context(), testCall(`{}`))
		if o.Kind != Done || !bytes.Contains(o.Result, []byte(`"aaaaaa"`)) {
			t.Errorf("got %s %s (%s)", o.Kind, o.Result, o.Reason)
		}
	})
}

// A router keeps the connection to its client alive also while the engine behind it has stopped.
func TestASignOfLifeIsNoPieceOfAStream(t *testing.T) {
	for name, c := range map[string]struct {
		pieces []string
		stalls bool
	}{
		"after a piece":          {append([]string{token("a")}, slices.Repeat([]string{": keep-alive\n\n"}, 9)...), true},
		"empty lines":            {append([]string{token("a")}, slices.Repeat([]string{"\n"}, 9)...), true},
		"before the first piece": {[]string{": accepted\n\n", "", "", token("a"), stopEvent, doneEvent}, false},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				slow := &slowStream{takes: 1900 * time.Millisecond, pieces: c.pieces}
				o := answering(t, impatientModel(), slow).Submit(t.Context(), testCall(`{}`))
				if stalled := errors.Is(o.Err, ErrNoProgress); stalled != c.stalls || !stalled && o.Kind != Done {
					t.Errorf("got %s (%s)", o.Kind, o.Reason)
				}
			})
		})
	}
}

func TestOutputHoldsTheWholeStream(t *testing.T) {
	events := []string{}
	for i := range 200 {
		events = append(events, token(fmt.Sprintf("word-%03d ", i)))
	}
	s := workertest.NewScript(t, streams(append(events, stopEvent, doneEvent)...))
	call, out := testCall(`{}`), &log{}
	call.Output = out
	if o := newAdapter(t, streamModel(), s.URL, 1).Submit(t.Context(), call); o.Kind != Done {
		t.Fatalf("got %s: %s", o.Kind, o.Reason)
	}
	if got, want := out.text(), strings.Join(events, "")+stopEvent; got != want {
		t.Errorf("output differs: %d bytes, want %d", len(got), len(want))
	}
	for i, c := range out.chunks {
		if c.Seq != i+1 {
			t.Errorf("chunk %d is numbered %d", i+1, c.Seq)
		}
		if !bytes.HasSuffix(c.Data, []byte("\n\n")) {
			t.Errorf("chunk %d ends inside an event", c.Seq)
		}
	}
}

func TestStreamMakesTwoChunksASecond(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		out := &log{}
		c := newChunker(t.Context(), out)
		for range 1000 { // one small frame a millisecond
			c.Write([]byte("x"))
			time.Sleep(time.Millisecond)
		}
		synctest.Wait() // half a second may have ended just now
		slow := out.count()
		c.Write(bytes.Repeat([]byte("y"), chunkBytes))
		synctest.Wait()
		if grown := out.count(); grown != slow+1 {
			t.Errorf("a full chunk was not written at once")
		}
		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
		if slow < 2 || slow > 3 {
			t.Errorf("1 s of small frames made %d chunks, want 2 or 3", slow)
		}
		if got := len(out.text()); got != 1000+chunkBytes {
			t.Errorf("%d bytes arrived, want %d", got, 1000+chunkBytes)
		}
	})
}

func TestSlowReaderDoesNotSlowTheStream(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		out := &log{gate: make(chan struct{})}
		c := newChunker(t.Context(), out)
		began := time.Now()
		for range 10 {
			c.Write(bytes.Repeat([]byte("y"), chunkBytes))
		}
		if took := time.Since(began); took != 0 {
			t.Errorf("writing waited %s for the sink", took)
		}
		close(out.gate)
		if err := c.Close(); err != nil || len(out.text()) != 10*chunkBytes {
			t.Errorf("got %d bytes, error %v", len(out.text()), err)
		}
	})
}

func TestWhatGatheredBeforeASlowSinkGoesOutInPiecesThatItTakes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		out := &log{gate: make(chan struct{})}
		c := newChunker(t.Context(), out)
		frame := append(bytes.Repeat([]byte("y"), 300<<10), "\n\n"...)
		for range 10 {
			c.Write(frame)
		}
		close(out.gate)
		if err := c.Close(); err != nil {
			t.Fatal(err)
		}
		var all []byte
		for i, chunk := range out.chunks {
			if all = append(all, chunk.Data...); chunk.Seq != i+1 || len(chunk.Data) > ChunkBytesMax || len(chunk.Data)%len(frame) != 0 {
				t.Errorf("chunk %d has number %d and %d bytes", i, chunk.Seq, len(chunk.Data))
			}
		}
		if !bytes.Equal(all, bytes.Repeat(frame, 10)) {
			t.Errorf("%d bytes arrived of %d", len(all), 10*len(frame))
		}
	})
}

func TestHangingSinkIsLeftBehind(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := newChunker(t.Context(), &log{gate: make(chan struct{})})
		c.Write([]byte("x"))
		began := time.Now()
		err := c.Close()
		if took := time.Since(began); !errors.Is(err, context.Canceled) || took > closeMax {
			t.Errorf("closed after %s with %v", took, err)
		}
	})
}

func TestBrokenSinkDoesNotLoseTheResult(t *testing.T) {
	s := workertest.NewScript(t, streams(token("Hello"), stopEvent, doneEvent))
	call, disk := testCall(`{}`), errors.New("disk full")
	call.Output = &log{err: disk}
	o := newAdapter(t, streamModel(), s.URL, 1).Submit(t.Context(), call)
	if o.Kind != Done || !errors.Is(o.Err, disk) {
		t.Errorf("got %s, %v", o.Kind, o.Err)
	}
}

func TestToolCallsAndUsageAreAssembled(t *testing.T) {
	part := func(body string) string { return "data: " + body + "\n\n" }
	s := workertest.NewScript(t, streams(
		part(`{"id":"c2","choices":[{"index":0,"delta":{"role":"assistant","tool_calls":[{"index":0,"id":"t1","type":"function","function":{"name":"get","arguments":"{\"a\""}}]}}]}`),
		part(`{"id":"c2","choices":[{"index":0,"delta":{"tool_calls":[{"index":0,"function":{"arguments":":1}"}}]},"finish_reason":"tool_calls"}]}`),
		part(`{"id":"c2","choices":[],"usage":{"prompt_tokens":3,"completion_tokens":5}}`),
		doneEvent,
	))
	o := newAdapter(t, streamModel(), s.URL, 1).Submit(t.Context(), testCall(`{}`))
	var got any
	if err := json.Unmarshal(o.Result, &got); err != nil {
		t.Fatal(err, o.Reason)
	}
	const want = `{"choices":[{"finish_reason":"tool_calls","index":0,"message":{"content":"","role":"assistant","tool_calls":[{"function":{"arguments":"{\"a\":1}","name":"get"},"id":"t1","type":"function"}]}}],"id":"c2","usage":{"prompt_tokens":3,"completion_tokens":5}}`
	if string(o.Result) != want {
		t.Errorf("got  %s\nwant %s", o.Result, want)
	}
}

func FuzzEvents(f *testing.F) {
	f.Add([]byte("data: {\"a\":1}\n\n: c\r\n\r\nevent: error\ndata: x\ndata: y\n\ndata"))
	f.Fuzz(func(t *testing.T, stream []byte) {
		const limit = 1 << 16
		events := newEvents(bytes.NewReader(stream), limit)
		for total := 0; ; {
			e, err := events.next()
			if err != nil {
				return
			}
			if total += len(e.data); total > limit {
				t.Fatalf("events hold %d bytes of a stream limited to %d", total, limit)
			}
			again, err := newEvents(bytes.NewReader(e.frame()), 2*limit+100).next()
			if err != nil || !bytes.Equal(again.data, bytes.TrimRight(e.data, "\r")) && !bytes.Equal(again.data, e.data) {
				t.Fatalf("frame of %q reads back as %q, %v", e.data, again.data, err)
			}
		}
	})
}

// Whatever a server streams, the limit on its answer bounds what is kept of it: names count as well as values.
func TestEverythingThatIsKeptOfAStreamCounts(t *testing.T) {
	long := strings.Repeat("x", 1000)
	for name, object := range map[string]string{
		"names of members":            `{"%s%d":1}`,
		"names of members of choices": `{"choices":[{"%s%d":1}]}`,
		"names of members of deltas":  `{"choices":[{"delta":{"%s%d":1}}]}`,
		"reasons":                     `{"choices":[{"finish_reason":"%s","index":%d}]}`,
		"choices' texts":              `{"choices":[{"text":"%s","index":%d}]}`,
	} {
		whole := newAssembly(1)
		for i := range 100 {
			if err := whole.add(fmt.Appendf(nil, object, long, i)); err != nil {
				t.Fatal(err)
			}
		}
		if whole.bytes < 100_000 {
			t.Errorf("%s: 100 of 1000 bytes count as %d", name, whole.bytes)
		}
	}
	filled := newAssembly(1)
	for i := range 16 {
		last := fmt.Appendf(nil, `{"choices":[{"index":%d,"delta":{"tool_calls":[{"index":1023}]}}]}`, 64*i)
		if err := filled.add(last); err != nil {
			t.Fatal(err)
		}
	}
	if n := int64(len(filled.outcome().Result)); filled.bytes < n {
		t.Errorf("%d bytes with the choices and calls of tools before those that were sent count as %d", n, filled.bytes)
	}
	whole := newAssembly(1)
	for range 100 {
		if err := whole.add([]byte(`{"id":"c1","usage":{"note":"` + long + `"}}`)); err != nil {
			t.Fatal(err)
		}
	}
	if whole.bytes > 2000 {
		t.Errorf("what is replaced counts as %d bytes", whole.bytes)
	}
}
