package devpostgres

import (
	"context"
	"errors"
	"fmt"
	"sync"

	"github.com/jackc/pgx/v5"
)

// Signal is a way to stop a server.
type Signal string

const (
	// Fast ends sessions, writes a checkpoint and stops.
	Fast Signal = "INT"
	// Immediate stops without a checkpoint; the next start recovers from the write-ahead log.
	Immediate Signal = "QUIT"
	// Crash kills the postmaster; its backends notice and go.
	Crash Signal = "KILL"
)

// ErrNotOurs is returned by methods that need a private cluster, for a server given by DSN.
var ErrNotOurs = errors.New("not a private cluster")

// Server is a running Postgres. Its methods may be called from several goroutines.
type Server struct {
	source string
	config *pgx.ConnConfig
	uri    string

	cluster *cluster // nil if it was given by DSN

	mu      sync.Mutex
	stopped bool
}

// Start returns a Postgres that accepts connections, from the first source that works (see the package comment).
// The error is a *NotFoundError if none does.
func Start(ctx context.Context, cfg Config) (*Server, error) {
	cfg = cfg.withDefaults()
	if cfg.DSN != "" {
		return useDSN(ctx, cfg.DSN)
	}
	return find(ctx, cfg, places())
}

// useDSN uses a server that was started elsewhere.
func useDSN(ctx context.Context, dsn string) (*Server, error) {
	config, err := pgx.ParseConfig(dsn)
	if err != nil {
		return nil, fmt.Errorf("use given DSN: %w", err)
	}
	if err := ping(ctx, config); err != nil {
		return nil, fmt.Errorf("use given DSN: %w", err)
	}
	return &Server{source: "given DSN", config: config, uri: dsn}, nil
}

// ConnString is the DSN of the server's database postgres (or of the DSN that was given), with its superuser.
func (s *Server) ConnString() string { return s.uri }

// Config is a copy of the parsed ConnString.
func (s *Server) Config() *pgx.ConnConfig { return s.config.Copy() }

// Source describes the source of the server in words.
func (s *Server) Source() string { return s.source }

// Stop ends the server and deletes an ephemeral cluster. It leaves a server that was given by DSN alone.
// Further calls do nothing.
func (s *Server) Stop(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopped {
		return nil
	}
	s.stopped = true
	if s.cluster == nil {
		return nil
	}
	return s.cluster.close(ctx)
}

// Halt stops the server by sig and leaves its data, so that Resume can start it again: for tests of a database's death.
// It returns when the last process is gone.
func (s *Server) Halt(ctx context.Context, sig Signal) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.cluster == nil || s.stopped {
		return fmt.Errorf("halt server: %w", ErrNotOurs)
	}
	return s.cluster.halt(ctx, sig)
}

// Resume starts a halted server again, under the same ConnString.
func (s *Server) Resume(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.cluster == nil || s.stopped {
		return fmt.Errorf("resume server: %w", ErrNotOurs)
	}
	return s.cluster.run(ctx)
}

func ping(ctx context.Context, config *pgx.ConnConfig) error {
	conn, err := pgx.ConnectConfig(ctx, config)
	if err != nil {
		return err
	}
	return conn.Close(ctx)
}
