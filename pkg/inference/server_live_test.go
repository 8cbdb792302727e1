package inference

import (
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/worker"
	"github.com/penstock/penstock/pkg/worker/workertest"
)

// A voice activity model in ONNX Runtime behind KServe v2, behind a queue.
func TestLiveOIPBehindTheQueue(t *testing.T) {
	dir := workertest.NPMInstall(t, "kserve", workertest.ForeignRuntimes()...)
	url, kill := workertest.StartProcess(t, "node", filepath.Join(dir, "server.mjs"))
	b := newBed(t, worker.Model{Name: "vad", Protocol: worker.ProtocolOIP})
	b.instance("cpu-1", url, 2)
	n := b.start(ServiceConfig{})
	sound := func(at string) string {
		return fmt.Sprintf(`{"inputs":[{"name":"input","datatype":"FP32","shape":[1,512],"data":[%s0]},
			{"name":"state","datatype":"FP32","shape":[2,1,128],"data":[%s0]},{"name":"sr","datatype":"INT64","shape":[],"data":[16000]}]}`,
			strings.Repeat(at+",", 511), strings.Repeat("0,", 255))
	}
	ids := b.push(sound("0"), sound("0.3"), sound("0"), sound("0.3"), `{"inputs":[{"name":"input","datatype":"FP16","shape":[1],"data":[1]}]}`)
	var probabilities []float64
	for i, id := range ids[:4] {
		o := b.outcome(id)
		var reply struct {
			Outputs []struct{ Data json.RawMessage }
		}
		var p []float64
		if o.Outcome != "done" || o.Attempt != 0 || json.Unmarshal(o.Result, &reply) != nil || json.Unmarshal(reply.Outputs[0].Data, &p) != nil {
			t.Fatalf("entry %d: %+v %.200s", i, o, o.Result)
		}
		probabilities = append(probabilities, p[0])
	}
	if p := probabilities; p[0] != p[2] || p[1] != p[3] || p[0] == p[1] {
		t.Errorf("probabilities of a voice are %v", p)
	}
	if o := b.outcome(ids[4]); o.Outcome != "failed" || o.Class != "input" {
		t.Errorf("a tensor of a type that the model does not take: %+v", o)
	}
	if m := b.meta(ids[0]); m["instance"] != "cpu-1" || m["attempts"] != 1.0 || m["slot"] == nil || m["queue_ms"] == nil || m["run_ms"] == nil {
		t.Errorf("noted %v", m)
	}
	kill()
	// An entry before that may go out on the connection that the server left, and then nothing tells that it did not run.
	b.await(1, `SELECT count(*) FROM penstock.instance WHERE state = 'unhealthy'`)
	waiting := b.push(sound("0"))[0]
	b.await(1, `SELECT count(*) FROM penstock.entry WHERE id = $1 AND attempt = 0`, waiting)
	n.leave()
	b.await(0, `SELECT count(*) FROM penstock.slot`)
}

// An OpenAI-compatible server around English word vectors, behind a queue: batches, streams, a cancel, and no room.
func TestLiveOpenAIBehindTheQueue(t *testing.T) {
	dir := workertest.NPMInstall(t, "openai")
	url, _ := workertest.StartProcess(t, "node", filepath.Join(dir, "server.mjs"))
	start := func(t *testing.T, model worker.Model, slots int) *bed {
		t.Helper()
		model.Name, model.Protocol, model.LoadPath = "words", worker.ProtocolOpenAI, "/load"
		b := newSerialBed(t, model)
		b.instance("cpu-1", url, slots)
		a, err := worker.New(model, worker.Instance{Endpoint: url, Slots: slots}, worker.Config{})
		b.must(err)
		workertest.WaitFor(t, func() bool { return a.Probe(t.Context()).State == worker.StateReady })
		b.start(ServiceConfig{})
		return b
	}
	chat := func(words int) string {
		return fmt.Sprintf(`{"messages":[{"role":"user","content":"the king of france"}],"max_tokens":%d}`, words)
	}
	t.Run("embeddings share calls", func(t *testing.T) {
		b := start(t, worker.Model{Operation: worker.OperationEmbeddings, Batch: worker.BatchLimits{Items: 6}}, 1)
		var payloads []string
		for range 6 {
			payloads = append(payloads, `{"input":"king"}`, `{"input":["queen","king"]}`)
		}
		var vectors [][]float64
		shared := 0
		for _, id := range b.push(payloads...) {
			o := b.outcome(id)
			var reply struct {
				Data []struct{ Embedding []float64 }
			}
			if o.Outcome != "done" || json.Unmarshal(o.Result, &reply) != nil || len(reply.Data[0].Embedding) != 100 {
				t.Fatalf("%+v %.200s", o, o.Result)
			}
			vectors = append(vectors, reply.Data[len(reply.Data)-1].Embedding)
			if b.meta(id)["batch"] != nil {
				shared++
			}
		}
		for i, v := range vectors { // each ends with king
			if fmt.Sprint(v) != fmt.Sprint(vectors[0]) {
				t.Fatalf("entry %d got another one's embedding", i)
			}
		}
		if shared < 6 {
			t.Errorf("%d of 12 entries shared a call", shared)
		}
	})
	t.Run("a stream goes to the log of the entry", func(t *testing.T) {
		const words = 400 // take 5 ms of processor time each: a multiple of what the look takes
		b := start(t, worker.Model{Stream: true}, 1)
		id := b.push(chat(words))[0]
		workertest.WaitFor(t, func() bool { return b.count(`SELECT count(*) FROM penstock.output WHERE entry_id = $1`, id) > 0 })
		if n := b.count(`SELECT count(*) FROM penstock.result WHERE entry_id = $1`, id); n != 0 {
			t.Error("nothing could be read before the end")
		}
		o := b.outcome(id)
		queue, err := invalidation.Open(b.ctx, b.pool, b.queue.Name)
		b.must(err)
		pieces, err := queue.Output(b.ctx, id, time.Time{}, 0, 0, 1000)
		b.must(err)
		var events bytes.Buffer
		for i, p := range pieces {
			if p.Seq != i+1 || p.Token != pieces[0].Token {
				t.Errorf("piece %d is numbered %d", i+1, p.Seq)
			}
			events.Write(p.Data)
		}
		var whole struct {
			Choices []struct{ Message struct{ Content string } }
		}
		if json.Unmarshal(o.Result, &whole) != nil || len(whole.Choices) != 1 || len(strings.Fields(whole.Choices[0].Message.Content)) != words {
			t.Fatalf("result is %.300s", o.Result)
		}
		if streamed := contentOf(t, events.Bytes()); streamed != whole.Choices[0].Message.Content {
			t.Errorf("streamed\n%s\nand answered\n%s", streamed, whole.Choices[0].Message.Content)
		}
	})
	t.Run("a cancel stops the server", func(t *testing.T) {
		b := start(t, worker.Model{Stream: true}, 1)
		id := b.push(chat(5000))[0]
		workertest.WaitFor(t, func() bool { return serverLoad(t, url) == 1 })
		_, err := b.pool.Exec(b.ctx, `SELECT penstock.cancel_entry($1, 'unwanted')`, id)
		b.must(err)
		if o := b.outcome(id); o.Outcome != "cancelled" || strings.Contains(o.Reason, "unconfirmed") {
			t.Errorf("outcome %+v", o)
		}
		workertest.WaitFor(t, func() bool { return serverLoad(t, url) == 0 })
	})
	t.Run("no room costs nothing", func(t *testing.T) {
		b := start(t, worker.Model{}, 6) // the server takes two at once
		var payloads []string
		for range 12 {
			payloads = append(payloads, chat(10))
		}
		for _, id := range b.push(payloads...) {
			if o := b.outcome(id); o.Outcome != "done" || o.Attempt != 0 {
				t.Fatalf("outcome %+v", o)
			}
		}
	})
}

// contentOf reads the words out of an event stream.
func contentOf(t *testing.T, stream []byte) string {
	t.Helper()
	var text strings.Builder
	for line := range strings.Lines(string(stream)) {
		data, found := strings.CutPrefix(strings.TrimSpace(line), "data: ")
		if !found {
			continue
		}
		var p struct {
			Choices []struct{ Delta struct{ Content string } }
		}
		if err := json.Unmarshal([]byte(data), &p); err != nil {
			t.Fatal(err)
		}
		text.WriteString(p.Choices[0].Delta.Content)
	}
	return text.String()
}

func serverLoad(t *testing.T, url string) int {
	t.Helper()
	client := http.Client{Timeout: 5 * time.Second}
	reply, err := client.Get(url + "/load") //nolint:noctx // it has a timeout
	if err != nil {
		t.Fatal(err)
	}
	defer reply.Body.Close()
	body, err := io.ReadAll(reply.Body)
	if err != nil {
		t.Fatal(err)
	}
	var load struct {
		Calls int `json:"server_load"`
	}
	if err := json.Unmarshal(body, &load); err != nil {
		t.Fatal(err)
	}
	return load.Calls
}
