package main

import (
	"bufio"
	"context"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/penstock/penstock/pkg/inference"
	"github.com/penstock/penstock/pkg/worker"
)

// eventsOf writes the events of a stream on one line, without their ids.
func eventsOf(text string) string {
	var list []string
	for event := range strings.SplitSeq(text, "\n\n") {
		var name, data string
		for line := range strings.SplitSeq(event, "\n") {
			if rest, is := strings.CutPrefix(line, "event: "); is {
				name = rest
			} else if rest, is := strings.CutPrefix(line, "data: "); is {
				data += rest
			}
		}
		if name != "" {
			list = append(list, name+":"+data)
		}
	}
	return strings.Join(list, " ")
}

// streamed is an open stream of a prediction.
type streamed struct {
	t      *testing.T
	answer *http.Response
	lines  *bufio.Reader
	close  context.CancelFunc
}

func openStream(t *testing.T, address, last string) *streamed {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, address, nil)
	if err != nil {
		t.Fatal(err)
	}
	if last != "" {
		request.Header.Set("Last-Event-ID", last)
	}
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		cancel()
		answer.Body.Close()
	})
	return &streamed{t, answer, bufio.NewReader(answer.Body), cancel}
}

// next reads the next event and its id; io.EOF ends the stream.
func (s *streamed) next() (event, id string) {
	s.t.Helper()
	var text strings.Builder
	for {
		line, err := s.lines.ReadString('\n')
		if err != nil {
			return "", ""
		}
		if rest, is := strings.CutPrefix(line, "id: "); is {
			id = strings.TrimSpace(rest)
		}
		text.WriteString(line)
		if line != "\n" {
			continue
		}
		if event = eventsOf(text.String()); event != "" {
			return event, id
		}
		text.Reset()
	}
}

func (s *streamed) rest() string {
	s.t.Helper()
	text, err := io.ReadAll(s.lines)
	if err != nil {
		s.t.Fatal(err)
	}
	return eventsOf(string(text))
}

const streaming = `{"version":"m","stream":true,"input":{"prompt":"x","chunks":3}}`

// The head of a stream comes before there is output.
func TestStreamBeginsBeforeItsPrediction(t *testing.T) {
	t.Parallel()
	s := newSite(t, 1)
	f := s.startGateway(nil)
	_, p := f.predict(t, "/v1/predictions", streaming) // there is no node that runs it
	stream := openStream(t, p.URLs.Stream, "")
	if kind := stream.answer.Header.Get("Content-Type"); stream.answer.StatusCode != 200 || kind != "text/event-stream" {
		t.Errorf("got %d %s", stream.answer.StatusCode, kind)
	}
	f.call(t, "POST", "/v1/predictions/"+p.ID+"/cancel", nil, &p)
	if rest := stream.rest(); rest != `done:{"reason":"canceled"}` {
		t.Errorf("got %s", rest)
	}
}

func TestStreamGoesOnBehindTheLastEvent(t *testing.T) {
	t.Parallel()
	s := newSite(t, 1)
	f := s.startGateway(nil)
	s.startNode(2)
	_, p := f.predict(t, "/v1/predictions", streaming, "Prefer", "wait=30")
	first := openStream(t, p.URLs.Stream, "")
	var ids []string
	for _, want := range []string{"output:t0", "output:t1", "output:t2", "done:{}"} {
		event, id := first.next()
		if event != want || id == "" {
			t.Fatalf("got %s with id %q, want %s", event, id, want)
		}
		ids = append(ids, id)
	}
	for i, want := range []string{"output:t1 output:t2 done:{}", "output:t2 done:{}", "done:{}"} {
		if rest := openStream(t, p.URLs.Stream, ids[i]).rest(); rest != want {
			t.Errorf("behind %s: got %s, want %s", ids[i], rest, want)
		}
	}
	if status := openStream(t, p.URLs.Stream, ids[3]).answer.StatusCode; status != http.StatusNoContent {
		t.Errorf("behind the end: got %d", status)
	}
	_, other := f.predict(t, "/v1/predictions", streaming, "Prefer", "wait=30")
	all := openStream(t, other.URLs.Stream, "")
	event, id := all.next()
	for event != "" && event != "done:{}" {
		event, id = all.next()
	}
	ids = append(ids, id)
	for _, id := range []string{"of another server", "1-2-3", ids[4]} { // of an earlier version, of another prediction
		answer := openStream(t, p.URLs.Stream, id).answer
		text, err := io.ReadAll(answer.Body)
		if answer.StatusCode != http.StatusBadRequest || !strings.Contains(string(text), "Last-Event-ID") || err != nil {
			t.Errorf("an id that is not known: got %d %s, %v", answer.StatusCode, text, err)
		}
	}
}

// Events of an answer that are no text, as those of a call of a tool, are no output: it comes whole at the end.
func TestStreamOfAnAnswerWithoutText(t *testing.T) {
	t.Parallel()
	s := newSite(t, 1)
	f := s.startGateway(nil)
	s.startNode(2)
	_, p := f.predict(t, "/v1/predictions",
		`{"version":"m","stream":true,"input":{"prompt":"x","tools":[{"type":"function"}]}}`)
	rest := openStream(t, p.URLs.Stream, "").rest()
	if n := s.count(`SELECT count(*) FROM penstock.output`); n == 0 {
		t.Error("the answer was not streamed")
	}
	if !strings.HasPrefix(rest, "output:{") || !strings.Contains(rest, "tool_calls") || !strings.HasSuffix(rest, " done:{}") {
		t.Errorf("got %s", rest)
	}
}

// Behind the texts of an answer that calls a tool comes what the stream did not have: the result without the texts.
func TestStreamOfTextAndACallOfATool(t *testing.T) {
	t.Parallel()
	s := newSite(t, 1)
	f := s.startGateway(nil)
	s.startNode(2)
	_, p := f.predict(t, "/v1/predictions",
		`{"version":"m","stream":true,"input":{"prompt":"x","chunks":2,"tools":[{"type":"function"}]}}`)
	first := openStream(t, p.URLs.Stream, "")
	var ids []string
	for _, want := range []string{"output:t0", "output:t1", "output:{", "done:{}"} {
		event, id := first.next()
		if !strings.HasPrefix(event, want) || id == "" {
			t.Fatalf("got %s with id %q, want %s", event, id, want)
		}
		if want == "output:{" && (!strings.Contains(event, `"name":"weather"`) || strings.Contains(event, "t0")) {
			t.Errorf("behind the texts: got %s", event)
		}
		ids = append(ids, id)
	}
	if rest := openStream(t, p.URLs.Stream, ids[1]).rest(); !strings.HasPrefix(rest, `output:{"choices"`) {
		t.Errorf("behind the last text: got %s", rest)
	}
	if rest := openStream(t, p.URLs.Stream, ids[2]).rest(); rest != "done:{}" {
		t.Errorf("behind the call of the tool: got %s", rest)
	}
	// A log that lacks a text is told here too.
	s.exec(`UPDATE penstock.output SET data = convert_to(replace(convert_from(data, 'UTF8'), 't1', ''), 'UTF8')`)
	if rest := openStream(t, p.URLs.Stream, "").rest(); !strings.HasPrefix(rest, "output:t0 error:") {
		t.Errorf("a log with a gap: got %s", rest)
	}
}

// The texts of generate_stream come as they are made, and the stream is that of the result.
func TestStreamOfTheOpenInferenceProtocol(t *testing.T) {
	t.Parallel()
	s := newSite(t, 1)
	ctx, by := t.Context(), inference.By{Reason: "test"}
	_, err := inference.RegisterModel(ctx, s.pool, worker.Model{
		Name: "g", Protocol: worker.ProtocolOIP, Operation: worker.OperationGenerate, Stream: true,
	}, by)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := inference.RegisterInstance(ctx, s.pool, "g", "gpu-g", s.gpu.URL, 1, nil, by); err != nil {
		t.Fatal(err)
	}
	f := s.startGateway(nil)
	s.startNode(2)
	_, p := f.predict(t, "/v1/predictions", `{"version":"g","input":{"text_input":"x","chunks":3}}`)
	if rest := openStream(t, p.URLs.Stream, "").rest(); rest != "output:t0 output:t1 output:t2 done:{}" {
		t.Errorf("got %s", rest)
	}
	// What a client had on an earlier connection is counted: a log that is not whole is told.
	first := openStream(t, p.URLs.Stream, "")
	_, id := first.next()
	s.exec(`UPDATE penstock.output SET data = convert_to(replace(convert_from(data, 'UTF8'), 't2', ''), 'UTF8')`)
	if rest := openStream(t, p.URLs.Stream, id).rest(); !strings.HasPrefix(rest, "output:t1 error:") {
		t.Errorf("a log with a gap: got %s", rest)
	}
}

// A run that is broken off and begins anew does not add to what clients have of its first output.
func TestStreamOfARunThatBeganAnew(t *testing.T) {
	t.Parallel()
	s := newSite(t, 1)
	f := s.startGateway(nil)
	_, p := f.predict(t, "/v1/predictions", streaming)
	s.output(p.ID, 11, 1, "once", " upon")
	before := openStream(t, p.URLs.Stream, "")
	if event, _ := before.next(); event != "output:once" {
		t.Fatalf("got %s", event)
	}
	_, have := before.next()
	s.output(p.ID, 12, 1, "in", " a")
	event, id := before.next()
	if !strings.HasPrefix(event, "error:") {
		t.Errorf("got %s", event)
	}
	if rest := before.rest(); rest != `done:{"reason":"error"}` {
		t.Errorf("got %s", rest)
	}
	if event, _ := openStream(t, p.URLs.Stream, id).next(); event != "output:in" {
		t.Errorf("behind the error: got %s", event)
	}
	if event, _ := openStream(t, p.URLs.Stream, have).next(); !strings.HasPrefix(event, "error:") {
		t.Errorf("behind an event of the first run: got %s", event)
	}
	if event, _ := openStream(t, p.URLs.Stream, "").next(); event != "output:in" {
		t.Errorf("from the beginning: got %s", event)
	}
}

// output adds a piece of output of a prediction's entry, as a run would.
func (s *site) output(prediction string, token, seq int, texts ...string) {
	s.Helper()
	var data strings.Builder
	for _, text := range texts {
		data.WriteString(`data: {"choices":[{"index":0,"delta":{"content":"` + text + `"}}]}` + "\n\n")
	}
	s.exec(`INSERT INTO penstock.output (queue_id, entry_id, token, attempt, seq, data)
	        SELECT queue_id, entry_id, $2, 1, $3, convert_to($4, 'UTF8') FROM penstock.prediction WHERE id = $1`,
		prediction, token, seq, data.String())
}

// A stream is a request in flight of the client whose prediction it is, and ends with its token.
func TestStreamsCountInTheLimitsOfTheirToken(t *testing.T) {
	t.Parallel()
	s := newSite(t, 1)
	s.token("reader", "{}", "{}")
	s.exec(`SELECT penstock.set_gateway_token('reader', in_flight => 1, reason => 'test')`)
	f := s.startGateway(func(c *Config) { c.Gateway.Open = false })
	p := f.make(t, "reader", "/v1/predictions", "application/json", streaming)
	stream := openStream(t, p.URLs.Stream, "")
	if again := openStream(t, p.URLs.Stream, ""); again.answer.StatusCode != http.StatusTooManyRequests {
		t.Errorf("a second stream: got %d", again.answer.StatusCode)
	}
	if status, _ := f.as(t, "reader", "GET", "/v1/predictions/"+p.ID, "", ""); status != http.StatusTooManyRequests {
		t.Errorf("a request beside the stream: got %d", status)
	}
	stream.close()
	s.eventually("the stream counts no more", func() bool {
		status, _ := f.as(t, "reader", "GET", "/v1/predictions/"+p.ID, "", "")
		return status == http.StatusOK
	})
	s.exec(`UPDATE penstock.api_token SET revoked_at = now() WHERE name = 'reader'`)
	s.eventually("no stream is read with a token that is revoked", func() bool {
		return openStream(t, p.URLs.Stream, "").answer.StatusCode == http.StatusForbidden
	})
}

// A stream ends with the next event once its client has no valid token: the event is not sent.
func TestStreamEndsWithTheTokenOfItsClient(t *testing.T) {
	t.Parallel()
	s := newSite(t, 1)
	s.token("reader", "{}", "{}")
	f := s.startGateway(func(c *Config) { c.Gateway.Open = false })
	p := f.make(t, "reader", "/v1/predictions", "application/json", streaming)
	s.output(p.ID, 11, 1, "once")
	stream := openStream(t, p.URLs.Stream, "")
	if event, _ := stream.next(); event != "output:once" {
		t.Fatalf("got %s", event)
	}
	s.exec(`UPDATE penstock.api_token SET revoked_at = now() WHERE name = 'reader'`)
	s.eventually("the gateway knows that the token is revoked", func() bool {
		return openStream(t, p.URLs.Stream, "").answer.StatusCode == http.StatusForbidden
	})
	s.output(p.ID, 11, 2, " upon")
	if event, _ := stream.next(); !strings.HasPrefix(event, "error:") || !strings.Contains(event, "no token") {
		t.Fatalf("behind the revocation: got %s", event)
	}
	if rest := stream.rest(); rest != `done:{"reason":"error"}` {
		t.Errorf("behind the error: got %s", rest)
	}
}
