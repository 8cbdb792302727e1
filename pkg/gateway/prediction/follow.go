package prediction

import (
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"strconv"
	"strings"
)

// place is where in the output of a prediction an event of its stream comes from. With the mark of the prediction it is
// the id of the event, which clients send back as Last-Event-ID.
type place struct {
	token int64 // of the run: a later run begins its output anew
	seq   int   // of the piece of output; endSeq for what follows all pieces
	event int   // of the events that the piece gave, from 1; 0: before the first
	bytes int   // of the texts of the run up to and with this event
}

// endSeq is the number of the piece that stands for the end of a stream.
const endSeq = 1 << 30

// Events of the end of a stream, by their number.
const (
	endOutput = 1 // output that was not streamed
	endDone   = 2
)

// String returns the place without a mark.
func (p place) String() string { return fmt.Sprintf("%d-%d-%d-%d", p.token, p.seq, p.event, p.bytes) }

// markOf is in the ids of all events of a prediction, and in those of no other, but for one in four billion.
func markOf(prediction string) string {
	h := fnv.New32a()
	_, _ = h.Write([]byte(prediction)) // never fails
	return fmt.Sprintf("%08x", h.Sum32())
}

// id returns the place as the id of an event of the prediction with a mark.
func (p place) id(mark string) string { return mark + "-" + p.String() }

// errPlace refuses an id that the method id has not made for the prediction, as those of other predictions, and those
// that earlier versions gave. To take it for the beginning of the stream would repeat what its client has.
var errPlace = errors.New("Last-Event-ID is not the id of an event of this stream: " +
	"connect without it to read the stream from its beginning")

// readPlace reads the id of an event of the prediction with a mark; the empty id is the beginning of the stream. The
// error is errPlace.
func readPlace(id, mark string) (place, error) {
	if id == "" {
		return place{}, nil
	}
	rest, is := strings.CutPrefix(id, mark+"-")
	parts := strings.Split(rest, "-")
	if !is || len(parts) != 4 {
		return place{}, errPlace
	}
	token, err1 := strconv.ParseInt(parts[0], 10, 64)
	seq, err2 := strconv.ParseUint(parts[1], 10, 31)
	event, err3 := strconv.ParseUint(parts[2], 10, 31)
	bytes, err4 := strconv.ParseUint(parts[3], 10, 31)
	if errors.Join(err1, err2, err3, err4) != nil || token < 0 {
		return place{}, errPlace
	}
	return place{token, int(seq), int(event), int(bytes)}, nil //nolint:gosec // 31 bits
}

// piece is a piece of output of a run: whole server-sent events of the worker.
type piece struct {
	token int64
	seq   int
	data  string
}

// Errors of a stream that cannot go on.
var (
	errAnew = errors.New("the run was broken off and began anew, and its output with it: connect again")
	errGone = errors.New("the output of the run is not kept any more: read the prediction")
	errGap  = errors.New("the output of the run was not kept whole: read the prediction")

	errElsewhere = errors.New("the output of the run is in a store that its client cannot read")
)

// follower turns pieces of output into the events of one client's stream. It is pure.
type follower struct {
	at    place // of the last event that the client has, from this connection or an earlier one
	whole bool  // the client has all events of the piece at.seq
}

// newFollower returns one that goes on behind an event that the client has; the zero place: from the beginning.
func newFollower(last place) *follower { return &follower{at: last} }

// cursor is the run and the piece behind which pieces are wanted.
func (f *follower) cursor() (token int64, seq int) {
	if f.whole || f.at.seq == 0 {
		return f.at.token, f.at.seq
	}
	return f.at.token, f.at.seq - 1 // the rest of a piece that the client has in part
}

// began says whether pieces of the run were read for the client.
func (f *follower) began() bool { return f.at.seq > 0 }

// hasTexts says whether the client has texts of the run. Pieces need not have any: calls of tools have none.
func (f *follower) hasTexts() bool { return f.at.bytes > 0 }

// hasAll says whether the client has the whole output: events of the end come behind it.
func (f *follower) hasAll() bool { return f.at.seq == endSeq }

// delta is an event of output.
type delta struct {
	at   place
	text string
}

// take reads pieces of one run, in their order. The output of a run that follows another is not added to what
// the client has of that: the error is errAnew, and the place is the beginning of the new output.
func (f *follower) take(pieces []piece) (list []delta, err error) {
	for _, p := range pieces {
		if p.token != f.at.token {
			had := f.began()
			f.at, f.whole = place{token: p.token}, true
			if had {
				return list, errAnew
			}
		}
		_, behind := f.cursor()
		switch {
		case p.seq <= behind:
			continue // a piece that was added twice
		case p.seq > behind+1:
			return list, errGone
		}
		list = f.read(list, p)
	}
	return list, nil
}

// check says why the stream of a run that has succeeded is not the text of its result; nil: it is, or that
// cannot be told. It counts what earlier connections had too, so that a client that comes again is told of a log
// that was given up.
func (f *follower) check(texts []string) error {
	want := 0
	for _, text := range texts {
		want += len(text)
	}
	switch {
	case f.hasAll() || !f.hasTexts(): // it has the output, or gets it whole
		return nil
	case texts != nil && f.at.bytes == want:
		return nil // though the pieces may be gone
	case !f.whole:
		return errGone // the piece that the client has in part
	case texts != nil:
		return errGap
	}
	return nil
}

// read appends the events of a piece that the client does not have.
func (f *follower) read(list []delta, p piece) []delta {
	had := 0
	if p.seq == f.at.seq {
		had = f.at.event
	}
	n, bytes := 0, f.at.bytes
	for event := range strings.SplitSeq(p.data, "\n\n") {
		text := deltaOf(event)
		if text == "" {
			continue
		}
		if n++; n > had {
			bytes += len(text)
			list = append(list, delta{place{p.token, p.seq, n, bytes}, text})
		}
	}
	f.at, f.whole = place{p.token, p.seq, max(n, had), bytes}, true
	return list
}

// deltaOf reads the text of a chunk of a chat or a completion, or of an event of generate_stream.
func deltaOf(event string) (text string) {
	for line := range strings.SplitSeq(event, "\n") {
		data, is := strings.CutPrefix(line, "data:")
		if !is {
			continue
		}
		var chunk struct {
			Choices []struct {
				Delta struct {
					Content string `json:"content"`
				} `json:"delta"`
				Text string `json:"text"`
			} `json:"choices"`
			Generated json.RawMessage `json:"text_output"` // a text, or a list, which is no text of one answer
		}
		if json.Unmarshal([]byte(data), &chunk) != nil {
			continue // [DONE]
		}
		for _, c := range chunk.Choices {
			text += c.Delta.Content + c.Text
		}
		var generated string
		if json.Unmarshal(chunk.Generated, &generated) == nil {
			text += generated
		}
	}
	return text
}
