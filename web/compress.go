package web

import (
	"bytes"
	"compress/gzip"
	"net/http"
	"strconv"
	"strings"
	"sync"
)

// packedLeast is the size in bytes from which a text is compressed.
const packedLeast = 4 << 10

// zippers are the compressors of texts that are made for each answer: of the level BestSpeed, since a page of some
// megabytes is sent each few seconds.
var zippers = sync.Pool{New: func() any {
	w, _ := gzip.NewWriterLevel(nil, gzip.BestSpeed) // the level is a valid one
	return w
}}

// packed returns the text of an answer as it is to be sent, compressed by gzip where the client accepts that, and sets
// the headers that say so. It is for pages that are read, and not for answers to verbs: a secret of a new token is in
// one of these. A page has texts of its address beside texts of the database, so that the size of the answer could tell
// a site that makes requests in a visitor's name which of these it has guessed (the attack BREACH). Such requests have
// no session, whose cookie is of SameSite=Strict; those that the browser says come from another site or origin are not
// compressed either.
func packed(w http.ResponseWriter, r *http.Request, text []byte) []byte {
	h := w.Header()
	h.Add("Vary", "Accept-Encoding, Sec-Fetch-Site")
	from := r.Header.Get("Sec-Fetch-Site")
	if len(text) >= packedLeast && acceptsGzip(r) && (from == "" || from == "same-origin" || from == "none") {
		var b bytes.Buffer
		z, _ := zippers.Get().(*gzip.Writer) // of no other type
		defer zippers.Put(z)
		z.Reset(&b)
		_, _ = z.Write(text) // into memory
		_ = z.Close()
		h.Set("Content-Encoding", "gzip")
		text = b.Bytes()
	}
	h.Set("Content-Length", strconv.Itoa(len(text)))
	return text
}

// acceptsGzip reports whether a client accepts gzip (RFC 9110, 12.5.3).
func acceptsGzip(r *http.Request) bool {
	for coding := range strings.SplitSeq(strings.Join(r.Header.Values("Accept-Encoding"), ","), ",") {
		name, weight, _ := strings.Cut(coding, ";")
		if strings.EqualFold(strings.TrimSpace(name), "gzip") {
			_, q, weighted := strings.Cut(weight, "=")
			v, err := strconv.ParseFloat(strings.TrimSpace(q), 64)
			return !weighted || err == nil && v > 0
		}
	}
	return false
}
