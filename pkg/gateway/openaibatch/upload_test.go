package openaibatch

import (
	"bytes"
	"fmt"
	"io"
	"mime/multipart"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/gateway"
)

// formOf returns an upload of a form with fields, and no file.
func formOf(t *testing.T, fileMax int64, fields func(form *multipart.Writer)) *upload {
	t.Helper()
	reader, writer := io.Pipe()
	form := multipart.NewWriter(writer)
	go func() {
		fields(form)
		_ = form.Close()   // the reader may be gone
		_ = writer.Close() // never fails
	}()
	t.Cleanup(func() { _ = reader.Close() })
	r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/v1/files", reader)
	r.Header.Set("Content-Type", form.FormDataContentType())
	u, err := New(Config{fileMax: fileMax}, nil, nil).receive(httptest.NewRecorder(), r, "shop")
	if err != nil {
		t.Fatal(err)
	}
	return u
}

// What a form takes in memory is bounded, whatever is in it.
func TestFormsAreBounded(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name    string
		parts   int
		bytes   int
		status  int
		message string
	}{
		{"fields of other names are passed over", formPartsMax - 1, 100, 400, "the form has no file"},
		{"parts", formPartsMax, 100, 400, "parts"},
		{"bytes", 3, 100 << 10, 413, "bytes"},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			u := formOf(t, 100<<10, func(form *multipart.Writer) {
				_ = form.WriteField("purpose", "batch")
				for i := range c.parts {
					_ = form.WriteField(fmt.Sprint("other", i), strings.Repeat("x", c.bytes))
				}
			})
			_, err := u.read(t.Context())
			if status, message := gateway.ErrorOf(err); status != c.status || !strings.Contains(message, c.message) {
				t.Errorf("got %d %s", status, message)
			}
			if len(u.fields) != 1 {
				t.Errorf("%d fields are held", len(u.fields))
			}
		})
	}
}

// A form that ends before its last boundary is refused wherever it is cut, and its file is not kept: the file may be cut as
// well.
func TestFormsThatAreCutAreRefused(t *testing.T) {
	t.Parallel()
	s := newShop(t, Config{})
	var whole bytes.Buffer
	form := multipart.NewWriter(&whole)
	_ = form.WriteField("purpose", "batch")
	file, err := form.CreateFormFile("file", "in.jsonl")
	if err != nil {
		t.Fatal(err)
	}
	_, _ = io.WriteString(file, "{}\n{}\n")
	_ = form.WriteField("expires_after[anchor]", "created_at")
	_ = form.Close()
	for cut := 1; cut < 6*len(form.Boundary()); cut += 3 {
		body := bytes.NewReader(whole.Bytes()[:max(0, whole.Len()-len("\r\n")-cut)])
		r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/v1/files", body)
		r.Header.Set("Content-Type", form.FormDataContentType())
		err := s.upload(httptest.NewRecorder(), r, gateway.Requester{Name: "shop"})
		if err == nil {
			t.Errorf("a form that ends %d bytes before the end was taken", cut)
		} else if status, message := gateway.ErrorOf(err); status != 400 {
			t.Errorf("%d bytes before the end: got %d %s", cut, status, message)
		}
	}
	var files int
	if err := s.pool.QueryRow(t.Context(), `SELECT count(*) FROM penstock.gateway_file WHERE deleted_at IS NULL`).Scan(&files); err != nil || files != 0 {
		t.Errorf("%d files are kept: %v", files, err)
	}
}

// A file is kept for as long as its form says, within bounds that no number of seconds passes.
func TestFilesAreKeptForSecondsWithinBounds(t *testing.T) {
	t.Parallel()
	if kept, err := keptFor("created_at", "3600"); kept != time.Hour || err != nil {
		t.Errorf("3600 seconds are %s (%v)", kept, err)
	}
	for _, seconds := range []string{"3599", "2592001", "18446747674", "-18446740474", "9223372036854775807"} {
		if kept, err := keptFor("created_at", seconds); err == nil {
			t.Errorf("%s seconds are %s", seconds, kept)
		}
	}
}

// A name is cut at the end of a character, and is text that the database takes.
func TestFilenamesAreText(t *testing.T) {
	t.Parallel()
	for name, want := range map[string]string{
		"": "file", "a.jsonl": "a.jsonl", "a\x00b": "a\uFFFDb", "a\xff": "a\uFFFD",
		strings.Repeat("\u20ac", 400): strings.Repeat("\u20ac", 341),
	} {
		if got := clip(name); got != want {
			t.Errorf("%q: got %q", name, got)
		}
	}
}
