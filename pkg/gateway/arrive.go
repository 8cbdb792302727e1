package gateway

import (
	"errors"
	"io"
	"net/http"
	"time"
)

// uploadMax is how long a client may take for its body, on every route. A handler may set another read deadline: that
// of files grants the time anew with each part.
const uploadMax = 60 * time.Second

// restMax is for how long the rest of a body is read that its handler left, as where it refused the request. The
// server of net/http reads up to 256 KiB of it before the answer, without a bound on the time: a client that sends
// slowly would get no answer and keep its connection. Once it has read the body to its end, it lifts the bound by
// itself.
const restMax = time.Second

// incoming is a request's body on its way in, and the answer, before which the rest of the body is read.
type incoming struct {
	http.ResponseWriter
	body     io.ReadCloser
	over     bool // the body was read to its end, or failed
	answered bool // the answer has begun
}

// arriving bounds the time for the body of a request. What it returns is for the handler alone: the server finds the
// state of the body by the request that it made.
func arriving(w http.ResponseWriter, r *http.Request) (*incoming, *http.Request) {
	a := &incoming{ResponseWriter: w, body: r.Body}
	a.setDeadline(time.Now().Add(uploadMax))
	r = r.WithContext(r.Context())
	r.Body = a
	return a, r
}

// setDeadline bounds the reading of the body; the zero time is no bound.
func (a *incoming) setDeadline(at time.Time) {
	_ = http.NewResponseController(a.ResponseWriter).SetReadDeadline(at) // a test's writer has none
}

// Read implements io.Reader. The bound ends with the body.
func (a *incoming) Read(p []byte) (int, error) {
	n, err := a.body.Read(p)
	if err != nil {
		a.over = true
		if errors.Is(err, io.EOF) {
			a.setDeadline(time.Time{})
		}
	}
	return n, err
}

// Close implements io.Closer.
func (a *incoming) Close() error { return a.body.Close() }

// answer is called before the answer begins: then the server reads the rest of the body.
func (a *incoming) answer() {
	if !a.answered && !a.over {
		a.setDeadline(time.Now().Add(restMax))
	}
	a.answered = true
}

// WriteHeader implements http.ResponseWriter.
func (a *incoming) WriteHeader(status int) {
	a.answer()
	a.ResponseWriter.WriteHeader(status)
}

// Write implements io.Writer.
func (a *incoming) Write(p []byte) (int, error) {
	a.answer()
	return a.ResponseWriter.Write(p)
}

// FlushError is called by http.ResponseController.
func (a *incoming) FlushError() error {
	a.answer()
	return http.NewResponseController(a.ResponseWriter).Flush()
}

// Unwrap returns the writer for http.ResponseController.
func (a *incoming) Unwrap() http.ResponseWriter { return a.ResponseWriter }
