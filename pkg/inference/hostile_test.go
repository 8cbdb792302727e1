package inference

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/worker"
	"github.com/penstock/penstock/pkg/worker/workertest"
)

// hostileValues are JSON values, or nearly, which a database refuses, or stores and cannot give back.
var hostileValues = []string{
	`"a\u0000b"`, `{"\u0000": 1}`, `"\ud83d"`, `"\ude00\ud83d"`, "\"\xff\xfe\"", `1e131071`, `[1e131071, 1e131071]`, `1e-16383`,
	`-1e131072`, `1e99999999`, strings.Repeat("[", 9000) + strings.Repeat("]", 9000), `{"a":`, ``, `NaN`,
	`"` + strings.Repeat("\x1b[2J", 1000) + `"`,
}

// largeValues have the values of an answer of almost the largest size. The race detector reads each for about seven seconds
// of processor time, so that the tests of it are apart.
var largeValues = []string{"[" + strings.Repeat("0,", 4_100_000) + "0]"}

// No answer of a worker stops a queue or a node: its entry ends, and those beside it are done.
func TestNoAnswerOfAWorkerStopsAQueue(t *testing.T) { noAnswerStopsAQueue(t, hostileValues) }

func TestLongNoLargeAnswerOfAWorkerStopsAQueue(t *testing.T) { noAnswerStopsAQueue(t, largeValues) }

func noAnswerStopsAQueue(t *testing.T, values []string) {
	t.Helper()
	type shape struct {
		name   string
		model  worker.Model
		answer string // with %s for the hostile value
	}
	for _, s := range []shape{
		{"result", worker.Model{}, `{"status":"success","result":%s}`},
		{"bare result", worker.Model{}, `%s`},
		{"error", worker.Model{}, `{"status":"failed","error":%s,"error_class":%[1]s}`},
		{"choice", worker.Model{Protocol: worker.ProtocolOpenAI}, `{"choices":[{"message":%s}],"usage":{"prompt_tokens":%[1]s}}`},
		{"cog", worker.Model{Protocol: worker.ProtocolCog}, `{"status":"succeeded","output":%s,"metrics":%[1]s,"logs":%[1]s}`},
		{"cog metrics", worker.Model{Protocol: worker.ProtocolCog}, `{"status":"succeeded","output":1,"metrics":{"a":%s}}`},
		{"tensors", worker.Model{Protocol: worker.ProtocolOIP}, `{"outputs":[%s]}`},
	} {
		t.Run(s.name, func(t *testing.T) {
			b := newBed(t, s.model)
			b.alter(map[string]any{"retry": map[string]any{"base": 0.01, "cap": 0.01, "max_attempts": 1}})
			var next atomic.Int32
			w := workertest.NewScript(t, func(w http.ResponseWriter, r *http.Request) {
				if r.Method == http.MethodGet {
					workertest.Says(200, `{"status":"READY"}`)(w, r)
					return
				}
				body, _ := io.ReadAll(r.Body)
				value := "1"
				if strings.Contains(string(body), "hostile") {
					value = values[int(next.Add(1)-1)%len(values)]
				}
				w.Header().Set("Content-Type", "application/json")
				fmt.Fprintf(w, s.answer, value)
			})
			b.instance("gpu-1", w.URL, 4)
			// Answers are judged here, not the instance: a quarantine would only make the entries wait.
			b.start(ServiceConfig{}, func(t *tuning) { t.quarantine.failures = 1000 })
			var hostile, good []invalidation.EntryID
			for range values {
				hostile = append(hostile, b.push(`{"inputs":[],"hostile":1}`)...)
				good = append(good, b.push(`{"inputs":[]}`)...)
			}
			for _, id := range append(hostile, good...) {
				b.outcome(id)
			}
			b.await(0, `SELECT count(*) FROM penstock.entry`)
			b.await(0, `SELECT count(*) FROM penstock.lock`)
			if s.name != "error" && s.name != "choice" && s.name != "cog" {
				for _, id := range good {
					if o := b.outcome(id); o.Outcome != "done" {
						t.Errorf("an entry beside hostile ones: %+v", o)
					}
				}
			}
			// What was kept can be read again, all of it at once.
			if n := b.count(`SELECT coalesce(sum(length(coalesce(result::text, '') || coalesce(meta::text, ''))), 0)::bigint FROM penstock.result`); n > 1<<20 {
				t.Errorf("results are %d bytes as text", n)
			}
		})
	}
}

// A report that cannot be kept is refused for good, so that its worker gives up, and none is kept that cannot be read.
func TestReportThatCannotBeKeptIsRefused(t *testing.T) { reportIsRefused(t, hostileValues) }

func TestLongLargeReportIsRefused(t *testing.T) { reportIsRefused(t, largeValues) }

func reportIsRefused(t *testing.T, values []string) {
	t.Helper()
	b := newBed(t, asyncModel())
	c := NewReports("http://127.0.0.1:9", []byte("sixteen bytes or more"), b.pool, quiet)
	w := b.longWorker(`{"status":"cancelled"}`)
	b.instance("gpu-1", w.URL+"/run", 1)
	b.start(ServiceConfig{Reports: c})
	id := b.push(`{}`)[0]
	b.await(1, `SELECT count(*) FROM penstock.remote_run WHERE remote_id IS NOT NULL`)
	token := int64(b.count(`SELECT token FROM penstock.remote_run`))
	for _, value := range values {
		if value == "1" || strings.Contains(value, "\x1b") {
			continue
		}
		_, err := c.Take(t.Context(), int64(id), token, []byte(`{"status":"success","result":`+value+`}`))
		if !errors.Is(err, invalidation.ErrInvalid) && !errors.Is(err, invalidation.ErrPayloadTooLarge) {
			t.Errorf("report with %.40q: %v", value, err)
		}
	}
	if kept, err := c.Take(t.Context(), int64(id), token, []byte(`{"status":"success","result":7}`)); err != nil || !kept {
		t.Fatalf("a report: %v, %v", kept, err)
	}
	if o := b.outcome(id); o.Outcome != "done" {
		t.Errorf("ended as %+v", o)
	}
}

// Health that no column holds must not keep an instance from being judged.
func TestHealthIsWrittenWhateverItSays(t *testing.T) {
	b := newBed(t, worker.Model{Protocol: worker.ProtocolOpenAI, LoadPath: "/metrics"})
	w := workertest.NewScript(t, func(w http.ResponseWriter, r *http.Request) {
		if r.URL.Path == "/metrics" {
			fmt.Fprint(w, "vllm:num_requests_running 1e300\nvllm:num_requests_waiting 5e9\nvllm:kv_cache_usage_perc NaN\nvllm:gpu_cache_usage_perc 1e300\n")
			return
		}
		w.WriteHeader(503)
		fmt.Fprint(w, `{"error":"a\u0000b `+strings.Repeat("x", 1<<16)+`"}`)
	})
	b.instance("gpu-1", w.URL, 1)
	b.start(ServiceConfig{})
	b.await(1, `SELECT count(*) FROM penstock.instance WHERE state = 'unhealthy' AND checked_at > $1`, time.Now().Add(-time.Minute))
}
