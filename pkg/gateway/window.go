package gateway

import (
	"bytes"
	"io"
	"strconv"
	"sync"

	"github.com/penstock/penstock/pkg/worker"
)

// window is the buffer that an answer is read to. Behind each read it still has the last tailBytes of the answer, from
// which the token counts are read at its end.
type window struct {
	own     *[]byte // of the pool; nil: the window is not open
	buf     []byte
	n       int   // bytes in buf
	filled  bool  // the last read has filled it
	slight  bool  // the last read would have fitted a small one
	left    bool  // the beginning of the answer is in buf no more
	in, out int64 // token counts that stood there
}

// tailBytes is how much of the end of an answer is kept, and how much of its beginning is looked at.
const tailBytes = 4 << 10

// Sizes of a window beyond the tail. Streams come in small pieces: a large one would lie idle between them.
const (
	roomSmall = 2 << 10
	roomLarge = 16 << 10
)

// A pool for each size.
var (
	windowsSmall = sync.Pool{New: func() any { b := make([]byte, tailBytes+roomSmall); return &b }}
	windowsLarge = sync.Pool{New: func() any { b := make([]byte, tailBytes+roomLarge); return &b }}
)

func windowsOf(room int) *sync.Pool {
	if room > roomSmall {
		return &windowsLarge
	}
	return &windowsSmall
}

// open gets a buffer for an answer of so many bytes, unless the window has one; negative: the length is not known.
func (w *window) open(length int64) {
	switch {
	case w.own != nil:
	case length > roomSmall:
		w.take(roomLarge)
	default:
		w.take(roomSmall)
	}
}

func (w *window) take(room int) {
	w.own = windowsOf(room).Get().(*[]byte) //nolint:errcheck,forcetypeassert // nothing else is in it
	w.buf, w.n = *w.own, 0
}

// close gives the buffer back.
func (w *window) close() {
	if w.own != nil {
		windowsOf(w.room()).Put(w.own)
		w.own, w.buf, w.n, w.left = nil, nil, 0, false
	}
}

func (w *window) room() int { return len(w.buf) - tailBytes }

// read reads once. The answer is valid until the next read.
func (w *window) read(from io.Reader) ([]byte, error) {
	switch {
	case w.filled && w.room() == roomSmall:
		w.move(roomLarge)
	case w.slight && w.room() == roomLarge:
		w.move(roomSmall)
	case len(w.buf)-w.n < w.room()/2:
		w.n = copy(w.buf, w.leave())
	}
	before, free := w.n, len(w.buf)-w.n
	n, err := from.Read(w.buf[before:])
	w.n += n
	w.filled, w.slight = n == free, n <= roomSmall/2
	return w.buf[before:w.n], err
}

// move goes on in a buffer of another size.
func (w *window) move(room int) {
	kept := w.leave()
	before := *w
	w.take(room)
	w.n = copy(w.buf, kept)
	before.close()
}

// leave returns the tail, which alone is kept. When the beginning of the answer goes its token counts are read: servers
// may write them there, before the documents that they have ranked.
func (w *window) leave() []byte {
	if w.n > tailBytes && !w.left {
		w.left = true
		w.in, w.out = countsAtBegin(w.buf[:w.n])
	}
	return w.tail()
}

func (w *window) tail() []byte { return w.buf[max(0, w.n-tailBytes):w.n] }

var usageMember = []byte(`"usage":`)

// usage reads the last usage object in the tail, else that at the beginning of the answer; 0 if there is none.
func (w *window) usage() (in, out int64) {
	b := w.leave()
	for { // forwards: the search for the last one goes byte by byte
		at := bytes.Index(b, usageMember)
		if at < 0 {
			break
		}
		b = b[at+len(usageMember):]
		if i, o := tokenCounts(b); i+o > 0 {
			in, out = i, o
		}
	}
	if in+out == 0 && w.left {
		return w.in, w.out
	}
	return in, out
}

// countsAtBegin reads the counts of the object that an answer begins with, of which only the beginning is there.
func countsAtBegin(begin []byte) (in, out int64) {
	from := skipSpace(begin, 0)
	if from == len(begin) || begin[from] != '{' {
		return 0, 0
	}
	_, _ = skipMembers(begin, from+1, 1, func(key []byte, at span) { // the error is that the rest is missing
		if string(key) == `"usage"` {
			in, out = tokenCounts(begin[at.from:at.to])
		}
	})
	return in, out
}

// tokenCounts reads the counts of a usage object, in the words of either API of OpenAI.
func tokenCounts(text []byte) (in, out int64) {
	from := skipSpace(text, 0)
	if from == len(text) || text[from] != '{' {
		return 0, 0
	}
	_, err := skipMembers(text, from+1, 1, func(key []byte, at span) {
		n, err := strconv.ParseInt(string(text[at.from:at.to]), 10, 64)
		if err != nil {
			return // no number: another member
		}
		switch string(key) {
		case `"prompt_tokens"`, `"input_tokens"`:
			in = max(in, min(n, worker.TokensMax))
		case `"completion_tokens"`, `"output_tokens"`:
			out = max(out, min(n, worker.TokensMax))
		}
	})
	if err != nil {
		return 0, 0
	}
	return in, out
}
