package invalidation

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

func TestDocumentsThatCannotBeStoredOrReadAreRefused(t *testing.T) {
	for name, text := range map[string]string{
		"nothing":              ``,
		"no JSON":              `{"a":`,
		"two values":           `1 2`,
		"no UTF-8":             "\"\xff\"",
		"NUL":                  `"a\u0000b"`,
		"NUL in a name":        `{"a\u0000": 1}`,
		"NUL after a slash":    `"\\\u0000"`,
		"high surrogate":       `"\ud83d"`,
		"high surrogate twice": `"\ud83d\ud83d"`,
		"low surrogate first":  `"\ude00\ud83d"`,
		"surrogate and letter": `"\ud83dabcdef"`,
		"number bomb":          `[1e131071]`,
		"too deep":             strings.Repeat("[", documentDepthMax+1) + strings.Repeat("]", documentDepthMax+1),
		"too many values":      "[" + strings.Repeat("0,", documentValuesMax) + "0]",
		"too large":            `"` + strings.Repeat("a", documentBytesMax) + `"`,
	} {
		if err := CheckJSON([]byte(text)); !errors.Is(err, ErrInvalid) {
			t.Errorf("%s: %v", name, err)
		}
	}
	for _, text := range []string{
		`null`, `""`, `{"a": [1, 2.5, -3e7, "\\u0000", "\\\\ud83d", "😀", "😀\n\"[[["]}`,
		strings.Repeat("[", documentDepthMax) + strings.Repeat("]", documentDepthMax),
	} {
		if err := CheckJSON([]byte(text)); err != nil {
			t.Errorf("%.40s: %v", text, err)
		}
	}
}

// hostileJSON draws texts around the edges of what Postgres stores.
func hostileJSON() *rapid.Generator[string] {
	text := rapid.Map(rapid.SliceOfN(rapid.SampledFrom([]string{
		`a`, `\u0000`, `\ud83d`, `\ude00`, `\\`, `\"`, `\n`, "\x00", "\xff", "\xed\xa0\x80", `é`, "é", `[`, `,`, `1e999`,
	}), 0, 5), func(parts []string) string { return `"` + strings.Join(parts, "") + `"` })
	number := rapid.OneOf(
		rapid.SampledFrom([]string{"0", "-0", "1e308", "1e309", "1e131071", "1e131072", "1e-16383", "0e99999", "-1e-400", "1e99999999999", "01"}),
		rapid.Map(rapid.IntRange(1, 20000), func(n int) string { return "0." + strings.Repeat("3", n) }),
	)
	leaf := rapid.OneOf(text, number, rapid.SampledFrom([]string{`null`, `true`, ``, `{`, ` `}))
	deep := rapid.Map(rapid.IntRange(1, 12000), func(n int) string { return strings.Repeat("[", n) + strings.Repeat("]", n) })
	list := rapid.Map(rapid.SliceOfN(leaf, 0, 6), func(parts []string) string { return "[" + strings.Join(parts, ",") + "]" })
	object := rapid.Map(rapid.SliceOfN(rapid.Custom(func(t *rapid.T) string {
		return text.Draw(t, "name") + ":" + leaf.Draw(t, "member")
	}), 0, 6), func(parts []string) string { return "{" + strings.Join(parts, ",") + "}" })
	return rapid.OneOf(leaf, deep, list, object)
}

// Whatever the check lets through, the database takes and gives back as text.
func TestEachDocumentThatPassesTheCheckIsStored(t *testing.T) {
	b := newBed(t, Config{})
	passed := 0
	rapid.Check(t, func(t *rapid.T) {
		text := hostileJSON().Draw(t, "document")
		if CheckJSON([]byte(text)) != nil {
			return
		}
		passed++
		var length int
		err := b.pool.QueryRow(b.ctx, `SELECT length($1::jsonb::text)`, json.RawMessage(text)).Scan(&length)
		if err != nil || length > 400*len(text)+1000 {
			t.Fatalf("%.200q is %d bytes as text in the database (%v)", text, length, err)
		}
	})
	if passed == 0 {
		t.Error("the check let nothing through")
	}
}

// A result that cannot be recorded is the failure of its entry, and no other entry notices.
func TestRunWhoseResultCannotBeRecordedFails(t *testing.T) {
	for _, result := range []string{`"\u0000"`, `"\ud83d"`, `[1e131071]`, "\"\xff\"", `{`} {
		e := Judge(&Run{Lock: &Lock{}, Queue: &Queue{}}, json.RawMessage(result), nil, 0, 0)
		if e.Verb() != "fail" || e.failure.Class != "result" {
			t.Errorf("%s ends as %s of class %q", result, e.Verb(), e.failure.Class)
		}
	}
	if e := Judge(&Run{Lock: &Lock{}, Queue: &Queue{}}, json.RawMessage(`{"a":1}`), nil, 0, 0); e.Verb() != "done" {
		t.Errorf("a result ends as %s", e.Verb())
	}
}

// The failure for a result that was refused read the notes of its lock, which the handler of a later entry may be
// writing.
func TestAnEndingThatIsRefusedFailsWithoutNotes(t *testing.T) {
	l := &Lock{Entries: []Entry{{ID: 1}, {ID: 2}}}
	done := Done(l, 1, json.RawMessage(`{}`), 0)
	done.Last = true
	noted := make(chan struct{})
	go func() {
		defer close(noted)
		(&Run{Lock: l, Entry: l.Entries[1]}).Note(json.RawMessage(`{"gpu_ms": 3}`))
	}()
	first, ok := done.Refused(errors.New("invalid input syntax"))
	<-noted
	noting := Done(l, 2, nil, 0)
	second, _ := noting.Refused(errors.New("invalid input syntax"))
	if !ok || first.Verb() != "fail" || first.Entry != 1 || first.Lock != l || !first.Last || second.failure.meta != nil {
		t.Errorf("%+v and %+v, want failures without notes", first, second)
	}
	if _, ok := first.Refused(errors.New("again")); ok {
		t.Error("the failure for an ending that was refused has one of its own")
	}
}

func TestNoteThatCannotBeKeptIsLeftOut(t *testing.T) {
	l := &Lock{}
	r := &Run{Lock: l, Entry: Entry{ID: 7}}
	r.Note(json.RawMessage(`{"gpu_ms": 3}`))
	for _, note := range []string{`[1e131071]`, `"\u0000"`, fmt.Sprintf("%q", strings.Repeat("a", noteBytesMax))} {
		r.Note(json.RawMessage(note))
	}
	if got := string(l.notes[7]); got != `{"gpu_ms": 3}` {
		t.Errorf("noted %.100s", got)
	}
}

func BenchmarkCheckJSON(b *testing.B) {
	text := []byte(`{"choices":[{"message":{"content":"` + strings.Repeat("All work and no play. ", 200) + `"}}],"usage":{"prompt_tokens":7}}`)
	b.SetBytes(int64(len(text)))
	for b.Loop() {
		if err := CheckJSON(text); err != nil {
			b.Fatal(err)
		}
	}
}
