package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
)

// standby is a second server that follows the primary.
type standby struct {
	sync     bool
	dir      string
	port     uint16
	cmd      *exec.Cmd
	promoted bool
	forked   [2]time.Time // between these times both servers took writes
}

// startStandby copies the primary and starts a server that follows it. sync makes each commit of the
// primary wait for it.
func startStandby(ctx context.Context, d *database, sync bool) (*standby, error) {
	var binaries, data string
	const sql = `SELECT (SELECT setting FROM pg_config WHERE name = 'BINDIR'), current_setting('data_directory')`
	if err := d.pool.QueryRow(ctx, sql).Scan(&binaries, &data); err != nil {
		return nil, fmt.Errorf("find the programs of Postgres: %w", err)
	}
	info, err := os.Stat(data)
	if err != nil {
		return nil, err
	}
	owner, known := info.Sys().(*syscall.Stat_t)
	if !known {
		return nil, errors.New("find the owner of the database's directory: not on this system")
	}
	attributes := &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL, Setpgid: true}
	if os.Geteuid() == 0 {
		attributes.Credential = &syscall.Credential{Uid: owner.Uid, Gid: owner.Gid}
	}
	dir, err := os.MkdirTemp("", "ps-")
	if err != nil {
		return nil, err
	}
	s := &standby{sync: sync, dir: dir, port: d.port + 1}
	if err := os.Chown(dir, int(owner.Uid), int(owner.Gid)); err != nil {
		return nil, err
	}
	copied := filepath.Join(dir, "data")
	backup := exec.CommandContext(ctx, filepath.Join(binaries, "pg_basebackup"), "-D", copied, "-h", d.host,
		"-p", fmt.Sprint(d.port), "-U", superuser, "-X", "stream", "-c", "fast", "-R")
	backup.SysProcAttr, backup.Dir = attributes, dir
	if text, err := backup.CombinedOutput(); err != nil {
		return nil, fmt.Errorf("pg_basebackup: %w: %s", err, text)
	}
	s.cmd = exec.CommandContext(context.WithoutCancel(ctx), filepath.Join(binaries, "postgres"), "-D", copied,
		"-c", "port="+fmt.Sprint(s.port), "-c", "unix_socket_directories="+dir, "-c", "listen_addresses=",
		"-c", "cluster_name=standby")
	s.cmd.SysProcAttr, s.cmd.Dir = attributes, dir
	if err := onChildThread(s.cmd.Start); err != nil {
		return nil, err
	}
	for _, setting := range s.settings() {
		if err := d.exec(ctx, setting); err != nil {
			return nil, fmt.Errorf("%s: %w", setting, err)
		}
	}
	return s, s.follows(ctx, d)
}

func (s *standby) settings() []string {
	if !s.sync {
		return nil
	}
	return []string{`ALTER SYSTEM SET synchronous_standby_names = '*'`, `SELECT pg_reload_conf()`}
}

// follows waits until the primary sends its writes to the standby.
func (s *standby) follows(ctx context.Context, d *database) error {
	want := map[bool]string{true: "sync", false: "async"}[s.sync]
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); time.Sleep(50 * time.Millisecond) {
		var states []string
		const sql = `SELECT coalesce(array_agg(sync_state), '{}') FROM pg_stat_replication WHERE state = 'streaming'`
		if err := d.pool.QueryRow(ctx, sql).Scan(&states); err != nil {
			return err
		}
		if len(states) == 1 && states[0] == want {
			return nil
		}
	}
	return errors.New("the standby does not follow the primary")
}

// promote makes the standby the primary. For a while the old one keeps its connections, and new
// connections reach the new one; then the old connections are cut, and the old primary goes on by
// itself.
func (s *site) promote(ctx context.Context, both time.Duration) error {
	b := s.standby
	b.promoted = true
	conn, err := pgx.Connect(ctx, dsnOf(b.dir, b.port))
	if err != nil {
		return err
	}
	defer conn.Close(ctx)
	b.forked[0] = time.Now().Add(-time.Second) // what was not sent yet is lost too
	if _, err := conn.Exec(ctx, `SELECT pg_promote(true, 30)`); err != nil {
		return err
	}
	s.db.move(b.dir, b.port)
	s.proxy.Point("unix", filepath.Join(b.dir, fmt.Sprintf(".s.PGSQL.%d", b.port)))
	time.Sleep(both)
	for _, p := range s.all() {
		p.link.Cut()
	}
	s.load.link.Cut()
	b.forked[1] = time.Now()
	return nil
}

func (s *standby) close() {
	_ = s.cmd.Process.Signal(syscall.SIGQUIT)
	_ = s.cmd.Wait()
	os.RemoveAll(s.dir)
}

// revive makes sure that the server serves, and starts it again where it ended for lack of space.
func (d *database) revive(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, time.Minute)
	defer cancel()
	for since := time.Now(); ; time.Sleep(100 * time.Millisecond) {
		conn, err := pgx.Connect(ctx, d.dsn())
		if err == nil {
			return conn.Close(ctx)
		}
		// A server that could not recover for lack of space has ended.
		if time.Since(since) > 5*time.Second {
			if err := d.server.Resume(ctx); err != nil && !strings.Contains(err.Error(), "it is running") {
				return err
			}
			since = time.Now()
		}
		if ctx.Err() != nil {
			return err
		}
	}
}
