package devpostgres

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"time"

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

// ErrNotOurs is returned for what can only be done to a private cluster, not to a server given by DSN or in a container.
var ErrNotOurs = errors.New("not a private cluster")

// Server is a running Postgres. Its methods may be called from several goroutines.
type Server struct {
	source string
	config *pgx.ConnConfig
	uri    string

	cluster   *cluster
	container *container

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
	acct, err := serverAccount()
	if err != nil {
		return nil, err
	}
	return find(ctx, cfg, acct, places())
}

// useDSN takes a server that somebody else runs.
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

// Source says where the server came from, for people.
func (s *Server) Source() string { return s.source }

// LogFile is the server's log, empty if the server is not a private cluster.
func (s *Server) LogFile() string {
	if s.cluster == nil {
		return ""
	}
	return s.cluster.dir.log()
}

// Stop ends the server and deletes an ephemeral cluster. It leaves a server that was given by DSN alone.
// Further calls do nothing.
func (s *Server) Stop(ctx context.Context) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopped {
		return nil
	}
	s.stopped = true
	switch {
	case s.cluster != nil:
		return s.cluster.close(ctx)
	case s.container != nil:
		return s.container.stop(ctx)
	}
	return nil
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

// cluster is a private cluster: binaries, a directory, and one run of the postmaster at a time.
type cluster struct {
	cfg       Config
	acct      account
	bin       binaries
	dir       *directory
	socketDir string
	current   *supervised
}

// startCluster runs a private cluster with the given binaries.
func startCluster(ctx context.Context, cfg Config, acct account, bin binaries) (*Server, error) {
	dir, err := openDirectory(ctx, cfg, acct)
	if err != nil {
		return nil, err
	}
	c := &cluster{cfg: cfg, acct: acct, bin: bin, dir: dir, socketDir: cfg.SocketDir}
	server, err := c.open(ctx)
	if err != nil {
		// The caller's context may be the reason; the clean-up must not suffer from it.
		cleanup, cancel := context.WithTimeout(context.WithoutCancel(ctx), cfg.StartTimeout)
		defer cancel()
		return nil, errors.Join(err, c.close(cleanup))
	}
	return server, nil
}

func (c *cluster) open(ctx context.Context) (*Server, error) {
	if c.socketDir == "" {
		c.socketDir = c.dir.data()
	}
	if err := checkSocketPath(c.socketDir, c.cfg.port()); err != nil {
		return nil, err
	}
	if err := initialise(ctx, c.cfg, c.acct, c.bin, c.dir); err != nil {
		return nil, err
	}
	if err := c.run(ctx); err != nil {
		return nil, err
	}
	uri, err := c.uri(ctx)
	if err != nil {
		return nil, err
	}
	config, err := pgx.ParseConfig(uri)
	if err != nil {
		return nil, fmt.Errorf("build DSN: %w", err)
	}
	return &Server{source: c.bin.String(), config: config, uri: uri, cluster: c}, nil
}

// run starts the postmaster and waits until it accepts connections.
func (c *cluster) run(ctx context.Context) error {
	if c.current != nil {
		select {
		case <-c.current.done:
		default:
			return errors.New("start postgres: it is running")
		}
	}
	if err := clearStale(ctx, c.dir.data(), socketPath(c.socketDir, c.cfg.port())); err != nil {
		return err
	}
	if err := writeSettings(c.cfg, c.acct, c.dir.data(), c.socketDir); err != nil {
		return err
	}
	log, err := os.Create(c.dir.log())
	if err != nil {
		return fmt.Errorf("open server log: %w", err)
	}
	defer log.Close()
	last := Fast
	if !c.dir.kept() {
		last = Immediate // what is deleted next needs no checkpoint
	}
	c.current, err = supervise(c.acct, c.bin, c.dir.data(), last, c.dir.hold, log)
	if err != nil {
		return err
	}
	return c.waitReady(ctx)
}

// waitReady waits for the postmaster's own word in its pid file, which costs no connection attempts.
func (c *cluster) waitReady(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, c.cfg.StartTimeout)
	defer cancel()
	tick := time.NewTicker(5 * time.Millisecond)
	defer tick.Stop()
	for {
		lines, err := readLines(filepath.Join(c.dir.data(), "postmaster.pid"))
		if err == nil && len(lines) >= 8 && strings.TrimSpace(lines[7]) == "ready" {
			return nil
		}
		select {
		case <-tick.C:
		case <-c.current.done:
			return fmt.Errorf("start postgres: it ended (%w): %s", c.current.err, c.logTail())
		case <-ctx.Done():
			return fmt.Errorf("start postgres: %w: %s", ctx.Err(), c.logTail())
		}
	}
}

// logTail is the end of the server's log, for error messages.
func (c *cluster) logTail() string {
	const most = 2000 // bytes
	text, err := os.ReadFile(c.dir.log())
	if err != nil {
		return err.Error()
	}
	if len(text) > most {
		text = text[len(text)-most:]
	}
	return string(bytes.TrimSpace(text))
}

func (c *cluster) halt(ctx context.Context, sig Signal) error {
	if err := c.current.signal(sig); err != nil {
		return err
	}
	return c.current.wait(ctx)
}

// close stops the postmaster, if it runs, and gives the directory up.
func (c *cluster) close(ctx context.Context) error {
	var err error
	if c.current != nil {
		err = c.current.stop(ctx)
	}
	return errors.Join(err, c.dir.release(ctx))
}

// uri is the cluster's DSN: by TCP with a password if a port was asked for, else by socket.
func (c *cluster) uri(ctx context.Context) (string, error) {
	local := fmt.Sprintf("postgres://%s@/postgres?host=%s&port=%d", superuser, url.QueryEscape(c.socketDir), c.cfg.port())
	if c.cfg.Port == 0 {
		return local, nil
	}
	password, err := c.password()
	if err != nil {
		return "", err
	}
	config, err := pgx.ParseConfig(local)
	if err != nil {
		return "", fmt.Errorf("build DSN: %w", err)
	}
	if err := setPassword(ctx, config, password); err != nil {
		return "", err
	}
	return tcpURI(password, c.cfg.Port), nil
}

func tcpURI(password string, port int) string {
	u := url.URL{
		Scheme: "postgres", User: url.UserPassword(superuser, password),
		Host: net.JoinHostPort("127.0.0.1", strconv.Itoa(port)), Path: "/postgres", RawQuery: "sslmode=disable",
	}
	return u.String()
}

// password is random, and kept with a kept cluster so that its DSN stays the same.
func (c *cluster) password() (string, error) {
	if !c.dir.kept() {
		return rand.Text(), nil
	}
	path := filepath.Join(c.dir.path, "password")
	text, err := os.ReadFile(path)
	if err == nil && len(text) > 0 {
		return strings.TrimSpace(string(text)), nil
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return "", fmt.Errorf("read password: %w", err)
	}
	password := rand.Text()
	if err := os.WriteFile(path, []byte(password+"\n"), 0o600); err != nil {
		return "", fmt.Errorf("keep password: %w", err)
	}
	return password, nil
}

func setPassword(ctx context.Context, config *pgx.ConnConfig, password string) error {
	conn, err := pgx.ConnectConfig(ctx, config)
	if err != nil {
		return fmt.Errorf("set password: %w", err)
	}
	defer conn.Close(ctx)
	literal := "'" + strings.ReplaceAll(password, "'", "''") + "'"
	if _, err := conn.Exec(ctx, "ALTER ROLE "+superuser+" PASSWORD "+literal); err != nil {
		return fmt.Errorf("set password: %w", err)
	}
	return nil
}

func ping(ctx context.Context, config *pgx.ConnConfig) error {
	conn, err := pgx.ConnectConfig(ctx, config)
	if err != nil {
		return err
	}
	return conn.Close(ctx)
}
