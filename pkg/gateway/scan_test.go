package gateway

import (
	"bytes"
	"encoding/json"
	"errors"
	"io"
	"mime/multipart"
	"net/http"
	"net/http/httptest"
	"slices"
	"strings"
	"testing"
	"testing/iotest"
)

func FuzzScanReadsAsEncodingJSON(f *testing.F) {
	for _, seed := range []string{
		`{}`, `{"model":"m"}`, ` { "a" : [1,{"model":"x"}], "model" : "m\u0061\"\\" , "stream":true } `, `{"model":5}`,
		`{"model":"a","model":"b"}`, `{"model":"a","n":1,"n":1}`, `{"mod\u0065l":"a","stream":false,"stream_options":null}`, `[]`, `{"a":"\\\\\""}`, `1`,
		`{"stream_options":null,"model":"a"}`, `{"model":"a","stream_options":null,"stream_options":{}}`,
		`{"stream_options":null,"stream_options": null ,"model":"a"}`, `{"messages":[{"content":"]}{["}],"max_tokens":12.5e1}`, `{"model":"a"} x`, `{"": {"":""}}`,
		`{"model":"` + strings.Repeat("a", modelNameMax) + `"}`, `{"model":"` + strings.Repeat(`\u00e9`, modelNameMax/2+1) + `"}`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		got, err := scan(body)
		var fields map[string]json.RawMessage
		valid := json.Unmarshal(body, &fields) == nil && fields != nil
		if !valid {
			if err == nil {
				t.Fatalf("%q was read, and is no object", body)
			}
			return
		}
		var name string
		model, present := fields["model"]
		isText := present && len(model) > 0 && model[0] == '"' && json.Unmarshal(model, &name) == nil
		switch {
		case err == errModelTwice, err == errChoicesTwice: //nolint:errorlint // returned as they are
			return
		case err == errModelLong && len(name) > modelNameMax: //nolint:errorlint // as above
			return
		case present && !isText && err == nil:
			t.Fatalf("%q: model is no text, and was taken", body)
		case err != nil && (!present || isText):
			t.Fatalf("%q was refused: %v", body, err)
		case err != nil:
			return
		}
		if got.name != name || got.stream != (string(fields["stream"]) == "true") {
			t.Fatalf("%q: got model %q stream %v", body, got.name, got.stream)
		}
		if !present {
			return
		}
		checkRewrite(t, body, got, fields)
	})
}

// checkRewrite checks that a rewritten body differs in the model and the option, and in nothing else.
func checkRewrite(t *testing.T, body []byte, s scanned, fields map[string]json.RawMessage) {
	t.Helper()
	out := bytes.Join(s.rewrite(body, "remote/\"x\"", true), nil)
	var fresh map[string]json.RawMessage
	if err := json.Unmarshal(out, &fresh); err != nil {
		t.Fatalf("%q became %q: %v", body, out, err)
	}
	var name string
	if json.Unmarshal(fresh["model"], &name) != nil || name != "remote/\"x\"" {
		t.Fatalf("%q became %q: model is %s", body, out, fresh["model"])
	}
	if options := fresh["stream_options"]; !s.streamOptions && string(options) != `{"include_usage":true}` {
		t.Fatalf("%q became %q: stream_options is %s", body, out, options)
	}
	for key, value := range fields {
		if key != "model" && key != "stream_options" && !bytes.Equal(fresh[key], value) {
			t.Fatalf("%q became %q: %s changed", body, out, key)
		}
	}
	if same := bytes.Join(s.rewrite(body, s.name, false), nil); !bytes.Equal(same, body) {
		t.Fatalf("%q changed to %q although nothing is to change", body, same)
	}
}

func TestPartsAreReadAsOne(t *testing.T) {
	parts := [][]byte{[]byte("ab"), nil, []byte("cde"), []byte(""), []byte("f")}
	if err := iotest.TestReader(&partsReader{parts: parts}, []byte("abcdef")); err != nil {
		t.Fatal(err)
	}
	if n := size(parts); n != 6 {
		t.Errorf("size is %d", n)
	}
}

func TestFormNamesItsModel(t *testing.T) {
	var body bytes.Buffer
	form := multipart.NewWriter(&body)
	file, err := form.CreateFormFile("file", "a.wav")
	if err != nil {
		t.Fatal(err)
	}
	_, _ = io.WriteString(file, "name=\"model\"\r\n\r\nwhisper\r\n--not the boundary")
	_ = form.WriteField("prompt", "whisper")
	_ = form.WriteField("model", "whisper")
	_ = form.WriteField("language", "de")
	_ = form.Close()
	name, at, err := formModel(body.Bytes(), form.Boundary())
	if err != nil || name != "whisper" {
		t.Fatalf("got %q, %v", name, err)
	}
	if !strings.HasSuffix(string(body.Bytes()[:at.from]), "name=\"model\"\r\n\r\n") || string(body.Bytes()[at.from:at.to]) != "whisper" {
		t.Errorf("the value was found at %v", at)
	}
}

// A form that ends before its last boundary is no form, wherever it is cut.
func TestFormsThatAreCutAreNotRead(t *testing.T) {
	t.Parallel()
	const whole = "--b\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nwhisper\r\n--b--"
	for end := range len(whole) {
		if name, _, err := formModel([]byte(whole[:end]), "b"); err == nil {
			t.Errorf("%q was read, and names %q", whole[:end], name)
		}
	}
	if name, _, err := formModel([]byte(whole), "b"); name != "whisper" || err != nil {
		t.Errorf("got %q, %v", name, err)
	}
}

// The place of the value is that of the field whatever is around it, or the form is refused: the worker must not get a
// name that the gateway has not looked at.
func TestNameOfAModelIsReplacedInItsField(t *testing.T) {
	t.Parallel()
	part := func(name, value string) string {
		return "--b\r\nContent-Disposition: form-data; name=\"" + name + "\"\r\n\r\n" + value + "\r\n"
	}
	const end = "--b--\r\n"
	for body, want := range map[string]string{
		part("model", "m") + end:                                                                  part("model", "R") + end,
		part("a", "m") + part("model", "m") + part("b", "m") + end:                                part("a", "m") + part("model", "R") + part("b", "m") + end,
		part("a", "\r\n\r\nm\r\n--bc") + part("model", "m") + end:                                 part("a", "\r\n\r\nm\r\n--bc") + part("model", "R") + end,
		"preamble\r\n\r\nm\r\n" + part("model", "m") + end:                                        "preamble\r\n\r\nm\r\n" + part("model", "R") + end,
		part("model", "m") + "--b--\r\n\r\nm\r\n--b":                                              part("model", "R") + "--b--\r\n\r\nm\r\n--b",
		"--b \r\nContent-Disposition: form-data; name=model\r\n\r\nm\r\n--b \t\r\n\r\n\r\n" + end: "--b \r\nContent-Disposition: form-data; name=model\r\n\r\nR\r\n--b \t\r\n\r\n\r\n" + end,
		"--bc\r\n\r\nm\r\n" + part("model", "m") + end:                                            "",
		part("model", "") + part("model", "m") + end:                                              part("model", "") + part("model", "R") + end,
		strings.ReplaceAll(part("model", "m")+end, "\r\n", "\n"):                                  "",
		strings.ReplaceAll(part("model", "m"), "\r\n\r\n", "\n\n") + part("a", "m") + end:         "",
	} {
		r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/v1/audio/transcriptions", nil)
		r.Header.Set("Content-Type", "multipart/form-data; boundary=b")
		a, err := readForm(r, []byte(body))
		switch {
		case want == "" && err == nil:
			t.Errorf("%q was read", body)
		case want == "":
		case err != nil:
			t.Errorf("%q was refused: %v", body, err)
		default:
			if got := bytes.Join(a.parts("R", false), nil); string(got) != want {
				t.Errorf("%q became %q, want %q", body, got, want)
			}
		}
	}
}

// A form whose model is replaced names the new one, and has the other fields as they were.
func FuzzNameOfAModelIsReplacedInItsField(f *testing.F) {
	for _, seed := range []string{
		"--b\r\nContent-Disposition: form-data; name=model\r\n\r\nm\r\n--b--", "--b\r\n\r\n--b--", "\r\n--b\n\n\n--b--",
		"--b\r\nA: b\r\n \r\n\r\nm\r\n--b \t\r\nContent-Disposition: form-data; name=\"model\"\r\n\r\nm\r\n--b--\r\nepilogue",
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, body []byte) {
		name, at, err := formModel(body, "b")
		if err != nil || name == "" {
			return
		}
		if got := string(body[at.from:at.to]); got != name {
			t.Fatalf("%q: %q is where %q was found", body, got, name)
		}
		fresh, again, err := formModel(slices.Concat(body[:at.from], []byte("remote"), body[at.to:]), "b")
		if err != nil || fresh != "remote" || again.from != at.from {
			t.Fatalf("%q: names %q at %v behind a change at %v: %v", body, fresh, again, at, err)
		}
	})
}

const plainStream = "data: {\"choices\":[{\"delta\":{\"content\":\"a\"}}]}\n\n" +
	"data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"stop\"}],\"usage\":null}\n\n" + "data: [DONE]\n\n"

// The stream is the same for every way in which it may arrive in two pieces, and byte for byte.
func TestUnracedUsageChunkIsTakenOutWhereverTheStreamIsCut(t *testing.T) {
	chunk := "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":3,\"completion_tokens\":2}}\n\n"
	for _, eol := range []string{"\n", "\r\n"} {
		plain := strings.ReplaceAll(plainStream, "\n", eol)
		full := strings.Replace(plain, "data: [DONE]", strings.ReplaceAll(chunk, "\n", eol)+"data: [DONE]", 1)
		for at := range len(full) + 1 {
			for _, sizes := range [][]string{{full[:at], full[at:]}, strings.Split(full, "")} {
				var cut eventCut
				var last window
				last.open(-1)
				var out []byte
				for _, sent := range sizes {
					piece, err := last.read(strings.NewReader(sent))
					if err != nil && sent != "" {
						t.Fatal(err)
					}
					out = append(out, cut.pass(piece)...)
				}
				out = append(out, cut.rest()...)
				if string(out) != plain {
					t.Fatalf("cut at %d: got %q, want %q", at, out, plain)
				}
				if in, n := last.usage(); in != 3 || n != 2 {
					t.Fatalf("cut at %d: usage is %d, %d", at, in, n)
				}
				last.close()
			}
		}
	}
}

func TestAnEventThatIsNotTheUsageChunkIsKept(t *testing.T) {
	for _, event := range []string{
		"data: {\"choices\":[]}\n\n", "data: {\"choices\":[],\"usage\":null}\n\n", ": comment\n\n",
		"data: {\"choices\":[{\"delta\":{\"content\":\"\\\"choices\\\":[] \\\"usage\\\":\"}}],\"usage\":{}}\n\n",
		"data: " + strings.Repeat("x", 2*eventMax) + "\n\n", "data: no end",
	} {
		var cut eventCut
		got := string(cut.pass([]byte(event))) + string(cut.rest())
		if got != event {
			t.Errorf("%.60q became %.60q", event, got)
		}
	}
}

// The walk over a body takes what encoding/json takes, and ends with the last byte.
func TestWalkTakesWhatEncodingJSONTakes(t *testing.T) {
	t.Parallel()
	deep := func(n int) string { return strings.Repeat("[", n) + "1" + strings.Repeat("]", n) }
	values := []string{
		"0", "-0", "-", "01", "1.", "1.5", ".5", "1e5", "1E+5", "1e", "1e+", "-1.5e-10", "true", "tru", "nulll", "null", "false",
		`""`, `"a`, `"\"`, `"\\"`, `"\\\""`, `"\x"`, `"\u12"`, `"\u12g4"`, `"\ud800"`, `"\b\f\n\r\t\/"`, "\"a\tb\"",
		"\"1234567\x1f\"", "\"12345678\x1f\"", "\"é\xff\x80 1234567890\"", "\"\x7f\x80\xa0\xa2\xdc\"", "{}", "[]", "[,]", "[1,]", "[1 2]",
		`{"a"}`, `{"a":}`, `{"a":1,}`, `{a:1}`, `{"a":1 "b":2}`, "[[], {}]", deep(9_999), deep(10_000), " ", "",
	}
	for _, v := range values {
		for _, body := range []string{`{"a":` + v + `}`, `{"a":[` + v + `,{"b":` + v + `}]}`, v, `{"a":` + v} {
			_, err := scan([]byte(body))
			object := json.Valid([]byte(body)) && strings.HasPrefix(strings.TrimSpace(body), "{")
			if (err == nil) != object {
				t.Errorf("%.60q: got %v, encoding/json takes it: %v", body, err, object)
			}
		}
	}
}

// A member that comes again takes no memory.
func TestRepeatedMembersAreNotKept(t *testing.T) {
	t.Parallel()
	body := []byte(`{"model":"m"` + strings.Repeat(`,"n":1,"best_of":1`, 1000) + `}`)
	if s, err := scan(body); !errors.Is(err, errChoicesTwice) || len(s.choices) != 2 {
		t.Errorf("%d values are kept, and the error is %v", len(s.choices), err)
	}
}

// largePrompt is the body of a chat with a prompt of so many bytes.
func largePrompt(size int) []byte {
	return []byte(`{"model":"m","messages":[{"role":"user","content":"` + strings.Repeat("word ", size/5) + `"}]}`)
}

func BenchmarkScanOfALargePrompt(b *testing.B) {
	body := largePrompt(220_000)
	b.SetBytes(int64(len(body)))
	b.ReportAllocs()
	for b.Loop() {
		if _, err := scan(body); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkHashesOfALargePrompt(b *testing.B) {
	body := largePrompt(220_000)
	b.SetBytes(int64(len(body)))
	b.ReportAllocs()
	for b.Loop() {
		prefixHashes(body)
	}
}
