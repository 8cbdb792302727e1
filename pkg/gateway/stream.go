package gateway

import (
	"bytes"
	"encoding/json"
)

// eventCut takes out of a stream of server-sent events the one chunk that the gateway has asked for in
// the client's place: it has token counts and no choices. Events go on as soon as they are complete.
type eventCut struct {
	held []byte // the beginning of an event
}

// eventMax bounds an event that is held; a longer one goes on as it is.
const eventMax = 64 << 10

// pass returns what of the bytes may go on now. The answer is valid until the next call.
func (c *eventCut) pass(p []byte) []byte {
	if len(c.held) == 0 && !mayHoldUsage(p) {
		if end := lastEventEnd(p); end == len(p) {
			return p // whole events, none of which is the one: nothing to copy
		}
	}
	c.held = append(c.held, p...)
	end := lastEventEnd(c.held)
	if end == 0 && len(c.held) < eventMax {
		return nil
	}
	if end == 0 {
		end = len(c.held)
	}
	out := make([]byte, 0, end)
	for rest := c.held[:end]; len(rest) > 0; {
		n := eventEnd(rest)
		if n == 0 {
			n = len(rest)
		}
		if !isUsageChunk(rest[:n]) {
			out = append(out, rest[:n]...)
		}
		rest = rest[n:]
	}
	c.held = append(c.held[:0], c.held[end:]...)
	return out
}

// rest returns what is held at the end of the stream.
func (c *eventCut) rest() []byte {
	if isUsageChunk(c.held) {
		return nil
	}
	return c.held
}

var (
	noChoices = []byte(`"choices":[]`)
	dataField = []byte("data:")
)

func mayHoldUsage(p []byte) bool {
	return bytes.Contains(p, noChoices) || bytes.Contains(p, []byte(`"choices": []`))
}

// isUsageChunk says whether an event carries token counts and no choices.
func isUsageChunk(event []byte) bool {
	if !mayHoldUsage(event) || !bytes.Contains(event, usageMember) {
		return false
	}
	data := eventData(event)
	var chunk struct {
		Choices []json.RawMessage `json:"choices"`
		Usage   json.RawMessage   `json:"usage"`
	}
	return json.Unmarshal(data, &chunk) == nil && len(chunk.Choices) == 0 && len(chunk.Usage) > 0 &&
		chunk.Usage[0] == '{'
}

// eventData returns the data of an event, its lines joined.
func eventData(event []byte) []byte {
	var data []byte
	for line := range bytes.Lines(event) {
		if after, is := bytes.CutPrefix(line, dataField); is {
			after = bytes.TrimRight(bytes.TrimPrefix(after, []byte(" ")), "\r\n")
			if data != nil {
				data = append(append([]byte{}, data...), '\n')
			}
			data = append(data[:len(data):len(data)], after...)
		}
	}
	return data
}

// eventEnd returns the length of the first event with the empty line that ends it, 0 if it is not whole.
func eventEnd(p []byte) int {
	unix := bytes.Index(p, []byte("\n\n"))
	dos := bytes.Index(p, []byte("\r\n\r\n"))
	switch {
	case unix < 0 && dos < 0:
		return 0
	case unix >= 0 && (dos < 0 || unix < dos):
		return unix + 2
	}
	return dos + 4
}

// withData returns what begins with the first event that has data. Comments, empty lines and names of events may stand
// before it.
func withData(p []byte) []byte {
	for n := eventEnd(p); n > 0 && len(eventData(p[:n])) == 0; n = eventEnd(p) {
		p = bytes.TrimLeft(p[n:], "\r\n")
	}
	return p
}

// lastEventEnd returns the length of all whole events.
func lastEventEnd(p []byte) int {
	if bytes.HasSuffix(p, []byte("\n\n")) || bytes.HasSuffix(p, []byte("\r\n\r\n")) {
		return len(p) // as nearly always
	}
	unix := bytes.LastIndex(p, []byte("\n\n"))
	dos := bytes.LastIndex(p, []byte("\r\n\r\n"))
	end := 0
	if unix >= 0 {
		end = unix + 2
	}
	if dos >= 0 {
		end = max(end, dos+4)
	}
	return end
}
