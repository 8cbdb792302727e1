package web

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/penstock/penstock/pkg/doctor"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
)

// Config has the options of a dashboard. The zero value of each field but Token means its default.
type Config struct {
	// Path is the address below which the dashboard is served, with a slash at both ends. Default
	// /ui/.
	Path string
	// Reserved are first segments of addresses that others than the dashboard answer.
	Reserved []string
	// Open lets everybody in, as an administrator and without a login. It is for development: the
	// listener must be on a loopback address.
	Open bool
	// Token returns the living token of a secret, or an error that wraps invalidation.ErrNotFound.
	// Not called if Open.
	Token func(ctx context.Context, secret string) (operator.APIToken, error)
	// SessionMax is how long a login lasts. Default 12 h.
	SessionMax time.Duration
	// Examine runs the checks of the doctor. Nil: the page of the database has none.
	Examine func(ctx context.Context) ([]doctor.Finding, error)
	// DisableWebhook ends callbacks to an address. Nil: the page of webhooks has no such verb.
	DisableWebhook func(ctx context.Context, url string, by invalidation.By) error
	// Timetable computes when cron jobs fire. Nil: the page of cron jobs displays no times to come.
	Timetable Timetable
	// TraceURL is the address of a trace in another system, with {trace} in the place of its id. Empty: pages
	// name traces without a link.
	TraceURL string
	// Version is that of the program, for the foot of the pages.
	Version string
	// Log takes errors whose text visitors do not see. Default: none.
	Log *slog.Logger

	readTimeout time.Duration // of each read: 2.5 s
}

func (c Config) withDefaults() (Config, error) {
	c.Path = cmp.Or(c.Path, "/ui/")
	c.SessionMax = cmp.Or(c.SessionMax, 12*time.Hour)
	c.Log = cmp.Or(c.Log, slog.New(slog.DiscardHandler))
	c.readTimeout = cmp.Or(c.readTimeout, 2500*time.Millisecond)
	if err := CheckPath(c.Path, c.Reserved...); err != nil {
		return c, err
	}
	return c, CheckTraceURL(c.TraceURL)
}

// CheckTraceURL returns an error for a Config.TraceURL that a dashboard cannot have.
func CheckTraceURL(address string) error {
	if address == "" {
		return nil
	}
	u, err := url.Parse(address)
	ok := err == nil && (u.Scheme == "https" || u.Scheme == "http") && u.Host != ""
	if !ok || !strings.Contains(address, "{trace}") {
		return fmt.Errorf("address of traces %q: want one such as https://tempo.example/trace/{trace}", address)
	}
	return nil
}

// CheckPath returns an error for a path that a dashboard cannot have: reserved are first segments of other addresses.
func CheckPath(path string, reserved ...string) error {
	inside := strings.Trim(path, "/")
	valid := inside != "" && path == "/"+inside+"/" && !strings.Contains(inside, "//") &&
		strings.Trim(inside, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_/") == ""
	first, _, _ := strings.Cut(inside, "/")
	if !valid || slices.Contains(reserved, first) {
		return fmt.Errorf("path %q: want one such as /ui/ or /ops/penstock/, of letters, digits, - and _, "+
			"that no route of the API begins with", path)
	}
	return nil
}
