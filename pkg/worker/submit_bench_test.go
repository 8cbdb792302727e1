package worker

import (
	"fmt"
	"net/http"
	"net/http/httptest"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"
)

// BenchmarkSubmit measures one instance whose worker answers at once, in this
// process: calls/s, and from Submit to the request being written (p50, p99).
func BenchmarkSubmit(b *testing.B) {
	reply := []byte(`{"status":"success","result":{"a":1}}`)
	worker := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write(reply) }))
	defer worker.Close()
	for _, slots := range []int{1, 8, 64, 512} {
		b.Run(fmt.Sprintf("slots=%d", slots), func(b *testing.B) {
			a, err := New(Model{Name: "m", Protocol: ProtocolGeneric}, Instance{Endpoint: worker.URL, Slots: slots}, Config{})
			if err != nil {
				b.Fatal(err)
			}
			b.ReportAllocs()
			overheads := make([]time.Duration, b.N)
			var next atomic.Int64
			var callers sync.WaitGroup
			b.ResetTimer()
			for range slots {
				callers.Go(func() {
					for {
						i := int(next.Add(1)) - 1
						if i >= b.N {
							return
						}
						began := time.Now()
						o := a.Submit(b.Context(), Call{RunRef: RunRef{Entry: "entry", Token: 1, Attempt: 1}, Payload: []byte(`{"a":1}`)})
						if o.Kind != Done {
							b.Errorf("got %s: %s", o.Kind, o.Reason)
							return
						}
						overheads[i] = o.SentAt.Sub(began)
					}
				})
			}
			callers.Wait()
			b.StopTimer()
			slices.Sort(overheads)
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "calls/s")
			b.ReportMetric(float64(overheads[b.N/2].Microseconds()), "sent-p50-us")
			b.ReportMetric(float64(overheads[b.N*99/100].Microseconds()), "sent-p99-us")
		})
	}
}
