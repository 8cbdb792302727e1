package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"sync"
	"time"
)

// handlerTransport is an http.RoundTripper that calls a handler in this process instead of a server. Bodies
// pass through pipes as they are written, so that streams and long waits work as over a connection; when the
// caller cancels or closes the answer, the request's context ends.
type handlerTransport struct{ handler http.Handler }

// RoundTrip returns when the handler has written the header of its answer. An error that the handler reported through
// keepError is returned in place of the answer.
func (t handlerTransport) RoundTrip(r *http.Request) (*http.Response, error) {
	ctx, cancel := context.WithCancel(r.Context())
	failed := make(chan error, 1)
	in := r.Clone(context.WithValue(ctx, errorKey{}, failed))
	in.RequestURI, in.RemoteAddr = r.URL.RequestURI(), "in-process"
	if in.Body == nil {
		in.Body = http.NoBody
	}
	reader, writer := io.Pipe()
	w := &pipeWriter{header: http.Header{}, body: writer, begun: make(chan struct{})}
	// A handler that reads or writes while the caller has gone must not wait for it.
	unblock := context.AfterFunc(ctx, func() {
		writer.CloseWithError(context.Cause(ctx))
		in.Body.Close()
	})
	go func() {
		defer unblock()
		defer in.Body.Close()
		writer.CloseWithError(w.serve(t.handler, in))
	}()
	select {
	case <-w.begun:
	case <-ctx.Done():
		cancel()
		return nil, context.Cause(ctx)
	}
	select {
	case err := <-failed: // sent before the header was written
		cancel()
		return nil, &localError{err}
	default:
	}
	return &http.Response{
		StatusCode: w.status, Status: http.StatusText(w.status), Proto: "HTTP/1.1", ProtoMajor: 1, ProtoMinor: 1,
		Header: w.sent, ContentLength: -1, Request: r, Body: &pipeBody{reader, cancel},
	}, nil
}

// pipeBody is the body of an answer. To close it ends the request.
type pipeBody struct {
	*io.PipeReader
	cancel context.CancelFunc
}

func (b *pipeBody) Close() error {
	b.cancel()
	return b.PipeReader.Close()
}

// pipeWriter is the http.ResponseWriter of a handler in this process.
type pipeWriter struct {
	header, sent http.Header
	body         *io.PipeWriter
	once         sync.Once
	status       int
	begun        chan struct{} // closed with the header of the answer
}

// serve calls the handler. A handler that panics aborts its answer, as a server would.
func (w *pipeWriter) serve(handler http.Handler, r *http.Request) (err error) {
	defer func() {
		if p := recover(); p != nil {
			err = errors.New("the handler aborted its answer")
			if p != http.ErrAbortHandler { //nolint:errorlint // compared as net/http does
				err = fmt.Errorf("the handler panicked: %v", p)
			}
			w.WriteHeader(http.StatusInternalServerError)
		}
	}()
	handler.ServeHTTP(w, r)
	w.WriteHeader(http.StatusOK)
	return nil
}

func (w *pipeWriter) Header() http.Header { return w.header }

func (w *pipeWriter) WriteHeader(status int) {
	if status >= 100 && status < 200 {
		return // informational: the answer is still to come
	}
	w.once.Do(func() {
		w.status, w.sent = status, w.header.Clone()
		close(w.begun)
	})
}

func (w *pipeWriter) Write(p []byte) (int, error) {
	w.WriteHeader(http.StatusOK)
	return w.body.Write(p)
}

// Flush does nothing beyond the header: a pipe keeps nothing back.
func (w *pipeWriter) Flush() { w.WriteHeader(http.StatusOK) }

// The deadlines of a connection do not exist here: the context of the request bounds both directions.

func (w *pipeWriter) SetReadDeadline(time.Time) error  { return nil }
func (w *pipeWriter) SetWriteDeadline(time.Time) error { return nil }
func (w *pipeWriter) EnableFullDuplex() error          { return nil }
