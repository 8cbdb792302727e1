package devpostgres

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

// helperEnv makes the test binary play a program that has a cluster and may be killed.
const helperEnv = "PENSTOCK_DEVPOSTGRES_HELPER"

func TestMain(m *testing.M) {
	if role := os.Getenv(helperEnv); role != "" {
		if err := play(role); err != nil {
			fmt.Println("error:", err)
			os.Exit(1)
		}
		return
	}
	os.Exit(m.Run())
}

// play does what the role asks, says so in one line on standard output, and waits for its end.
func play(role string) error {
	ctx := context.Background()
	kind, dataDir, _ := strings.Cut(role, ":")
	cfg := Config{DataDir: dataDir}.withDefaults()
	switch kind {
	case "server":
		server, err := Start(ctx, cfg)
		if err != nil {
			return err
		}
		fmt.Println(server.ConnString())
	case "directory":
		acct, err := serverAccount()
		if err != nil {
			return err
		}
		dir, err := openDirectory(ctx, cfg, acct)
		if err != nil {
			return err
		}
		fmt.Println(dir.path)
	default:
		return fmt.Errorf("no role %q", kind)
	}
	_, err := io.Copy(io.Discard, os.Stdin)
	return err
}

// startHelper starts the role and returns its line. The process is killed at the end of the test at the latest; the
// server of a kept cluster ends after it, and has ended when the cluster's directory is removed.
func startHelper(t *testing.T, role string) (*exec.Cmd, string) {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), os.Args[0])
	cmd.Env = append(os.Environ(), helperEnv+"="+role)
	cmd.Stderr = os.Stderr
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		in.Close()
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
		if _, kept, _ := strings.Cut(role, ":"); kept != "" {
			pidFile := filepath.Join(kept, clusterData, "postmaster.pid")
			eventually(t, "the server in "+kept+" has ended", func() bool { return !exists(pidFile) })
		}
	})
	line, err := bufio.NewReader(out).ReadString('\n')
	line = strings.TrimSpace(line)
	if err != nil || strings.HasPrefix(line, "error:") {
		t.Fatalf("start helper %s: %v %s", role, err, line)
	}
	return cmd, line
}

// start starts a server which is stopped at the end of the test.
func start(t testing.TB, cfg Config) *Server {
	t.Helper()
	server, err := Start(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	stopAfter(t, server)
	return server
}

func stopAfter(t testing.TB, server *Server) {
	t.Helper()
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := server.Stop(ctx); err != nil {
			t.Errorf("stop server: %v", err)
		}
	})
}

// keptDir is a directory for a kept cluster, below one which the server's user may enter (t.TempDir is root's alone).
func keptDir(t testing.TB) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "penstock-kept-") //nolint:usetesting // see above
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	return filepath.Join(dir, "cluster")
}

func mustAccount(t testing.TB) account {
	t.Helper()
	acct, err := serverAccount()
	if err != nil {
		t.Fatal(err)
	}
	return acct
}

// query returns the one text value of a statement.
func query(t testing.TB, dsn, sql string) string {
	t.Helper()
	value, err := tryQuery(t.Context(), dsn, sql)
	if err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
	return value
}

func tryQuery(ctx context.Context, dsn, sql string) (string, error) {
	conn, err := pgx.Connect(ctx, dsn)
	if err != nil {
		return "", err
	}
	defer conn.Close(ctx)
	var value string
	return value, conn.QueryRow(ctx, sql).Scan(&value)
}

func exec1(t testing.TB, dsn, sql string) {
	t.Helper()
	conn, err := pgx.Connect(t.Context(), dsn)
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close(t.Context())
	if _, err := conn.Exec(t.Context(), sql); err != nil {
		t.Fatalf("%s: %v", sql, err)
	}
}

// postmasterID is the process id of the server, by its own word.
func postmasterID(t testing.TB, dsn string) int32 {
	t.Helper()
	text := query(t, dsn, "SELECT split_part(pg_read_file('postmaster.pid'), E'\n', 1)")
	pid, err := strconv.ParseInt(text, 10, 32)
	if err != nil {
		t.Fatal(err)
	}
	return int32(pid)
}

// eventually waits until cond holds. It is for facts that no event announces, such as another process's end.
func eventually(t testing.TB, what string, cond func() bool) {
	t.Helper()
	deadline := time.Now().Add(time.Minute)
	for !cond() {
		if time.Now().After(deadline) {
			t.Fatalf("not within a minute: %s", what)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return !errors.Is(err, os.ErrNotExist)
}
