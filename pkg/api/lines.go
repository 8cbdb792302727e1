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
	buf    []byte // reused
}

func newLines(r io.Reader) *lines { return &lines{r: bufio.NewReaderSize(r, 64<<10)} }

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
	l.buf = l.buf[:0]
	for long := false; ; {
		part, err := l.r.ReadSlice('\n')
		if long = long || len(l.buf)+len(part) > lineBytesMax; !long {
			l.buf = append(l.buf, part...)
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
