// Package stream writes answers of HTTP that come in parts, and server-sent events.
package stream

import (
	"net/http"
	"time"
)

// Writer writes the parts of an answer to a client that may take a while for each of them. The limit is on writes
// alone: an answer may pause between two of them for as long as it likes.
type Writer struct {
	w           http.ResponseWriter
	control     *http.ResponseController
	most        time.Duration // for one write; 0: no limit
	multiplexed bool          // the answer is a stream of HTTP/2 beside others
	deadline    time.Time     // that is set; zero: none
}

// NewWriter returns the writer of the answer to a request. The client may take most for each write; 0: no limit.
func NewWriter(w http.ResponseWriter, r *http.Request, most time.Duration) Writer {
	return Writer{w: w, control: http.NewResponseController(w), most: most, multiplexed: r.ProtoMajor == 2}
}

// Write implements io.Writer. What is written may stay in a buffer.
func (p *Writer) Write(b []byte) (int, error) {
	p.begin()
	n, err := p.w.Write(b)
	if err == nil {
		p.done()
	}
	return n, err
}

// Send writes bytes that are to go out at once.
func (p *Writer) Send(b []byte) error {
	p.begin()
	_, err := p.w.Write(b)
	if err == nil {
		err = p.control.Flush()
	}
	if err == nil {
		p.done()
	}
	return err
}

// begin sets the limit. Over HTTP/1.1 it is moved when a quarter of it is over: moving it for each chunk costs more
// than the chunk.
func (p *Writer) begin() {
	if now := time.Now(); p.most > 0 && now.Add(p.most-p.most/4).After(p.deadline) {
		p.deadline = now.Add(p.most)
		_ = p.control.SetWriteDeadline(p.deadline) // a writer without deadlines has none
	}
}

// done ends the limit of a write that has succeeded. Over HTTP/2 a deadline that passes resets the stream, whether
// something is written or not. Over HTTP/1.1 it ends nothing but writes, and stays.
func (p *Writer) done() {
	if p.multiplexed {
		p.Release()
	}
}

// Release takes the limit off: the connection goes on with the next request.
func (p *Writer) Release() {
	if !p.deadline.IsZero() {
		p.deadline = time.Time{}
		_ = p.control.SetWriteDeadline(p.deadline)
	}
}
