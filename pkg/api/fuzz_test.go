package api

import (
	"bytes"
	"encoding/json"
	"io"
	"net/http"
	"reflect"
	"strings"
	"testing"

	"github.com/danielgtaylor/huma/v2"

	"github.com/penstock/penstock/pkg/invalidation"
)

func FuzzLineOfAStream(f *testing.F) {
	for _, seed := range []string{`{"payload": 1}`, `{"payload": {"a": [1, null]}, "priority": 3, "due_at": "2030-01-01T00:00:00Z"}`, `[{"payload": 1}]`, `{"payload": 1} {}`, `{"payload": 1, "callback": {"url": "x"}}`, `{`, "\x00", `null`} {
		f.Add([]byte(seed), int64(1))
	}
	f.Fuzz(func(t *testing.T, text []byte, number int64) {
		s := &stream{pushOf: func(e entryToPush, n int64) (p invalidation.Push, err error) { return (&API{}).pushOf(e, "key", "", n) }}
		push, err := s.decode(text, number)
		if err == nil && !json.Valid(push.Payload) {
			t.Errorf("payload %q was accepted", push.Payload)
		}
		if err == nil && push.IdempotencyKey == "" {
			t.Error("no idempotency key")
		}
		if err != nil && !known(err) {
			t.Errorf("%v has no code", err)
		}
	})
}

func FuzzLines(f *testing.F) {
	f.Add([]byte("a\n\nb\r\nc"))
	f.Fuzz(func(t *testing.T, text []byte) {
		in := newLines(bytes.NewReader(text))
		var got [][]byte
		for {
			line, err := in.next()
			if err == io.EOF { //nolint:errorlint // as documented
				break
			}
			if err != nil {
				t.Fatal(err)
			}
			got = append(got, bytes.TrimSpace(bytes.Clone(line)))
		}
		var want [][]byte
		for line := range bytes.SplitSeq(text, []byte("\n")) {
			if line = bytes.TrimSpace(line); len(line) > 0 {
				want = append(want, line)
			}
		}
		if !bytes.Equal(bytes.Join(got, []byte("\n")), bytes.Join(want, []byte("\n"))) {
			t.Errorf("%q was read as %q", text, got)
		}
	})
}

func FuzzIdempotencyKey(f *testing.F) {
	for _, seed := range []string{`k`, `"k"`, `"a\"b\\"`, `"a`, `""`, `"a"b"`, "\x7f", `"\`, strings.Repeat("x", 500)} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		key, err := idempotencyKey(http.Header{"Idempotency-Key": {text}})
		if err != nil && !known(err) || err == nil && (key == "" || len(key) > keyBytesMax) {
			t.Errorf("%q gave %q (%v)", text, key, err)
		}
		quoted := `"` + strings.NewReplacer(`\`, `\\`, `"`, `\"`).Replace(key) + `"`
		if again, againErr := idempotencyKey(http.Header{"Idempotency-Key": {quoted}}); err == nil && (again != key || againErr != nil) {
			t.Errorf("%q in quotes became %q (%v)", key, again, againErr)
		}
	})
}

func FuzzLastEventID(f *testing.F) {
	f.Add(endedID)
	f.Add(place{1763715000000000, 5, 17}.String())
	f.Add("zz.1")
	f.Add("-1.2.3")
	f.Fuzz(func(t *testing.T, id string) {
		p, ended := readPlace(id)
		if ended != (id == endedID) || p.progress < 0 || p.token < 0 || p.seq < 0 {
			t.Errorf("%q was read as %+v, ended %v", id, p, ended)
		}
		if again, _ := readPlace(p.String()); again != p {
			t.Errorf("%+v was read back as %+v", p, again)
		}
	})
}

func FuzzWait(f *testing.F) {
	for _, seed := range []string{"30s", "5", "-1s", "1h", "99999999999999h", "x"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		if d, err := waitOf(text); d < 0 || d > waitMax || err != nil && !known(err) {
			t.Errorf("%q: %s (%v)", text, d, err)
		}
	})
}

// What a submission may be is said by its type: whatever passes the check can be read, and holds to it.
func FuzzSubmission(f *testing.F) {
	for _, seed := range []string{`{"model": "m", "payload": {"prompt": "x"}, "callback_url": "https://example.com"}`, `{"model": 1}`, `{"model": "m", "nonsense": 1}`, `[]`, `{"model":"m","payload":null,"priority":true}`} {
		f.Add([]byte(seed))
	}
	registry := huma.NewMapRegistry("#/", huma.DefaultSchemaNamer)
	schema := huma.SchemaFromType(registry, reflect.TypeOf(submission{}.Body))
	f.Fuzz(func(t *testing.T, text []byte) {
		var value any
		if json.Unmarshal(text, &value) != nil {
			return
		}
		found := &huma.ValidateResult{}
		huma.Validate(registry, schema, huma.NewPathBuffer(nil, 0), huma.ModeWriteToServer, value, found)
		if len(found.Errors) > 0 {
			return
		}
		var in submission
		if err := json.Unmarshal(text, &in.Body); err != nil || in.Body.Model == "" {
			t.Errorf("%s passed, and was read as %+v (%v)", text, in.Body, err)
		}
	})
}
