package config

import (
	"fmt"
	"io"
	"log/slog"
	"time"

	"github.com/penstock/penstock/internal/postgres"
)

// Database is the section of every program that says where the database is.
type Database struct {
	URL      string        `koanf:"url" help:"address of the database, postgres://user:password@host/name; without it PGHOST, PGUSER and so on count"`
	MaxConns int           `koanf:"max_conns" help:"connections at most, beside those that a duty has for itself; 0: the program's own default"`
	Pooled   bool          `koanf:"pooled" help:"there is a pooler in transaction mode in between: no prepared statements, no session settings"`
	Timeout  time.Duration `koanf:"timeout" help:"of one statement; 0: none"`
}

// Pool is the section as package postgres reads it; maxConns is the program's own default.
func (d Database) Pool(maxConns int32) postgres.Config {
	if d.MaxConns > 0 {
		maxConns = int32(min(d.MaxConns, 10_000))
	}
	return postgres.Config{DSN: d.URL, MaxConns: maxConns, Pooled: d.Pooled, StatementTimeout: d.Timeout}
}

// Log is the section of every program that says what it writes about itself.
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

// DatabaseDefault is the section with its defaults.
func DatabaseDefault() Database { return Database{Timeout: 30 * time.Second} }

// LogDefault is the section with its defaults.
func LogDefault() Log { return Log{Level: "info", Format: "text"} }
