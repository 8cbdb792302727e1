package api

import (
	"log/slog"
	"net/http"
	"time"
)

// Config says what a server accepts. Its zero value means the defaults.
type Config struct {
	// BodyBytesMax bounds the body of a request. Default 32 MiB.
	BodyBytesMax int64
	// EntriesMax bounds the entries in one push. Default 10,000.
	EntriesMax int
	// Timeout bounds the work for one request. Default 10 s.
	Timeout time.Duration
	// Checks are what must hold for the process to be ready, beside those that the server makes itself.
	Checks []Check
	// Metrics answers GET /metrics; nil for none.
	Metrics http.Handler
	// Pushed is called with the name of a queue after entries were accepted, so that nodes can be told. It must
	// not block. Nil for nobody.
	Pushed func(queue string)
	// Observe is told of each request: the route as in the table ("GET /v1/entries/{id}"), the status and the
	// time it took. Nil for nobody.
	Observe func(route string, status int, took time.Duration)
	// Log is where errors go that a client is not told. Default: nowhere.
	Log *slog.Logger
}

func (c Config) withDefaults() Config {
	fallback(&c.BodyBytesMax, 32<<20)
	fallback(&c.EntriesMax, 10_000)
	fallback(&c.Timeout, 10*time.Second)
	fallback(&c.Log, slog.New(slog.DiscardHandler))
	if c.Pushed == nil {
		c.Pushed = func(string) {}
	}
	if c.Observe == nil {
		c.Observe = func(string, int, time.Duration) {}
	}
	return c
}

func fallback[T comparable](v *T, value T) {
	var zero T
	if *v == zero {
		*v = value
	}
}
