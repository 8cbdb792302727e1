package curves

import (
	"context"
	"errors"
	"fmt"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
)

// errNotRun marks an axis that this machine cannot run.
var errNotRun = errors.New("not run")

// pgBouncer is a pooler in transaction mode before the testbed's database, on a Unix socket.
type pgBouncer struct {
	dsn    string
	folder string
	cmd    *exec.Cmd
}

const pgBouncerPort = 6432

func startPgBouncer(ctx context.Context, s *testbed) (*pgBouncer, error) {
	program, err := exec.LookPath("pgbouncer")
	if err != nil {
		if program, err = exec.LookPath("/usr/sbin/pgbouncer"); err != nil {
			return nil, fmt.Errorf("%w: pgbouncer is not installed", errNotRun)
		}
	}
	folder, err := os.MkdirTemp("", "penstock-pgbouncer-")
	if err != nil {
		return nil, err
	}
	server := s.harness.Server
	config := fmt.Sprintf(`[databases]
%s = host=%s port=%d user=%s
[pgbouncer]
listen_addr =
listen_port = %d
unix_socket_dir = %s
auth_type = any
pool_mode = transaction
default_pool_size = 20
max_client_conn = 200
server_idle_timeout = 1
ignore_startup_parameters = extra_float_digits
log_connections = 0
log_disconnections = 0
`, database, server.Host, server.Port, server.User, pgBouncerPort, folder)
	file := filepath.Join(folder, "pgbouncer.ini")
	if err := errors.Join(os.WriteFile(file, []byte(config), 0o644),
		os.Chmod(folder, 0o777)); err != nil { // another account reads it
		return nil, err
	}
	query := url.Values{"host": {folder}, "port": {strconv.Itoa(pgBouncerPort)}, "user": {server.User}}
	b := &pgBouncer{
		dsn: "postgres:///" + database + "?" + query.Encode(), folder: folder,
		cmd: exec.CommandContext(ctx, program, "-q", file),
	}
	if b.cmd.SysProcAttr, err = sameAccount(server.Host); err != nil {
		return nil, err
	}
	b.cmd.Cancel = func() error { return b.cmd.Process.Signal(syscall.SIGTERM) }
	if err := b.cmd.Start(); err != nil {
		return nil, fmt.Errorf("start pgbouncer: %w", err)
	}
	return b, errors.Join(b.wait(ctx))
}

// sameAccount makes the pooler run as who owns the server's socket, if we are root: it will not run as root.
func sameAccount(socketDir string) (*syscall.SysProcAttr, error) {
	if os.Geteuid() != 0 {
		return nil, nil // nothing to change
	}
	info, err := os.Stat(socketDir)
	if err != nil {
		return nil, err
	}
	owner, ok := info.Sys().(*syscall.Stat_t)
	if !ok {
		return nil, errors.New("find the owner of the server's socket: not Linux")
	}
	return &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: owner.Uid, Gid: owner.Gid}}, nil
}

func (b *pgBouncer) wait(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	for {
		conn, err := pgx.Connect(ctx, b.dsn)
		if err == nil {
			return conn.Close(ctx)
		}
		if ctx.Err() != nil {
			return errors.Join(fmt.Errorf("connect to pgbouncer: %w", err), b.stop())
		}
		time.Sleep(20 * time.Millisecond)
	}
}

func (b *pgBouncer) stop() error {
	if err := b.cmd.Process.Signal(syscall.SIGTERM); err != nil {
		return err
	}
	_ = b.cmd.Wait() // it ends by the signal
	return os.RemoveAll(b.folder)
}
