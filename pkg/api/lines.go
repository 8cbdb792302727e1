package api

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"

	"github.com/penstock/penstock/pkg/invalidation"
)

// lineBytesMax bounds a line of a stream. An entry larger than this goes by itself, where the server allows it.
const lineBytesMax = 4 << 20

// lines reads a text line by line, of which it holds one.
type lines struct {
	r      *bufio.Reader
	number int64  // of the last line read, from 1
	buf    []byte // reused while it is no larger than lineKept

	// grow is asked before the buffer takes so many bytes beyond lineKept, and shrink is told when they are free again.
	grow   func(bytes int64) error
	shrink func(bytes int64)
}

// lineKept is the buffer of a line that a stream has all the time.
const lineKept = 64 << 10

func newLines(r io.Reader) *lines {
	return &lines{
		r: bufio.NewReaderSize(r, lineKept), buf: make([]byte, 0, lineKept),
		grow: func(int64) error { return nil }, shrink: func(int64) {},
	}
}

// errLongLine says that a line is too long to be read. The next one can be.
var errLongLine = fmt.Errorf("the line is longer than %d bytes: %w", lineBytesMax, invalidation.ErrPayloadTooLarge)

// next returns the next line that is not blank, good until the call after. At the end it returns io.EOF; a text that
// was cut off ends with a line that is none.
func (l *lines) next() ([]byte, error) {
	for {
		line, err := l.read()
		if err != nil || len(bytes.TrimSpace(line)) > 0 {
			return line, err
		}
	}
}

func (l *lines) read() ([]byte, error) {
	l.reset()
	for long := false; ; {
		part, err := l.r.ReadSlice('\n')
		if long = long || len(l.buf)+len(part) > lineBytesMax; !long {
			if err := l.append(part); err != nil {
				return nil, err
			}
		} else {
			l.reset()
		}
		switch {
		case errors.Is(err, bufio.ErrBufferFull):
			continue
		case err != nil && (!errors.Is(err, io.EOF) || len(l.buf) == 0 && !long):
			return nil, err
		}
		l.number++
		if long {
			return nil, errLongLine
		}
		return l.buf, nil
	}
}

// append adds to the line. Its buffer doubles up to lineBytesMax.
func (l *lines) append(part []byte) error {
	if need := len(l.buf) + len(part); need > cap(l.buf) {
		size := min(max(need, 2*cap(l.buf)), lineBytesMax)
		if err := l.grow(int64(size - cap(l.buf))); err != nil {
			return err
		}
		l.buf = append(make([]byte, 0, size), l.buf...)
	}
	l.buf = append(l.buf, part...)
	return nil
}

// reset empties the buffer, and gives up a large one.
func (l *lines) reset() {
	if more := cap(l.buf) - lineKept; more > 0 {
		l.buf = make([]byte, 0, lineKept)
		l.shrink(int64(more))
	}
	l.buf = l.buf[:0]
}
