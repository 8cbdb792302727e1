package config

import (
	"cmp"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/url"
	"os"
	"slices"
	"time"

	"github.com/penstock/penstock"
	"github.com/penstock/penstock/internal/postgres"
)

// Database is the section of every program for its database.
type Database struct {
	URL      string `koanf:"url" help:"address of the database, postgres://user:password@host/name; without it PGHOST, PGUSER and so on count"`
	MaxConns int    `koanf:"max_conns" help:"connections at most, beside those that a duty has for itself; 0: the program's own default"`
	Pooled   bool   `koanf:"pooled" help:"there is a pooler in transaction mode in between: no prepared statements, no session settings"`
	// DirectURL is for LISTEN, which a pooler in transaction mode cannot carry.
	DirectURL string        `koanf:"direct_url" help:"with a pooler in between: address of Postgres itself, for the one session in which a node listens for hints, and for migrations of a leader; without it a node behind a pooler finds work by polling"`
	Timeout   time.Duration `koanf:"timeout" help:"of one statement; 0: none"`
}

// Given returns an error unless the address of the database is given, here or by a variable that libpq reads. Without
// one, the driver would look for a socket in a directory of its own and the program would wait there for ever.
func (d Database) Given(env func(name string) string) error {
	switch {
	case d.Timeout < 0:
		return fmt.Errorf("database.timeout is %s: want 0 or more", d.Timeout)
	case d.URL != "" || LibpqHasDatabase(env):
		return nil
	}
	return errors.New("database.url is empty: give the address of the database, as in " +
		"--database-url postgres://user@host/name or PENSTOCK_DATABASE_URL, or PGHOST")
}

// LibpqHasDatabase reports whether variables that libpq reads name a database.
func LibpqHasDatabase(env func(name string) string) bool {
	names := []string{"PGHOST", "PGHOSTADDR", "PGPORT", "PGDATABASE", "PGUSER", "PGSERVICE"}
	return slices.ContainsFunc(names, func(name string) bool { return env(name) != "" })
}

// Connect is the section as package penstock reads it; maxConns is the program's own default.
func (d Database) Connect(maxConns int) penstock.Config {
	timeout := d.Timeout
	if timeout == 0 {
		timeout = -1 // there 0 means the default
	}
	return penstock.Config{
		URL: d.URL, DirectURL: d.DirectURL, Pooled: d.Pooled, MaxConns: cmp.Or(max(0, d.MaxConns), maxConns),
		StatementTimeout: timeout,
	}
}

// Pool is the section as package postgres reads it; maxConns is the program's own default.
func (d Database) Pool(maxConns int32) postgres.Config {
	if d.MaxConns > 0 {
		maxConns = int32(min(d.MaxConns, 10_000))
	}
	return postgres.Config{DSN: d.URL, MaxConns: maxConns, Pooled: d.Pooled, StatementTimeout: d.Timeout}
}

// Log is the section of every program for its log.
type Log struct {
	Level  string `koanf:"level" help:"debug, info, warn or error"`
	Format string `koanf:"format" help:"text or json"`
}

// Logger returns a logger that writes to out.
func (l Log) Logger(out io.Writer) (*slog.Logger, error) {
	var level slog.Level
	if err := level.UnmarshalText([]byte(l.Level)); err != nil {
		return nil, fmt.Errorf("log.level is %q: want debug, info, warn or error", l.Level)
	}
	opts := &slog.HandlerOptions{Level: level}
	switch l.Format {
	case "text":
		return slog.New(slog.NewTextHandler(out, opts)), nil
	case "json":
		return slog.New(slog.NewJSONHandler(out, opts)), nil
	}
	return nil, fmt.Errorf("log.format is %q: want text or json", l.Format)
}

// Trace is the section of every daemon for the export of spans.
type Trace struct {
	Endpoint string  `koanf:"endpoint" help:"address that takes OTLP over HTTP, http://collector:4318/v1/traces; without it there are no traces"`
	Share    float64 `koanf:"share" help:"of the traces that begin here, 0 to 1; one that a caller began is as the caller wants it"`
}

// Validate returns an error for an invalid section.
func (t Trace) Validate() error {
	if t.Share < 0 || t.Share > 1 {
		return fmt.Errorf("trace.share is %v: want 0 to 1", t.Share)
	}
	if u, err := url.Parse(t.Endpoint); t.Endpoint != "" && (err != nil || u.Host == "") {
		return fmt.Errorf("trace.endpoint is %q: want an address like http://collector:4318/v1/traces", t.Endpoint)
	}
	return nil
}

// Addresses is the section for the addresses that callbacks may go to. Leaders and gateways check by it the addresses
// that clients name, task nodes those that they deliver to: set it alike in all of them.
type Addresses struct {
	HTTPSOnly     bool     `koanf:"https_only" help:"callbacks go to https addresses alone, to the hosts and networks below too"`
	AllowHTTP     bool     `koanf:"allow_http" help:"plain http addresses of public hosts as well; those of the hosts and networks below need no leave"`
	Ports         []string `koanf:"ports" help:"ports of public hosts beside 443; the hosts and networks below have all"`
	AllowHosts    []string `koanf:"allow_hosts" help:"hosts that callbacks may go to although their addresses are private"`
	AllowNetworks []string `koanf:"allow_networks" help:"networks (10.1.0.0/16) that callbacks may go to although they are private"`
}

// TraceDefault is the section with its defaults.
func TraceDefault() Trace { return Trace{Share: 1} }

// DatabaseDefault is the section with its defaults.
func DatabaseDefault() Database { return Database{Timeout: 30 * time.Second} }

// LogDefault is the section with its defaults.
func LogDefault() Log { return Log{Level: "info", Format: "text"} }

// ProcessName tells this process from others in lists: host name and process id.
func ProcessName() string {
	host, _ := os.Hostname() // empty if unknown
	return fmt.Sprintf("%s/%d", host, os.Getpid())
}
