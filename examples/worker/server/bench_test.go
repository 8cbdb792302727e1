package server

import (
	"io"
	"net/http"
	"net/http/httptest"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/penstock/penstock/examples/worker/model"
)

// BenchmarkEcho is the cost of a fenced call over HTTP, client included: the floor under any dispatcher's figures.
func BenchmarkEcho(b *testing.B) {
	s, err := New(Config{Slots: 1000})
	if err != nil {
		b.Fatal(err)
	}
	s.SetModels([]model.Model{model.Echo{}})
	ts := httptest.NewServer(s.Handler())
	defer ts.Close()
	client := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 64}}
	defer client.CloseIdleConnections()
	var entry atomic.Int64
	b.SetParallelism(8)
	b.RunParallel(func(pb *testing.PB) {
		for pb.Next() {
			req, err := http.NewRequestWithContext(b.Context(), http.MethodPost, ts.URL+"/echo", strings.NewReader(`{"n":7}`))
			if err != nil {
				b.Error(err)
				return
			}
			req.Header.Set("X-Source", "dispatcher")
			req.Header.Set("Penstock-Entry", strconv.FormatInt(entry.Add(1), 10))
			req.Header.Set("Penstock-Token", "1")
			req.Header.Set("Penstock-Remaining-Ms", "60000")
			res, err := client.Do(req)
			if err != nil {
				b.Error(err)
				return
			}
			if _, err := io.Copy(io.Discard, res.Body); err != nil || res.StatusCode != http.StatusOK {
				b.Errorf("answer %d: %v", res.StatusCode, err)
			}
			res.Body.Close()
		}
	})
}
