package httpserver

import "net/http"

// StatusClientGone is the status under which logs and metrics have requests whose client went away. HTTP has none,
// since nobody reads it.
const StatusClientGone = 499

// StatusWriter is a ResponseWriter that remembers the status of the answer. Make it by NewStatusWriter.
type StatusWriter struct {
	http.ResponseWriter
	Status int // 200 until another one is written
}

// NewStatusWriter returns one for an answer that has not begun.
func NewStatusWriter(w http.ResponseWriter) *StatusWriter { return &StatusWriter{w, http.StatusOK} }

// WriteHeader implements http.ResponseWriter.
func (s *StatusWriter) WriteHeader(status int) {
	s.Status = status
	s.ResponseWriter.WriteHeader(status)
}

// Unwrap lets http.ResponseController reach the connection.
func (s *StatusWriter) Unwrap() http.ResponseWriter { return s.ResponseWriter }
