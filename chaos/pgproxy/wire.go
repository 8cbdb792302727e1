package pgproxy

import (
	"bufio"
	"encoding/binary"
	"errors"
	"io"
	"strings"

	"github.com/jackc/pgx/v5/pgproto3"
)

const (
	codeSSL    = 80877103
	codeGSS    = 80877104
	codeCancel = 80877102
	frameMax   = 256 << 20
)

// startup passes on the first message, which has no type. Encryption is refused: the proxy has to
// read.
func (s *session) startup() error {
	for {
		head := make([]byte, 8)
		if _, err := io.ReadFull(s.client, head); err != nil {
			return err
		}
		length, code := binary.BigEndian.Uint32(head), binary.BigEndian.Uint32(head[4:])
		if length < 8 || length > 10_000 {
			return errors.New("startup message has no plausible length")
		}
		rest := make([]byte, length-8)
		if _, err := io.ReadFull(s.client, rest); err != nil {
			return err
		}
		if code == codeSSL || code == codeGSS {
			if _, err := s.client.Write([]byte{'N'}); err != nil {
				return err
			}
			continue
		}
		_, err := s.server.Write(append(head, rest...))
		if err == nil && code == codeCancel {
			// The server closes the connection; nothing follows.
			_, err = io.Copy(io.Discard, s.server)
			return errors.Join(err, io.EOF)
		}
		return err
	}
}

// readFrame reads one message with its type and length.
func readFrame(r *bufio.Reader) ([]byte, error) {
	head, err := r.Peek(5)
	if err != nil {
		return nil, err
	}
	length := binary.BigEndian.Uint32(head[1:])
	if length < 4 || length > frameMax {
		return nil, errors.New("message has no plausible length")
	}
	frame := make([]byte, 1+length)
	_, err = io.ReadFull(r, frame)
	return frame, err
}

// tagRows is the number at the end of a command tag.
func tagRows(body []byte) int {
	tag := strings.TrimRight(string(body), "\x00")
	n := 0
	for _, c := range tag[strings.LastIndexByte(tag, ' ')+1:] {
		if c < '0' || c > '9' {
			return 0
		}
		n = 10*n + int(c-'0')
	}
	return n
}

// electedRow says that the second column of a poll of an election is true: the term was won by it.
func electedRow(body []byte) bool {
	var m pgproto3.DataRow
	if m.Decode(body) != nil || len(m.Values) < 2 || len(m.Values[1]) != 1 {
		return false
	}
	v := m.Values[1][0]
	return v == 1 || v == 't'
}

// countRow says that the first column of a row is a number other than 0, as a text or in binary.
func countRow(body []byte) bool {
	var m pgproto3.DataRow
	if m.Decode(body) != nil || len(m.Values) == 0 {
		return false
	}
	return strings.Trim(string(m.Values[0]), "0\x00") != ""
}
