package web

import (
	"bytes"
	"compress/gzip"
	"io"
	"net/http/httptest"
	"strconv"
	"strings"
	"testing"
)

func TestLongTextsAreCompressedForThoseWhoAcceptIt(t *testing.T) {
	long := strings.Repeat("slot 1: idle ", 1000)
	for _, c := range []struct {
		accepts, from, text string
		want                bool
	}{
		{"gzip, deflate, br", "same-origin", long, true},
		{"br;q=1, GZIP;q=0.5", "", long, true},
		{"gzip", "none", long, true},
		{"gzip", "none", "short", false},
		{"gzip;q=0", "none", long, false},
		{"br", "none", long, false},
		{"", "", long, false},
		{"gzip", "cross-site", long, false},
		{"gzip", "same-site", long, false},
	} {
		r := httptest.NewRequestWithContext(t.Context(), "GET", "/ui/models", nil)
		r.Header.Set("Accept-Encoding", c.accepts)
		if c.from != "" {
			r.Header.Set("Sec-Fetch-Site", c.from)
		}
		w := httptest.NewRecorder()
		got := packed(w, r, []byte(c.text))
		h := w.Header()
		if (h.Get("Content-Encoding") == "gzip") != c.want || h.Get("Content-Length") != strconv.Itoa(len(got)) ||
			!strings.Contains(h.Get("Vary"), "Accept-Encoding") {
			t.Errorf("%+v: the headers are %v", c, h)
		}
		if c.want {
			z, err := gzip.NewReader(bytes.NewReader(got))
			if err != nil {
				t.Fatal(err)
			}
			if got, err = io.ReadAll(z); err != nil {
				t.Fatal(err)
			}
		}
		if string(got) != c.text {
			t.Errorf("%+v: the text is another one", c)
		}
	}
}
