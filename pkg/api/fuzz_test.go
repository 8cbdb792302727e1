package api

import (
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"reflect"
	"strings"
	"testing"

	"github.com/penstock/penstock/pkg/invalidation"
)

func FuzzLineOfAStream(f *testing.F) {
	for _, seed := range []string{`{"payload": 1}`, `{"payload": {"a": [1, null]}, "priority": 3, "due_at": "2030-01-01T00:00:00Z"}`, `{"payload": 1, "start_by": "10m"}`, `[{"payload": 1}]`, `{"payload": 1} {}`, `{"payload": 1, "callback": {"url": "x"}}`, `{`, "\x00", `null`} {
		f.Add([]byte(seed), int64(1))
	}
	f.Fuzz(func(t *testing.T, text []byte, number int64) {
		s := &lineStream{pushOf: func(e entryToPush, n int64) (p invalidation.Push, err error) {
			return (&API{}).pushOf(caller{}, e, "key", "", n)
		}}
		line := &streamLine{number: number}
		err := s.decode(text, line)
		push := line.push
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

// Whatever claims to be gzip comes out as it went in, or as an error with a code, and as no more than the bound.
func FuzzGzip(f *testing.F) {
	var packed bytes.Buffer
	z := gzip.NewWriter(&packed)
	_, _ = z.Write([]byte(`{"payload": 1}`))
	_ = z.Close()
	f.Add(packed.Bytes())
	f.Add(packed.Bytes()[:12])
	f.Add(append(packed.Bytes(), packed.Bytes()...))
	f.Add([]byte{0x1f, 0x8b})
	f.Fuzz(func(t *testing.T, text []byte) {
		const limit = 64 << 10
		read := func(body []byte) ([]byte, error) {
			plain, err := inflated(&http.Request{Header: http.Header{"Content-Encoding": {"gzip"}}, Body: io.NopCloser(bytes.NewReader(body))})
			if err != nil {
				return nil, err
			}
			got, _, err := newBodyMemory(1<<20).readAll("", plain, limit)
			return got, endedEarly(err)
		}
		var tooLarge *http.MaxBytesError
		if got, err := read(text); len(got) > limit || err != nil && !known(err) && !errors.As(err, &tooLarge) {
			t.Errorf("%d bytes (%v)", len(got), err)
		}
		var own bytes.Buffer
		z := gzip.NewWriter(&own)
		_, _ = z.Write(text)
		_ = z.Close()
		if got, err := read(own.Bytes()); err == nil && !bytes.Equal(got, text) || err != nil && len(text) <= limit && !errors.Is(err, errBomb) {
			t.Errorf("%d bytes came out as %d (%v)", len(text), len(got), err)
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

// What encoding/json refuses to read as a submission is refused, and what is read is what encoding/json reads.
func FuzzSubmission(f *testing.F) {
	for _, seed := range []string{
		`{"model": "m", "payload": {"prompt": "x"}, "callback_url": "https://example.com"}`, `{"model": 1}`, `{"model": "m", "nonsense": 1}`,
		`[]`, `{"model":"m","payload":null,"priority":true}`, `{"model":"m"`, `{"model":"m"} {}`, `{"model":"m","model":"n"}`,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		var in, want submission
		if decodeWhole(text, in.members()) != nil {
			return
		}
		decoder := json.NewDecoder(bytes.NewReader(text))
		decoder.DisallowUnknownFields()
		if err := decoder.Decode(&want); err != nil || !reflect.DeepEqual(in, want) {
			t.Errorf("%s was read as %+v, and by encoding/json as %+v (%v)", text, in, want, err)
		}
	})
}
