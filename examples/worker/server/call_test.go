package server

import (
	"bytes"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/penstock/penstock/examples/worker/model"
	"github.com/penstock/penstock/examples/worker/sample"
)

func TestEchoAnswersOnEveryRoute(t *testing.T) {
	inWorld(t, Config{}, func(w *world) {
		for path, body := range map[string]string{
			"/echo":     `{"n": 7}`,
			"/generate": `{"model":"echo","payload":{"n":7}}`,
		} {
			got := w.post(path, body, fromDispatcher)
			if got.Code != 200 || got.Status != "success" || string(got.Result) != `{"n":7}` {
				t.Errorf("%s: %+v", path, got)
			}
		}
		got := w.post("/generate", `{"model":"echo","n":7}`)
		if string(got.Result) != `{"n":7}` {
			t.Errorf("inline payload: %+v", got)
		}
	})
}

func TestBadRequestsNameWhatIsWrong(t *testing.T) {
	inWorld(t, Config{BodyBytes: 1000}, func(w *world) {
		cases := []struct {
			path, body, header string
			code               int
			field, detail      string
		}{
			{"/echo", `{"n":`, "", 400, "", "not JSON"},
			{"/echo", ``, "", 400, "", "not JSON"},
			{"/generate", `[]`, "", 400, "", "must be an object"},
			{"/generate", `{"payload":1}`, "", 422, "model", "is required"},
			{"/generate", `{"model":7}`, "", 422, "model", "is required"},
			{"/generate", `{"model":"fuax","payload":1}`, "", 422, "model", `"fuax" is not one of echo, gate`},
			{"/fuax", `{}`, "", 404, "", "no such model"},
			{"/gate", `{"id":1}`, "", 422, "", "must be"},
			{"/echo", `"` + strings.Repeat("x", 1000) + `"`, "", 413, "", "1000 bytes"},
			{"/echo?async=maybe", `1`, "", 422, "async", "true or false"},
			{"/echo", `1`, "Penstock-Token: 3", 422, "Penstock-Entry", "is required"},
			{"/echo", `1`, "Penstock-Remaining-Ms: soon", 422, "Penstock-Remaining-Ms", "whole number"},
			{"/echo", `1`, "Penstock-Entry: " + strings.Repeat("e", 257), 422, "Penstock-Entry", "longer"},
			{"/echo", `1`, "Idempotency-Key: " + strings.Repeat("e", 257), 422, "Idempotency-Key", "longer"},
		}
		for _, c := range cases {
			var headers []string
			if c.header != "" {
				headers = append(headers, c.header)
			}
			got := w.post(c.path, c.body, headers...)
			if got.Code != c.code || got.Field != c.field || !strings.Contains(got.Detail, c.detail) {
				t.Errorf("%s %.40s %s: got %+v, want %d, field %q, %q", c.path, c.body, c.header, got, c.code, c.field, c.detail)
			}
		}
		for _, token := range []string{"x", "-1", "0", "1.5"} {
			got := w.post("/echo", `1`, "Penstock-Entry: e", "Penstock-Token: "+token)
			if got.Code != 422 || got.Field != "Penstock-Token" {
				t.Errorf("token %q: %+v", token, got)
			}
		}
	})
}

func TestModelPanicFailsTheRunAndFreesTheSlot(t *testing.T) {
	inWorld(t, Config{Slots: 1}, func(w *world) {
		w.expect(w.post("/gate", `"panic"`), 500, "gate broke")
		w.expect(w.post("/echo", `1`), 200, "success")
	})
}

// TestInference sends real pictures and texts through real HTTP and models.
func TestInference(t *testing.T) {
	s, err := New(Config{})
	if err != nil {
		t.Fatal(err)
	}
	models, err := model.Load("faces", "language")
	if err != nil {
		t.Fatal(err)
	}
	s.SetModels(models)
	ts := httptest.NewServer(s.Handler())
	defer ts.Close()

	calls, err := sample.Calls(20)
	if err != nil {
		t.Fatal(err)
	}
	for i, c := range calls {
		body, err := json.Marshal(map[string]any{"model": c.Model, "payload": c.Payload})
		if err != nil {
			t.Fatal(err)
		}
		got := postJSON(t, ts.URL+"/generate", body)
		var result map[string]any
		if err := json.Unmarshal(got.Result, &result); err != nil {
			t.Fatalf("call %d: %+v: %v", i, got, err)
		}
		for field, want := range c.Expected {
			if n, isInt := want.(int); isInt {
				want = float64(n)
			}
			if result[field] != want {
				t.Errorf("call %d (%s): %s is %v, want %v", i, c.Model, field, result[field], want)
			}
		}
	}

	got := postJSON(t, ts.URL+"/language", []byte(`{"text":"Bonjour tout le monde, comment allez-vous aujourd'hui ?"}`))
	if got.Status != "success" || !bytes.Contains(got.Result, []byte(`"language":"fr","name":"French"`)) {
		t.Errorf("Bonjour: %+v", got)
	}
	got = postJSON(t, ts.URL+"/faces", []byte(`{"image":"aGVsbG8="}`))
	if got.Code != 422 || got.Field != "image" {
		t.Errorf("text as a picture: %+v", got)
	}
}

func postJSON(t *testing.T, url string, body []byte) answer {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url, bytes.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("X-Source", "dispatcher")
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	a := answer{Code: res.StatusCode}
	if err := json.NewDecoder(res.Body).Decode(&a); err != nil {
		t.Fatal(err)
	}
	return a
}
