package openaibatch

import (
	"bufio"
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"unicode/utf8"

	"github.com/penstock/penstock/pkg/gateway"
)

// lineReader reads the lines of a file, and where each lies. Empty lines are passed over.
type lineReader struct {
	source *bufio.Reader
	most   int   // bytes of a line
	number int   // of the line that was read last, from 1
	at     int64 // its offset
	next   int64 // offset of the line behind it
	buf    []byte
}

func newLineReader(source io.Reader, most int) *lineReader {
	return &lineReader{source: bufio.NewReaderSize(source, 64<<10), most: most}
}

// errLongLine says that a line has more bytes than it may.
var errLongLine = errors.New("the line is too long")

// read returns the next line, valid until the next call, and io.EOF behind the last.
func (l *lineReader) read() ([]byte, error) {
	for {
		l.at, l.buf = l.next, l.buf[:0]
		ended := false
		for !ended {
			piece, err := l.source.ReadSlice('\n')
			l.next += int64(len(piece))
			l.buf = append(l.buf, piece...)
			switch {
			case len(l.buf) > l.most:
				l.number++
				return nil, errLongLine
			case err == nil:
				ended = true
			case errors.Is(err, bufio.ErrBufferFull):
			case errors.Is(err, io.EOF) && len(l.buf) == 0:
				return nil, io.EOF
			case errors.Is(err, io.EOF):
				ended = true
			default:
				return nil, err
			}
		}
		l.number++
		if line := bytes.TrimSpace(l.buf); len(line) > 0 {
			return line, nil
		}
	}
}

// request is a line of an input file.
type request struct {
	CustomID *string         `json:"custom_id"`
	Method   string          `json:"method"`
	URL      string          `json:"url"`
	Body     json.RawMessage `json:"body"`
}

// customIDMax bounds a custom_id, in bytes.
const customIDMax = 512

// flaw is an error of a line, as clients see it. Line is 0 for the file as a whole.
type flaw struct {
	Code    string  `json:"code"`
	Message string  `json:"message"`
	Param   *string `json:"param"`
	Line    *int    `json:"line"`
}

// flaws is the member errors of a batch.
type flaws struct {
	Object string  `json:"object"`
	Data   []*flaw `json:"data"`
}

// Bounds of the texts of a flaw: a file may have texts of many megabytes where others have a name.
const (
	quotedMax  = 64  // characters of a text of the file that a message quotes
	messageMax = 512 // bytes of a message
)

// quoted is a text of the file as messages quote it.
func quoted(text string) string {
	q := fmt.Sprintf("%.*q", quotedMax, text)
	if utf8.RuneCountInString(text) > quotedMax {
		q += "..."
	}
	return q
}

func flawOf(code, param, format string, args ...any) *flaw {
	f := &flaw{Code: code, Message: gateway.ClipText(fmt.Sprintf(format, args...), messageMax)}
	if param != "" {
		f.Param = &param
	}
	return f
}

// parse reads a line for an endpoint, and the model that its body names.
func parse(line []byte, endpoint string) (r request, model string, bad *flaw) {
	if json.Unmarshal(line, &r) != nil {
		return r, "", flawOf("invalid_json_line", "", "the line is not a JSON object of a request")
	}
	var body struct {
		Model string `json:"model"`
	}
	switch {
	case r.CustomID == nil || *r.CustomID == "":
		return r, "", flawOf("missing_required_parameter", "custom_id", "custom_id is missing")
	case len(*r.CustomID) > customIDMax:
		return r, "", flawOf("invalid_custom_id", "custom_id", "custom_id has more than %d bytes", customIDMax)
	case bytes.IndexByte([]byte(*r.CustomID), 0) >= 0:
		return r, "", flawOf("invalid_custom_id", "custom_id", "custom_id has a byte 0")
	case r.Method != "POST":
		return r, "", flawOf("invalid_method", "method", "method must be POST, not %s", quoted(r.Method))
	case r.URL != endpoint:
		return r, "", flawOf("invalid_url", "url", "url is %s, the batch is for %q", quoted(r.URL), endpoint)
	case len(r.Body) == 0 || r.Body[0] != '{' || json.Unmarshal(r.Body, &body) != nil:
		return r, "", flawOf("invalid_request", "body", "body is not a JSON object with a model")
	case body.Model == "":
		return r, "", flawOf("missing_required_parameter", "body.model", "model is missing")
	}
	return r, body.Model, nil
}
