package stream

import (
	"net/http"
	"strings"
	"time"
)

// Events writes server-sent events (WHATWG HTML, 9.2), each at once.
type Events struct{ out Writer }

// NewEvents returns the writer of the events that answer a request. The client may take most for each of them. The
// caller writes the head.
func NewEvents(w http.ResponseWriter, r *http.Request, most time.Duration) *Events {
	return &Events{out: NewWriter(w, r, most)}
}

// eventLines makes one line end of the three that readers know: text behind another one would be read as a field.
var eventLines = strings.NewReplacer("\r\n", "\n", "\r", "\n")

// Event sends an event. An empty id leaves the client's last one. Data may have any number of lines.
func (e *Events) Event(id, name, data string) error {
	var text strings.Builder
	text.Grow(len(data) + len(name) + len(id) + 64)
	if id != "" {
		text.WriteString("id: " + id + "\n")
	}
	text.WriteString("event: " + name + "\n")
	for line := range strings.SplitSeq(eventLines.Replace(data), "\n") {
		text.WriteString("data: ")
		text.WriteString(line)
		text.WriteByte('\n')
	}
	text.WriteByte('\n')
	return e.out.Send([]byte(text.String()))
}

// Release takes the limit off, as that of Writer.
func (e *Events) Release() { e.out.Release() }

// Comment sends a line that readers ignore, so that nothing in between takes the connection for dead.
func (e *Events) Comment(text string) error { return e.out.Send([]byte(": " + text + "\n\n")) }
