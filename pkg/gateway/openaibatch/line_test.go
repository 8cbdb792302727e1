package openaibatch

import (
	"encoding/json"
	"errors"
	"io"
	"strings"
	"testing"
	"testing/iotest"
	"unicode/utf8"
)

// A line lies where the reader says, however the file is cut into reads.
func TestLinesLieWhereTheReaderSays(t *testing.T) {
	t.Parallel()
	text := "\n{\"a\":1}\r\n  \n" + strings.Repeat("x", 200) + "\nlast"
	want := []string{`{"a":1}`, strings.Repeat("x", 200), "last"}
	for name, source := range map[string]io.Reader{
		"whole": strings.NewReader(text), "bytes": iotest.OneByteReader(strings.NewReader(text)),
	} {
		l := newLineReader(source, 1000)
		for i, w := range want {
			got, err := l.read()
			if err != nil || string(got) != w || strings.TrimSpace(text[l.at:l.next]) != w {
				t.Errorf("%s, line %d: got %q at %d to %d, %v", name, i, got, l.at, l.next, err)
			}
		}
		if _, err := l.read(); !errors.Is(err, io.EOF) || l.number != 5 {
			t.Errorf("%s: got %v behind line %d", name, err, l.number)
		}
	}
	if _, err := newLineReader(strings.NewReader(text), 100).read(); err != nil {
		t.Errorf("the first line is short: %v", err)
	}
	l := newLineReader(strings.NewReader(strings.Repeat("x", 1<<20)), 100)
	if _, err := l.read(); !errors.Is(err, errLongLine) || cap(l.buf) > 256<<10 {
		t.Errorf("got %v with %d bytes held", err, cap(l.buf))
	}
}

// What a message quotes of a line is short, however long the text in the line is.
func TestMessagesOfFlawsAreShort(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("\u20ac\\u0000", 1<<20)
	for name, text := range map[string]string{
		"method": `{"custom_id":"a","method":"` + long + `","url":"/v1/embeddings","body":{"model":"m"}}`,
		"url":    `{"custom_id":"a","method":"POST","url":"` + long + `","body":{"model":"m"}}`,
	} {
		_, _, bad := parse([]byte(text), "/v1/embeddings")
		if bad == nil || len(bad.Message) > messageMax || !utf8.ValidString(bad.Message) || !strings.Contains(bad.Message, "...") {
			t.Errorf("%s: got %.600v", name, bad)
		}
	}
	v := validation{batch: &batchRow{Model: new(string)}, seen: map[[32]byte]bool{}}
	id := "a"
	if bad := v.fits(request{CustomID: &id}, long); bad == nil || len(bad.Message) > messageMax {
		t.Errorf("model: got %.600v", bad)
	}
}

// A worker may answer with anything: what goes into a file is one line of JSON.
func FuzzParse(f *testing.F) {
	f.Add(`{"custom_id":"a","method":"POST","url":"/v1/embeddings","body":{"model":"m"}}`)
	f.Add(`{"custom_id":null}`)
	f.Add(`[]`)
	f.Fuzz(func(t *testing.T, line string) {
		r, model, bad := parse([]byte(line), "/v1/embeddings")
		if bad != nil {
			return
		}
		var body map[string]json.RawMessage
		if *r.CustomID == "" || model == "" || json.Unmarshal(r.Body, &body) != nil || body["model"] == nil {
			t.Errorf("%q passed as %+v", line, r)
		}
	})
}
