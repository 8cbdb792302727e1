package prediction

import (
	"errors"
	"fmt"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// mark is that of the prediction of the tests.
const mark = "0f0f0f0f"

// chunks writes texts as a worker streams them, with events between them that have none.
func chunks(texts ...string) string {
	var b strings.Builder
	for _, text := range texts {
		fmt.Fprintf(&b, "data: {\"choices\":[{\"delta\":{\"content\":%q}}]}\n\n", text)
		b.WriteString("data: {\"choices\":[{\"delta\":{}}]}\n\n")
	}
	return b.String()
}

func texts(list []delta) (text string) {
	for _, d := range list {
		text += d.text
	}
	return text
}

// Wherever a connection breaks, and however pieces come in, the next one brings the rest, and each event once.
func TestFollowerGoesOnBehindAnyEvent(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		var pieces []piece
		var all []string
		for seq := range rapid.IntRange(1, 6).Draw(t, "pieces") {
			var part []string
			for range rapid.IntRange(0, 4).Draw(t, "events") {
				part = append(part, fmt.Sprintf("t%d ", len(all)+len(part)))
			}
			all = append(all, part...)
			pieces = append(pieces, piece{7, seq + 1, chunks(part...)})
		}
		f := newFollower(place{})
		list, err := f.take(pieces)
		if err != nil || texts(list) != strings.Join(all, "") {
			t.Fatalf("got %q, %v", texts(list), err)
		}
		if err := f.check(all); err != nil {
			t.Fatal(err)
		}
		for i, d := range list {
			at, err := readPlace(d.at.id(mark), mark)
			if err != nil {
				t.Fatal(err)
			}
			again := newFollower(at)
			var rest []delta
			for { // as the beat reads: what is behind the cursor, a piece at a time
				token, seq := again.cursor()
				if token != 7 || seq >= len(pieces) {
					break
				}
				got, err := again.take(pieces[seq : seq+1])
				if err != nil {
					t.Fatal(err)
				}
				rest = append(rest, got...)
			}
			if want := strings.Join(all[i+1:], ""); texts(rest) != want {
				t.Fatalf("behind %s: got %q, want %q", d.at, texts(rest), want)
			}
			if err := again.check(all); err != nil {
				t.Fatal(err)
			}
		}
	})
}

func TestFollowerRefusesWhatDoesNotFollow(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		last   place
		pieces []piece
		text   string
		err    error
	}{
		"a later run, nothing was sent":  {place{}, []piece{{8, 1, chunks("new")}}, "new", nil},
		"a later run behind a part":      {place{7, 1, 1, 3}, []piece{{8, 1, chunks("new")}}, "", errAnew},
		"a later run among the pieces":   {place{}, []piece{{7, 1, chunks("old")}, {8, 1, chunks("new")}}, "old", errAnew},
		"behind the beginning of a run":  {place{token: 8}, []piece{{8, 1, chunks("new")}}, "new", nil},
		"a piece twice":                  {place{}, []piece{{7, 1, chunks("a")}, {7, 1, chunks("a")}, {7, 2, chunks("b")}}, "ab", nil},
		"a piece that is gone":           {place{}, []piece{{7, 2, chunks("b")}}, "", errGone},
		"a piece that is gone in resume": {place{7, 3, 1, 3}, []piece{{7, 4, chunks("d")}}, "", errGone},
	} {
		f := newFollower(c.last)
		list, err := f.take(c.pieces)
		if texts(list) != c.text || !errors.Is(err, c.err) {
			t.Errorf("%s: got %q, %v", name, texts(list), err)
		}
		if errors.Is(err, errAnew) && (f.at != place{token: 8} || f.hasTexts()) {
			t.Errorf("%s: the client goes on at %s", name, f.at)
		}
	}
}

// A log that was given up is not taken for the whole answer.
func TestFollowerKnowsThatTextIsMissing(t *testing.T) {
	t.Parallel()
	f := newFollower(place{})
	if _, err := f.take([]piece{{7, 1, chunks("once", " upon")}}); err != nil {
		t.Fatal(err)
	}
	if err := f.check([]string{"once upon"}); err != nil {
		t.Error(err)
	}
	if err := f.check([]string{"once upon a time"}); !errors.Is(err, errGap) {
		t.Errorf("got %v", err)
	}
	if err := f.check(nil); err != nil {
		t.Errorf("a result that has no texts: %v", err)
	}
	again := newFollower(f.at)
	if err := again.check([]string{"once upon"}); err != nil {
		t.Errorf("all of it was had on an earlier connection, and the pieces are gone: %v", err)
	}
	if list, err := again.take([]piece{{7, 1, chunks("once", " upon")}}); len(list) > 0 || err != nil {
		t.Errorf("got %v again, %v", list, err)
	}
	if err := again.check([]string{"once upon a time"}); !errors.Is(err, errGap) {
		t.Errorf("a client that came again is not told that text is missing: %v", err)
	}
	if err := newFollower(place{7, 2, 1, 3}).check([]string{"x"}); !errors.Is(err, errGone) {
		t.Errorf("a piece that was not found again: %v", err)
	}
}

// A stream whose events have no text, as calls of tools, is not taken for output that the client has.
func TestFollowerKnowsThatPiecesHadNoText(t *testing.T) {
	t.Parallel()
	f := newFollower(place{})
	call := `data: {"choices":[{"delta":{"tool_calls":[{"index":0,"function":{"arguments":"{}"}}]}}]}` + "\n\n"
	if list, err := f.take([]piece{{7, 1, call}, {7, 2, call}}); len(list) > 0 || err != nil {
		t.Fatalf("got %v, %v", list, err)
	}
	if f.hasTexts() || f.check(nil) != nil {
		t.Errorf("output is taken for sent: %+v", f.at)
	}
	if _, err := f.take([]piece{{8, 1, chunks("new")}}); !errors.Is(err, errAnew) {
		t.Errorf("a later run: %v", err)
	}
	if !newFollower(place{7, endSeq, endOutput, 0}).hasAll() {
		t.Error("the whole output would come twice")
	}
}

func TestDeltaOfReadsEachProtocol(t *testing.T) {
	t.Parallel()
	for event, want := range map[string]string{
		`data: {"choices":[{"delta":{"content":"a"}}]}`:    "a",
		`data: {"choices":[{"text":"b"}]}`:                 "b",
		`data: {"model_name":"m","text_output":"c"}`:       "c",
		`data: {"model_name":"m","text_output":["c"]}`:     "",
		`data: {"choices":[],"usage":{"prompt_tokens":1}}`: "",
		`data: [DONE]`: "",
	} {
		if got := deltaOf(event); got != want {
			t.Errorf("%s: got %q, want %q", event, got, want)
		}
	}
}

func FuzzReadPlace(f *testing.F) {
	f.Add(mark + "-7-3-1-9")
	f.Add("7-3-1-9")
	f.Add(mark + "--1-2-3-4")
	f.Add(mark + "-7-99999999999-1-1")
	f.Fuzz(func(t *testing.T, id string) {
		p, err := readPlace(id, mark)
		if err != nil || id == "" {
			return
		}
		again, err := readPlace(p.id(mark), mark)
		if p.token < 0 || p.seq < 0 || p.event < 0 || p.bytes < 0 || again != p || err != nil {
			t.Errorf("%q is read as %s", id, p)
		}
		if !strings.HasPrefix(id, mark) {
			t.Errorf("%q is not of the stream, and read as %s", id, p)
		}
	})
}

// An id that is not of this stream is refused: read as the beginning, it would repeat what the client has, and read as a
// place, it would keep from the client what it does not have.
func TestPlacesOfOtherStreamsAreRefused(t *testing.T) {
	t.Parallel()
	mine, other := markOf("a"), markOf("b")
	if at, err := readPlace("", mine); err != nil || at != (place{}) {
		t.Errorf("no id: got %v, %v", at, err)
	}
	end := place{7, endSeq, endDone, 10}
	if at, err := readPlace(end.id(mine), mine); err != nil || at != end {
		t.Errorf("an id of the stream: got %v, %v", at, err)
	}
	for _, id := range []string{
		end.id(other), end.String(), "7-3-1", "x", mine, mine + "-", mine + "-7-3-1", mine + "-7-3-1-9-2", mine + "-7-3-1-x",
		mine + "--7-3-1", mine + "7-3-1-9",
	} {
		if at, err := readPlace(id, mine); !errors.Is(err, errPlace) {
			t.Errorf("%s: got %v, %v", id, at, err)
		}
	}
}
