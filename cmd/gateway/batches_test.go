package main

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"mime/multipart"
	"net/http"
	"runtime"
	"strings"
	"testing"
	"time"
)

// call sends a request to the gateway and decodes the answer into a pointer.
func (f *front) call(t *testing.T, method, path string, body, into any) int {
	t.Helper()
	text, err := json.Marshal(body)
	if err != nil {
		t.Fatal(err)
	}
	request, err := http.NewRequestWithContext(t.Context(), method, f.url+path, bytes.NewReader(text))
	if err != nil {
		t.Fatal(err)
	}
	return f.do(t, request, into)
}

// send makes a request and reads its whole answer.
func send(t *testing.T, request *http.Request) (status int, header http.Header, text []byte) {
	t.Helper()
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	defer answer.Body.Close()
	if text, err = io.ReadAll(answer.Body); err != nil {
		t.Fatal(err)
	}
	return answer.StatusCode, answer.Header, text
}

func (f *front) do(t *testing.T, request *http.Request, into any) int {
	t.Helper()
	status, _, text := send(t, request)
	if raw, is := into.(*string); is {
		*raw = string(text)
	} else if err := json.Unmarshal(text, into); err != nil {
		t.Fatalf("%s %s: %d %s: %s", request.Method, request.URL.Path, status, text, err)
	}
	return status
}

// upload sends a file of a form, with the purpose behind it as OpenAI's client does.
func (f *front) upload(t *testing.T, write func(w io.Writer)) (id string, bytes int64) {
	t.Helper()
	reader, writer := io.Pipe()
	form := multipart.NewWriter(writer)
	go func() {
		part, err := form.CreateFormFile("file", "requests.jsonl")
		if err != nil {
			t.Error(err)
		}
		write(part)
		_ = form.WriteField("purpose", "batch")
		_ = form.Close()
		_ = writer.Close()
	}()
	request, err := http.NewRequestWithContext(t.Context(), http.MethodPost, f.url+"/v1/files", reader)
	if err != nil {
		t.Fatal(err)
	}
	request.Header.Set("Content-Type", form.FormDataContentType())
	var file struct {
		ID, Object, Purpose, Filename string
		Bytes                         int64
	}
	if status := f.do(t, request, &file); status != 200 || file.Object != "file" || file.Purpose != "batch" ||
		file.Filename != "requests.jsonl" {
		t.Fatalf("got %d %+v", status, file)
	}
	return file.ID, file.Bytes
}

type batchOf struct {
	ID, Status, Model string
	Output            string                                 `json:"output_file_id"`
	Errors            string                                 `json:"error_file_id"`
	ExpiresAt         int64                                  `json:"expires_at"`
	Counts            struct{ Total, Completed, Failed int } `json:"request_counts"`
	Flaws             *struct {
		Data []struct {
			Code string
			Line int
		}
	} `json:"errors"`
	Usage struct {
		Total int `json:"total_tokens"`
	}
	Metadata map[string]string
}

func line(id, body string) string {
	return fmt.Sprintf(`{"custom_id":%q,"method":"POST","url":"/v1/chat/completions","body":%s}`+"\n", id, body)
}

func (f *front) batch(t *testing.T, file string) batchOf {
	t.Helper()
	var b batchOf
	status := f.call(t, "POST", "/v1/batches", map[string]any{
		"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h",
		"metadata": map[string]string{"k": "v"},
	}, &b)
	if status != 200 || b.Status != "validating" || b.Metadata["k"] != "v" {
		t.Fatalf("got %d %+v", status, b)
	}
	return b
}

// ends waits for a status of a batch.
func (s *site) ends(t *testing.T, f *front, id, status string) (b batchOf) {
	t.Helper()
	s.eventually("the batch is "+status, func() bool {
		f.call(t, "GET", "/v1/batches/"+id, nil, &b)
		return b.Status == status
	})
	return b
}

// answers reads a file of a batch by custom_id.
func (f *front) answers(t *testing.T, file string) map[string]map[string]any {
	t.Helper()
	var text string
	if status := f.call(t, "GET", "/v1/files/"+file+"/content", nil, &text); status != 200 {
		t.Fatalf("content of %s: %d %s", file, status, text)
	}
	lines := map[string]map[string]any{}
	for _, l := range strings.Split(strings.TrimSpace(text), "\n") {
		var a map[string]any
		if err := json.Unmarshal([]byte(l), &a); err != nil {
			t.Fatal(err)
		}
		lines[a["custom_id"].(string)] = a //nolint:errcheck,forcetypeassert // it panics, and the test fails
	}
	return lines
}

func TestBatchRunsEachLineOnce(t *testing.T) {
	t.Parallel()
	s := newSite(t, 8)
	f := s.startGateway(nil)
	s.startNode(16)
	file, size := f.upload(t, func(w io.Writer) {
		for i := range 700 {
			_, _ = io.WriteString(w, line(fmt.Sprint("r", i), `{"model":"m","messages":[]}`))
		}
		_, _ = io.WriteString(w, "\n"+strings.TrimSpace(line("bad", `{"model":"m","fail":true}`)))
	})
	var raw string
	if f.call(t, "GET", "/v1/files/"+file+"/content", nil, &raw); int64(len(raw)) != size || !strings.HasPrefix(raw, `{"custom_id":"r0"`) {
		t.Errorf("content has %d bytes, the file %d", len(raw), size)
	}
	b := s.ends(t, f, f.batch(t, file).ID, "completed")
	if b.Counts.Total != 701 || b.Counts.Completed != 700 || b.Counts.Failed != 1 || b.Model != "m" || b.Usage.Total != 3500 {
		t.Errorf("got %+v", b)
	}
	done := f.answers(t, b.Output)
	for i := range 700 {
		a := done[fmt.Sprint("r", i)]
		response, _ := a["response"].(map[string]any)
		if a == nil || a["error"] != nil || response["status_code"] != 200.0 || response["body"] == nil {
			t.Fatalf("line %d: %v", i, a)
		}
	}
	bad := f.answers(t, b.Errors)["bad"]
	response, _ := bad["response"].(map[string]any)
	if text := fmt.Sprint(response["body"]); bad["error"] != nil || response["status_code"] != 400.0 || !strings.Contains(text, "not allowed") {
		t.Errorf("got %v", bad)
	}
	if _, _, begun := s.gpu.counts(); begun != 701 {
		t.Errorf("%d calls for 701 lines", begun)
	}
	if n := s.count(`SELECT count(*) FROM penstock.gateway_batch_line`); n != 0 {
		t.Errorf("%d lines are left", n)
	}
}

func TestBatchWithAFlawRunsNothing(t *testing.T) {
	t.Parallel()
	s := newSite(t, 1)
	f := s.startGateway(nil)
	for _, c := range []struct{ text, code string }{
		{"", "empty_file"},
		{"nonsense\n", "invalid_json_line"},
		{line("a", `{"model":"m"}`) + line("a", `{"model":"m"}`), "duplicate_custom_id"},
		{line("a", `{"model":"other"}`), "model_not_found"},
		{line("a", `{}`), "missing_required_parameter"},
		{strings.Replace(line("a", `{"model":"m"}`), "chat/completions", "embeddings", 1), "invalid_url"},
		{strings.Replace(line("a", `{"model":"m"}`), "POST", "GET", 1), "invalid_method"},
	} {
		file, _ := f.upload(t, func(w io.Writer) { _, _ = io.WriteString(w, c.text) })
		b := s.ends(t, f, f.batch(t, file).ID, "failed")
		if b.Flaws == nil || len(b.Flaws.Data) != 1 || b.Flaws.Data[0].Code != c.code {
			t.Errorf("%s: got %+v", c.code, b.Flaws)
		}
	}
	if n := s.count(`SELECT count(*) FROM penstock.entry`) + s.count(`SELECT count(*) FROM penstock.gateway_batch_line`); n != 0 {
		t.Errorf("%d entries and lines", n)
	}
}

// A cancelled batch, and one whose window is over, keep what has ended, and name the rest.
func TestBatchEndsEarly(t *testing.T) {
	t.Parallel()
	s := newSite(t, 4)
	f := s.startGateway(nil)
	s.startNode(8)
	file, _ := f.upload(t, func(w io.Writer) {
		_, _ = io.WriteString(w, line("first", `{"model":"m"}`))
		for i := range 20 {
			_, _ = io.WriteString(w, line(fmt.Sprint("r", i), hold))
		}
	})
	cancelled := f.batch(t, file)
	s.eventually("some run", func() bool { running, _, begun := s.gpu.counts(); return running == 4 && begun >= 5 })
	var b batchOf
	if status := f.call(t, "POST", "/v1/batches/"+cancelled.ID+"/cancel", nil, &b); status != 200 || b.Status != "cancelling" {
		t.Errorf("got %d %+v", status, b)
	}
	b = s.ends(t, f, cancelled.ID, "cancelled")
	if b.Counts.Total != 21 || b.Counts.Completed != 1 || b.Counts.Failed != 20 {
		t.Errorf("got %+v", b)
	}
	if f.answers(t, b.Output)["first"] == nil || len(f.answers(t, b.Errors)) != 20 {
		t.Error("the files are not what ran and what did not")
	}
	late := f.batch(t, file)
	s.eventually("some run again", func() bool { running, _, begun := s.gpu.counts(); return running == 4 && begun >= 10 })
	s.exec(`WITH late AS (SELECT id, expires_at FROM penstock.gateway_batch WHERE id = $1),
	             over AS (UPDATE penstock.gateway_batch b SET expires_at = clock_timestamp() FROM late WHERE b.id = late.id)
	        UPDATE penstock.entry e SET start_by = clock_timestamp() FROM late WHERE e.start_by = late.expires_at`, late.ID)
	close(s.gpu.release)
	b = s.ends(t, f, late.ID, "expired")
	if b.Counts.Completed < 1 || b.Counts.Completed+b.Counts.Failed != 21 {
		t.Errorf("got %+v", b)
	}
	expired := 0
	for _, a := range f.answers(t, b.Errors) {
		if failure, _ := a["error"].(map[string]any); failure["code"] == "batch_expired" {
			expired++
		}
	}
	if expired != b.Counts.Failed {
		t.Errorf("%d of %d lines are batch_expired", expired, b.Counts.Failed)
	}
}

func TestFilesAreListedAndDeleted(t *testing.T) {
	t.Parallel()
	s := newSite(t, 1)
	f := s.startGateway(nil)
	var ids []string
	for range 3 {
		id, _ := f.upload(t, func(w io.Writer) { _, _ = io.WriteString(w, "x") })
		ids = append(ids, id)
	}
	var page struct {
		Data    []struct{ ID string }
		HasMore bool   `json:"has_more"`
		LastID  string `json:"last_id"`
	}
	f.call(t, "GET", "/v1/files?limit=2", nil, &page)
	if len(page.Data) != 2 || !page.HasMore || page.Data[0].ID != ids[2] || page.LastID != ids[1] {
		t.Errorf("got %+v", page)
	}
	f.call(t, "GET", "/v1/files?order=asc&after="+ids[1], nil, &page)
	if len(page.Data) != 1 || page.HasMore || page.Data[0].ID != ids[2] {
		t.Errorf("got %+v", page)
	}
	var gone map[string]any
	if status := f.call(t, "DELETE", "/v1/files/"+ids[0], nil, &gone); status != 200 || gone["deleted"] != true {
		t.Errorf("got %d %v", status, gone)
	}
	var failure struct {
		Error struct{ Code, Message string }
	}
	if status := f.call(t, "GET", "/v1/files/"+ids[0], nil, &failure); status != 404 || failure.Error.Message == "" {
		t.Errorf("got %d %+v", status, failure)
	}
	for _, path := range []string{"/v1/files?after=%00", "/v1/files/%FF", "/v1/batches?after=%00", "/v1/batches/%FF"} {
		if status := f.call(t, "GET", path, nil, &failure); status != 400 || failure.Error.Message == "" {
			t.Errorf("%s: got %d %+v", path, status, failure)
		}
	}
	if status := f.call(t, "POST", "/v1/batches", map[string]any{
		"input_file_id": ids[1], "endpoint": "/v1/chat/completions", "completion_window": "24h",
		"metadata": map[string]string{"k": "\x00"},
	}, &failure); status != 400 {
		t.Errorf("metadata: got %d %+v", status, failure)
	}
}

// An upload of the largest batch takes memory for a chunk, not for the file.
func TestUnracedLargeUploadIsNotHeldInMemory(t *testing.T) {
	if testing.Short() {
		t.Skip("50,000 lines")
	}
	s := newSite(t, 1)
	f := s.startGateway(nil)
	prompt := strings.Repeat("word ", 400)
	var before, after runtime.MemStats
	runtime.GC()
	runtime.ReadMemStats(&before)
	file, size := f.upload(t, func(w io.Writer) {
		buffered := bufio.NewWriter(w)
		for i := range 50_000 {
			_, _ = buffered.WriteString(line(fmt.Sprint("r", i), `{"model":"m","messages":[{"role":"user","content":"`+prompt+`"}]}`))
		}
		_ = buffered.Flush()
	})
	runtime.ReadMemStats(&after)
	if grown := int64(after.Sys) - int64(before.Sys); size < 100<<20 || grown > 64<<20 { //nolint:gosec // below 2^63
		t.Errorf("%d bytes were uploaded, and the process grew by %d", size, grown)
	}
	b := f.batch(t, file)
	began := time.Now()
	b = s.ends(t, f, b.ID, "in_progress")
	t.Logf("%d MB, validated in %s", size>>20, time.Since(began).Round(time.Millisecond))
	if b.Counts.Total != 50_000 {
		t.Errorf("got %+v", b)
	}
}
