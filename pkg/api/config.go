package api

import (
	"cmp"
	"context"
	"encoding/json"
	"log/slog"
	"net/http"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
)

// Config has the limits and parts of a server. Its zero value means the defaults.
type Config struct {
	// Open admits requests without a token, with every right. It is for development: requests must be addressed to this
	// machine, and the server must listen on a loopback address.
	Open bool
	// Actor, if not empty, is the name under which every request acts, with every right and without a token.
	// It is for a program that calls the handler itself instead of serving it.
	Actor string
	// BodyBytesMax bounds the body of a push. Default 32 MiB.
	BodyBytesMax int64
	// EntriesMax bounds the entries in one push. Default 10,000.
	EntriesMax int
	// BodiesBytesMax bounds the memory of the bodies of all requests together, half of it for
	// streams. One token has half of a half, and a body that is read may take twice its size. Default 256 MiB,
	// and eight times BodyBytesMax where that is more.
	BodiesBytesMax int64
	// WaitersMax bounds how many requests wait for entries at once. Those of one token are half of them. Default
	// 8,000: that half is less than the requests that one address may have under way at a leader.
	WaitersMax int
	// CheckCallback refuses an address that callbacks must not go to; nil refuses none.
	CheckCallback func(url string) error
	// CheckSchedule refuses settings of a cron job whose schedule cannot be read, and returns the one to change; nil
	// refuses none, and such a job never fires.
	CheckSchedule func(settings map[string]any) (setting string, err error)
	// ReadModel lays an override over the config of a model, fills in defaults and checks the
	// result. Nil: the override is laid over, and nothing is checked.
	ReadModel func(name string, config, override []byte) ([]byte, error)
	// Webhooks changes the receivers of callbacks; nil: they can only be listed here.
	Webhooks Webhooks
	// Reports accepts the reports of workers; nil: they are refused.
	Reports Reports
	// Timeout bounds the work for one request. Default 10 s.
	Timeout time.Duration
	// TokenLifetime is that of a token whose creator gives no end. Default 365 days; negative: such a token
	// does not end.
	TokenLifetime time.Duration
	// Checks are conditions for the process to be ready, beside those that the server makes itself.
	Checks []Check
	// Metrics answers GET /metrics; nil for none.
	Metrics http.Handler
	// Hinter tells nodes of entries that were accepted. Nil: they find out by themselves.
	Hinter *invalidation.Hinter
	// Observe is told of each request: the route as in the table ("GET /v1/entries/{id}"), the status and the
	// time it took; 0 for a wait or a stream of events, whose time is the client's choice. Nil for nobody.
	Observe func(route string, status int, took time.Duration)
	// OnError is called with the error behind each answer of status 500 to 599 and the context of its request. Nil for
	// nobody.
	OnError func(ctx context.Context, err error)
	// Log is where errors go that a client is not told. Default: nowhere.
	Log *slog.Logger

	checkTimeout time.Duration // of each check of readiness: 900 ms, as probes usually wait for a second or more
}

func (c Config) withDefaults() Config {
	c.BodyBytesMax = cmp.Or(c.BodyBytesMax, 32<<20)
	c.EntriesMax = cmp.Or(c.EntriesMax, 10_000)
	c.BodiesBytesMax = cmp.Or(c.BodiesBytesMax, max(256<<20, 8*c.BodyBytesMax))
	c.WaitersMax = cmp.Or(c.WaitersMax, 8000)
	c.Timeout = cmp.Or(c.Timeout, 10*time.Second)
	c.checkTimeout = cmp.Or(c.checkTimeout, 900*time.Millisecond)
	c.TokenLifetime = cmp.Or(c.TokenLifetime, 365*24*time.Hour)
	c.Log = cmp.Or(c.Log, slog.New(slog.DiscardHandler))
	if c.ReadModel == nil {
		c.ReadModel = layOver
	}
	if c.CheckSchedule == nil {
		c.CheckSchedule = func(map[string]any) (string, error) { return "", nil }
	}
	if c.OnError == nil {
		c.OnError = func(context.Context, error) {}
	}
	if c.Observe == nil {
		c.Observe = func(string, int, time.Duration) {}
	}
	return c
}

func layOver(_ string, config, override []byte) ([]byte, error) {
	both := map[string]any{}
	for _, text := range [][]byte{config, override} {
		if len(text) > 0 {
			if err := json.Unmarshal(text, &both); err != nil {
				return nil, err
			}
		}
	}
	return json.Marshal(both)
}
