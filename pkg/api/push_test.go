package api

import (
	"bytes"
	"compress/gzip"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"runtime"
	"strings"
	"sync/atomic"
	"testing"
	"testing/iotest"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
)

// served is an API behind a real server, with a queue called work.
type served struct {
	*httptest.Server
	t    *testing.T
	api  *API
	pool *pgxpool.Pool
}

func serve(t *testing.T, cfg Config, queue invalidation.Config) *served {
	t.Helper()
	pool := pgtest.New(t)
	if _, err := invalidation.Create(t.Context(), pool, "work", queue); err != nil {
		t.Fatal(err)
	}
	cfg.Open = true
	if cfg.Log == nil {
		cfg.Log = slog.New(slog.NewTextHandler(t.Output(), nil))
	}
	s := &served{t: t, api: New(pool, cfg), pool: pool}
	s.Server = httptest.NewServer(s.api)
	t.Cleanup(s.Close)
	return s
}

// reply is an answer that has been read.
type reply struct {
	StatusCode int
	Header     http.Header
}

func (s *served) post(body io.Reader, header ...string) (reply, string) {
	s.t.Helper()
	r, err := http.NewRequestWithContext(s.t.Context(), "POST", s.URL+pushTo, body)
	if err != nil {
		s.t.Fatal(err)
	}
	for i := 0; i+1 < len(header); i += 2 {
		r.Header.Set(header[i], header[i+1])
	}
	answer, err := s.Client().Do(r)
	if err != nil {
		s.t.Fatal(err)
	}
	defer answer.Body.Close()
	text, err := io.ReadAll(answer.Body)
	if err != nil {
		s.t.Fatal(err)
	}
	return reply{answer.StatusCode, answer.Header}, string(text)
}

func (s *served) count() (n int) {
	s.t.Helper()
	if err := s.pool.QueryRow(s.t.Context(), `SELECT count(*) FROM penstock.entry`).Scan(&n); err != nil {
		s.t.Fatal(err)
	}
	return n
}

const pushTo = "/v1/queues/work/entries"

var ndjson = []string{"Content-Type", "application/x-ndjson"}

func summaryOf(t *testing.T, text string) Streamed {
	t.Helper()
	var end struct{ Summary Streamed }
	if err := json.Unmarshal([]byte(text), &end); err != nil {
		t.Fatalf("%v: %s", err, text)
	}
	return end.Summary
}

func TestStreamRefusesLinesOneByOne(t *testing.T) {
	s := serve(t, Config{}, invalidation.Config{PayloadLimit: 1000})
	body := `{"payload": 1}

{"payload": 2, "priority": 10}
{"payload": 3, "nonsense": 1}
no JSON
{"payload": "` + strings.Repeat("x", 2000) + `"}
[{"payload": 4}]
{"payload": "\u0000"}
{"payload": 5}`
	answer, text := s.post(strings.NewReader(body), ndjson...)
	sum := summaryOf(t, text)
	if answer.StatusCode != 200 || sum.Lines != 8 || sum.Inserted != 2 || sum.Refused != 6 || sum.NextLine != 0 {
		t.Errorf("%d %s", answer.StatusCode, text)
	}
	var got []string
	for _, e := range sum.Errors {
		got = append(got, fmt.Sprint(e.Line, " ", e.Code))
		if strings.Contains(e.Detail, "(entry") || e.Detail == "" {
			t.Errorf("detail of line %d: %s", e.Line, e.Detail)
		}
	}
	if want := "3 invalid,4 invalid,5 malformed,6 payload_too_large,7 malformed,8 invalid"; strings.Join(got, ",") != want {
		t.Errorf("errors: %v, want %s", got, want)
	}
	if n := s.count(); n != 2 {
		t.Errorf("%d entries, want 2", n)
	}
}

func TestStreamAnswersEachLineWhileMoreIsSent(t *testing.T) {
	s := serve(t, Config{}, invalidation.Config{})
	in, out := io.Pipe()
	r, err := http.NewRequestWithContext(t.Context(), "POST", s.URL+pushTo, in)
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Content-Type", "application/x-ndjson")
	r.Header.Set("Accept", "application/x-ndjson")
	go func() { _, _ = io.WriteString(out, `{"payload": 1}`+"\n") }()
	answer, err := s.Client().Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	lines := json.NewDecoder(answer.Body)
	var first, second struct {
		Line, ID int64
		Verdict  string
		Code     string
	}
	if err := lines.Decode(&first); err != nil || first.Line != 1 || first.ID == 0 || first.Verdict != "inserted" {
		t.Fatalf("first answer: %+v (%v)", first, err)
	}
	go func() { _, _ = io.WriteString(out, "{}\n"); out.Close() }()
	if err := lines.Decode(&second); err != nil || second.Line != 2 || second.Code != "invalid" {
		t.Errorf("second answer: %+v (%v)", second, err)
	}
	var end struct{ Summary Streamed }
	if err := lines.Decode(&end); err != nil || end.Summary.Inserted != 1 || end.Summary.Refused != 1 {
		t.Errorf("end: %+v (%v)", end, err)
	}
}

func TestStreamSentAgainUnderItsKeyIsReplayed(t *testing.T) {
	s := serve(t, Config{}, invalidation.Config{})
	key := append(ndjson, "Idempotency-Key", "k")
	s.post(strings.NewReader("{\"payload\": 1}\n{\"payload\": 2}\n"), key...)
	_, text := s.post(strings.NewReader("{\"payload\": 1}\n{\"payload\": 2}\n{\"payload\": 3}\n"), key...)
	if sum := summaryOf(t, text); sum.Replayed != 2 || sum.Inserted != 1 {
		t.Errorf("again, with one more: %s", text)
	}
	_, text = s.post(strings.NewReader("{\"payload\": 9}\n{\"payload\": 2}\n"), key...)
	if sum := summaryOf(t, text); sum.Refused != 1 || sum.Replayed != 1 || sum.Errors[0].Code != "idempotency_conflict" {
		t.Errorf("another line 1: %s", text)
	}
}

func TestStreamIntoAFullQueueSaysHowFarItCame(t *testing.T) {
	s := serve(t, Config{}, invalidation.Config{Capacity: 5})
	body := strings.Repeat("{\"payload\": 1}\n", 8)
	answer, text := s.post(strings.NewReader(body), ndjson...)
	var p Problem
	if err := json.Unmarshal([]byte(text), &p); err != nil {
		t.Fatal(err)
	}
	if answer.StatusCode != 429 || p.Code != "queue_full" || p.Summary == nil || p.Summary.Inserted != 5 || p.Summary.NextLine != 6 || s.count() != 5 {
		t.Errorf("%d %s, %d entries", answer.StatusCode, text, s.count())
	}
	_, text = s.post(strings.NewReader(body), append(ndjson, "Accept", "application/x-ndjson")...)
	if !strings.Contains(text, `"code":"queue_full"`) || !strings.Contains(text, `"next_line":1`) {
		t.Errorf("line by line: %s", text)
	}
}

// A push that can never have room must not be told to come back.
func TestPushLargerThanItsQueueIsNotToldToComeBack(t *testing.T) {
	s := serve(t, Config{}, invalidation.Config{Capacity: 2})
	if _, err := s.pool.Exec(t.Context(), `UPDATE penstock.depth SET drain_rate = 10`); err != nil {
		t.Fatal(err)
	}
	answer, text := s.post(strings.NewReader(`[{"payload":1},{"payload":1},{"payload":1}]`), "Content-Type", "application/json")
	if answer.StatusCode != 429 || answer.Header.Get("Retry-After") != "" || !strings.Contains(text, "fewer") {
		t.Errorf("%d %v %s", answer.StatusCode, answer.Header, text)
	}
	s.post(strings.NewReader(`[{"payload":1},{"payload":1}]`), "Content-Type", "application/json")
	answer, text = s.post(strings.NewReader(`{"payload":1}`), "Content-Type", "application/json")
	if answer.StatusCode != 429 || answer.Header.Get("Retry-After") != "1" {
		t.Errorf("full queue that drains 10 a second: %d %v %s", answer.StatusCode, answer.Header, text)
	}
}

// sink takes entries and forgets them.
type sink struct{ n atomic.Int64 }

func (s *sink) Push(_ context.Context, pushes ...invalidation.Push) ([]invalidation.Pushed, error) {
	pushed := make([]invalidation.Pushed, len(pushes))
	for i := range pushed {
		pushed[i] = invalidation.Pushed{ID: invalidation.EntryID(s.n.Add(1)), Verdict: invalidation.Inserted}
	}
	return pushed, nil
}

func (*sink) AcceptedBefore(context.Context, ...invalidation.Push) (int, error) { return 0, nil }

func TestUnracedMillionLinesTakeNoMoreMemoryThanAThousand(t *testing.T) {
	n := int64(pgtest.Long(250_000, 1_000_000))
	in, out := io.Pipe()
	go func() {
		block := bytes.Repeat([]byte(`{"payload": {"prompt": "a sunset over the sea", "n": 12345}}`+"\n"), 1000)
		for range n / 1000 {
			if _, err := out.Write(block); err != nil {
				return
			}
		}
		out.Close()
	}()
	w := httptest.NewRecorder()
	taken := &sink{}
	a := &answers{w: w, rc: http.NewResponseController(w)}
	s := &lineStream{
		allowed: func(context.Context) error { return nil }, queue: taken, timeout: time.Minute, answers: a, pushOf: (&API{}).plain,
		spend:       func(n int) (int, error) { return n, nil },
		registerKey: func(string) (func(), error) { return func() {}, nil },
	}
	var before, during runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	stop := make(chan struct{})
	most := make(chan uint64)
	go func() {
		var highest uint64
		for tick := time.NewTicker(20 * time.Millisecond); ; {
			select {
			case <-tick.C:
				runtime.ReadMemStats(&during)
				highest = max(highest, during.HeapAlloc)
			case <-stop:
				most <- highest
				return
			}
		}
	}()
	start := time.Now()
	err := s.run(t.Context(), in, func() {})
	took := time.Since(start)
	close(stop)
	grown := int64(<-most) - int64(before.HeapAlloc)
	t.Logf("%d lines in %s, %.0f a second; heap grew by %d KiB at most", n, took.Round(time.Millisecond), float64(n)/took.Seconds(), grown>>10)
	if err != nil || taken.n.Load() != n || a.sum.Inserted != n {
		t.Errorf("%d of %d lines were pushed (%v)", taken.n.Load(), n, err)
	}
	if grown > 64<<20 {
		t.Errorf("the heap grew by %d MiB", grown>>20)
	}
}

func (a *API) plain(e entryToPush, number int64) (invalidation.Push, error) {
	return a.pushOf(caller{}, e, "", "", number)
}

func TestBrokenBodyIsNotTakenForItsEnd(t *testing.T) {
	w := httptest.NewRecorder()
	taken := &sink{}
	a := &answers{w: w, rc: http.NewResponseController(w)}
	s := &lineStream{
		allowed: func(context.Context) error { return nil }, queue: taken, timeout: time.Minute, answers: a, pushOf: (&API{}).plain,
		spend:       func(n int) (int, error) { return n, nil },
		registerKey: func(string) (func(), error) { return func() {}, nil },
	}
	body := io.MultiReader(strings.NewReader("{\"payload\": 1}\n{\"payl"), iotest.ErrReader(io.ErrUnexpectedEOF))
	err := a.finish(endedEarly(s.run(t.Context(), body, func() {})))
	var broken *brokenStream
	if !errors.As(err, &broken) || broken.sum.Inserted != 1 || broken.sum.NextLine != 2 || !errors.Is(err, errCut) {
		t.Errorf("%+v (%v)", broken, err)
	}
}

func packed(t *testing.T, text io.Reader) *bytes.Buffer {
	t.Helper()
	var b bytes.Buffer
	z := gzip.NewWriter(&b)
	if _, err := io.Copy(z, text); err != nil {
		t.Fatal(err)
	}
	if err := z.Close(); err != nil {
		t.Fatal(err)
	}
	return &b
}

func TestUnracedGzipBodiesAreReadAndBombsAreNot(t *testing.T) {
	s := serve(t, Config{BodyBytesMax: 4 << 20}, invalidation.Config{})
	answer, text := s.post(packed(t, strings.NewReader(`{"payload": 1}`)), "Content-Type", "application/json", "Content-Encoding", "gzip")
	if answer.StatusCode != 201 {
		t.Errorf("one: %d %s", answer.StatusCode, text)
	}
	answer, text = s.post(packed(t, strings.NewReader(strings.Repeat("{\"payload\": 1}\n", 50))), append(ndjson, "Content-Encoding", "gzip")...)
	if sum := summaryOf(t, text); answer.StatusCode != 200 || sum.Inserted != 50 {
		t.Errorf("stream: %d %s", answer.StatusCode, text)
	}
	spaces := func(n int64) io.Reader {
		return io.MultiReader(strings.NewReader(`{"payload": `), io.LimitReader(blanks{}, n), strings.NewReader("1}"))
	}
	for _, c := range []struct {
		name, media, encoding string
		body                  io.Reader
		status                int
		code                  string
	}{
		{"bomb", "application/json", "gzip", packed(t, spaces(100<<20)), 413, "payload_too_large"},
		{"bomb in a stream", "application/x-ndjson", "gzip", packed(t, spaces(100<<20)), 413, "payload_too_large"},
		{"small, but larger than allowed", "application/json", "gzip", packed(t, io.MultiReader(spaces(0), strings.NewReader(strings.Repeat(" \n\t ", 2<<20)))), 413, "payload_too_large"},
		{"no gzip", "application/json", "gzip", strings.NewReader(`{"payload": 1}`), 400, "malformed"},
		{"cut off", "application/json", "gzip", bytes.NewReader(packed(t, strings.NewReader(`{"payload": 1}`)).Bytes()[:20]), 400, "malformed"},
		{"other", "application/json", "br", strings.NewReader(`{"payload": 1}`), 415, "not_gzip"},
	} {
		answer, text := s.post(c.body, "Content-Type", c.media, "Content-Encoding", c.encoding)
		if answer.StatusCode != c.status || !strings.Contains(text, `"code":"`+c.code+`"`) {
			t.Errorf("%s: %d %s, want %d %s", c.name, answer.StatusCode, text, c.status, c.code)
		}
	}
	if n := s.count(); n != 51 {
		t.Errorf("%d entries, want 51", n)
	}
	if free := s.api.bodies.free + s.api.streams.free; free != 256<<20 {
		t.Errorf("%d bytes were not given back", 256<<20-free)
	}
}

type blanks struct{}

func (blanks) Read(p []byte) (int, error) {
	for i := range p {
		p[i] = ' '
	}
	return len(p), nil
}

func TestBodiesOfAllRequestsTogetherAreBounded(t *testing.T) {
	s := serve(t, Config{BodiesBytesMax: 1 << 20}, invalidation.Config{})
	large := strings.NewReader(`{"payload": "` + strings.Repeat("x", 2<<20) + `"}`)
	if answer, text := s.post(large, "Content-Type", "application/json"); answer.StatusCode != 503 || !strings.Contains(text, `"busy"`) || answer.Header.Get("Retry-After") == "" {
		t.Errorf("%d %s", answer.StatusCode, text)
	}
	if answer, text := s.post(strings.NewReader(`{"payload": 1}`), "Content-Type", "application/json"); answer.StatusCode != 201 {
		t.Errorf("small one after it: %d %s", answer.StatusCode, text)
	}
}

// One client that sends many large bodies slowly leaves room for those of others.
func TestBodiesOfOneTokenLeaveRoomForThoseOfOthers(t *testing.T) {
	w := newWorld(t)
	w.exec(`SELECT penstock.create_queue('work')`)
	w.api = New(w.pool, Config{Reports: reports{}})
	one := newToken(t, w.pool, operator.Grant{Name: "one", Scopes: []string{"push"}})
	two := newToken(t, w.pool, operator.Grant{Name: "two", Scopes: []string{"push"}})
	requests := map[string]func() int{
		"one":   func() int { return w.ask(one, "POST", "/v1/queues/work/entries", `{"payload": 1}`).Code },
		"two":   func() int { return w.ask(two, "POST", "/v1/queues/work/entries", `{"payload": 1}`).Code },
		workers: func() int { return w.ask("", "POST", "/tasks/callback/7?token=7&key=good", `{}`).Code },
	}
	for _, holder := range []string{"one", workers} {
		var taken int64
		for w.api.bodies.take(holder, 1<<20) == nil {
			taken += 1 << 20
		}
		for name, request := range requests {
			if got := request(); (got == http.StatusServiceUnavailable) != (name == holder) {
				t.Errorf("while bodies of %s hold %d bytes, %s is answered %d", holder, taken, name, got)
			}
		}
		w.api.bodies.give(holder, taken)
	}
}

// A body as large as the setting allows is read, of one token, at any setting.
func TestALargestBodyFitsIntoTheMemoryOfOneToken(t *testing.T) {
	for _, most := range []int64{1, 32 << 20, 100 << 20} {
		a := New(nil, Config{BodyBytesMax: most})
		body, taken, err := a.bodies.readAll("one", io.LimitReader(zeros{}, most), most)
		if int64(len(body)) != most || err != nil {
			t.Errorf("of %d bytes %d are read, with %d taken: %v", most, len(body), taken, err)
		}
	}
}

type zeros struct{}

func (zeros) Read(b []byte) (int, error) { return len(b), nil }

// TestEveryRouteThatTakesALargeBodyIsWithinTheBound sends a body to each of them while others have taken all memory.
func TestEveryRouteThatTakesALargeBodyIsWithinTheBound(t *testing.T) {
	s := serve(t, Config{Reports: reports{}}, invalidation.Config{})
	if err := s.api.bodies.take("", s.api.bodies.free); err != nil {
		t.Fatal(err)
	}
	large := 0
	for _, r := range s.api.routes {
		if r.bytesMax <= defaultBytesMax {
			continue
		}
		large++
		path := strings.NewReplacer("{queue}", "work", "{id}", "7").Replace(r.path)
		if r.path == "/tasks/callback/{id}" {
			path += "?token=7&key=good"
		}
		request := httptest.NewRequestWithContext(t.Context(), r.method, "http://localhost"+path, strings.NewReader(`{"payload": 1}`))
		request.Header.Set("Content-Type", "application/json")
		answer := httptest.NewRecorder()
		s.api.ServeHTTP(answer, request)
		if answer.Code != http.StatusServiceUnavailable || !strings.Contains(answer.Body.String(), `"busy"`) {
			t.Errorf("%s %s: %d %s", r.method, r.path, answer.Code, answer.Body)
		}
	}
	if large < 4 {
		t.Errorf("only %d routes take a large body", large)
	}
}

func TestKeyOfARequestUnderWayIsRefusedAfterAWhile(t *testing.T) {
	s := serve(t, Config{}, invalidation.Config{})
	in, out := io.Pipe()
	defer out.Close()
	r, err := http.NewRequestWithContext(t.Context(), "POST", s.URL+pushTo, in)
	if err != nil {
		t.Fatal(err)
	}
	r.Header.Set("Content-Type", "application/x-ndjson")
	r.Header.Set("Accept", "application/x-ndjson")
	r.Header.Set("Idempotency-Key", "k")
	go func() { _, _ = io.WriteString(out, "{\"payload\": 1}\n") }()
	first, err := s.Client().Do(r) // returns with the first line's answer: the stream goes on
	if err != nil {
		t.Fatal(err)
	}
	defer first.Body.Close()
	answer, text := s.post(strings.NewReader(`{"payload": 1}`), "Content-Type", "application/json", "Idempotency-Key", `"k"`)
	if answer.StatusCode != 409 || !strings.Contains(text, "idempotency_key_in_use") || answer.Header.Get("Retry-After") != "1" {
		t.Errorf("while the first is under way: %d %s", answer.StatusCode, text)
	}
	answer, text = s.post(strings.NewReader(`{"payload": 1, "flow": "f"}`), "Content-Type", "application/json", "Idempotency-Key", "k")
	if answer.StatusCode != 201 {
		t.Errorf("the key in another flow, while the first is under way: %d %s", answer.StatusCode, text)
	}
	answer, text = s.post(strings.NewReader(`{"payload": 1, "flow": "g"}`+"\n"), "Content-Type", "application/x-ndjson", "Idempotency-Key", "k")
	if answer.StatusCode != 200 || !strings.Contains(text, `"inserted":1`) {
		t.Errorf("a stream under the key in another flow, while the first is under way: %d %s", answer.StatusCode, text)
	}
}

func TestCallbackAddressIsCheckedWhenItIsPushed(t *testing.T) {
	s := serve(t, Config{CheckCallback: func(url string) error {
		if strings.Contains(url, "internal") {
			return errors.New("it is internal")
		}
		return nil
	}}, invalidation.Config{})
	for body, field := range map[string]string{
		`{"payload": 1, "callback": {"url": "https://internal/x"}}`:                       "body.callback.url",
		`{"payload": 1, "callback": {"context": 1}}`:                                      "body.callback.url",
		`{"payload": 1, "callback": {"uri": "https://example.com"}}`:                      "body.callback",
		`{"payload": 1, "callback": "https://example.com"}`:                               "body.callback",
		`{"payload": 1, "callback": {"url": "https://example.com", "context": {"a": 1}}}`: "",
		`{"payload": 1, "callback": null}`:                                                "",
	} {
		answer, text := s.post(strings.NewReader(body), "Content-Type", "application/json")
		if field == "" && answer.StatusCode != 201 || field != "" && (answer.StatusCode != 422 || !strings.Contains(text, `"location":"`+field+`"`)) {
			t.Errorf("%s: %d %s", body, answer.StatusCode, text)
		}
	}
	_, text := s.post(strings.NewReader(`{"payload": 1, "callback": {"url": "https://internal/x"}}`), ndjson...)
	if sum := summaryOf(t, text); sum.Refused != 1 || !strings.Contains(sum.Errors[0].Detail, "callback.url") {
		t.Errorf("in a stream: %s", text)
	}
}

// A push of one entry has no other that its error could be about.
func TestAnErrorOfOneEntryDoesNotNumberIt(t *testing.T) {
	s := serve(t, Config{}, invalidation.Config{})
	const late = `{"payload": 1, "finish_by": "2001-01-01T00:00:00Z"}`
	for body, numbered := range map[string]bool{late: false, `[` + late + `]`: false, `[{"payload": 1}, ` + late + `]`: true} {
		answer, text := s.post(strings.NewReader(body), "Content-Type", "application/json")
		if answer.StatusCode != 422 || strings.Contains(text, "entry ") != numbered {
			t.Errorf("%s: %d %s", body, answer.StatusCode, text)
		}
	}
}

func TestWhatIsWrongWithABodyIsSaidInWordsOfTheAPI(t *testing.T) {
	for body, want := range map[string]struct {
		is   error
		text string
	}{
		``:                                  {errMalformed, "the request is malformed: the body is empty"},
		`1`:                                 {errMalformed, "the request is malformed: the value: got number, want an object, or a list of them"},
		`{"payload": 1, "priority": 70000}`: {errInvalid, "priority: got number 70000, want a whole number from 0 to 9"},
		`[{"payload": 1, "flow": 7}]`:       {errInvalid, "entry 1: flow: got number, want a text"},
		`{"payload": 1, "lockkey": "k"}`:    {errInvalid, "lockkey: there is no such field"},
		`[{"payload": 1}, {}]`:              {errInvalid, "entry 2: payload: " + errMissing.Error()},
	} {
		if _, _, err := decode([]byte(body), 10); !errors.Is(err, want.is) || err.Error() != want.text {
			t.Errorf("%s: %v, want %q", body, err, want.text)
		}
	}
	refused := fmt.Errorf("push: priority is not between 0 and 9 (entry 1): %w", invalidation.ErrInvalid)
	if p := problem(refused); p.Code != "invalid" || p.Detail != "push: priority is not between 0 and 9 (entry 1)" {
		t.Errorf("%+v", p)
	}
}
