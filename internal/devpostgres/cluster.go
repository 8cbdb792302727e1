package devpostgres

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
)

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
		// The caller's context may have ended; the clean-up must run all the same.
		cleanup, cancel := context.WithTimeout(context.WithoutCancel(ctx), startTimeout)
		defer cancel()
		return nil, errors.Join(err, c.close(cleanup))
	}
	return server, nil
}

func (c *cluster) open(ctx context.Context) (*Server, error) {
	c.socketDir = cmp.Or(c.socketDir, c.dir.data())
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
	c.current, err = supervise(supervisorCommand(c.acct, c.bin, c.dir.data(), last), c.dir.hold, log)
	if err != nil {
		return err
	}
	return c.waitReady(ctx)
}

// waitReady waits for the status "ready" in the postmaster's pid file, which needs no connection
// attempts.
func (c *cluster) waitReady(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
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
	local := fmt.Sprintf("postgres://%s@/postgres?host=%s&port=%d", superuser, url.QueryEscape(c.socketDir),
		c.cfg.port())
	if c.cfg.Port == 0 {
		return local, nil
	}
	password, err := c.dir.password()
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
