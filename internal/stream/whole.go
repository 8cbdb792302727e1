package stream

import (
	"net/http"
	"strconv"
	"time"
)

// wholePart is how many bytes of a whole answer a client has a time for.
const wholePart = 64 << 10

// Whole writes an answer that is complete. A client that takes longer than most for a part of it is cut: without that a
// client that does not read holds the answer, and what counts its request, for as long as it likes. The caller sets the
// other headers.
func Whole(w http.ResponseWriter, r *http.Request, status int, body []byte, most time.Duration) {
	w.Header()["Content-Length"] = []string{strconv.Itoa(len(body))}
	out := NewWriter(w, r, most)
	defer out.Release()
	w.WriteHeader(status)
	for ; len(body) > wholePart; body = body[wholePart:] {
		if _, err := out.Write(body[:wholePart]); err != nil {
			return // the client is gone, or cut
		}
	}
	_ = out.Send(body)
}
