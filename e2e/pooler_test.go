package e2e_test

import (
	"fmt"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/penstock/penstock/internal/machine"
	"github.com/penstock/penstock/pkg/invalidation"
)

// pooler starts PgBouncer in transaction mode before the site's database and returns the address of that through it.
func (s *site) pooler() string {
	s.t.Helper()
	program, err := exec.LookPath("pgbouncer")
	if err != nil {
		s.t.Skip("PgBouncer is not installed")
	}
	u, err := url.Parse(s.dsn)
	if err != nil {
		s.t.Fatal(err)
	}
	port := machine.FreePort(s.t)
	dir := s.t.TempDir()
	password, _ := u.User.Password()
	write := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
			s.t.Fatal(err)
		}
		return path
	}
	users := write("users", fmt.Sprintf("%q %q\n", u.User.Username(), password))
	config := write("pgbouncer.ini", fmt.Sprintf(`[databases]
* = host=%s port=%s
[pgbouncer]
listen_addr = 127.0.0.1
listen_port = %d
unix_socket_dir =
auth_type = trust
auth_file = %s
pool_mode = transaction
default_pool_size = 8
`, u.Hostname(), u.Port(), port, users))
	args := []string{config}
	if os.Geteuid() == 0 {
		args = append([]string{"-u", "nobody"}, args...) // it refuses to be root
	}
	cmd := exec.CommandContext(s.t.Context(), program, args...)
	if err := cmd.Start(); err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { _ = cmd.Process.Kill(); _ = cmd.Wait() })
	u.Host = fmt.Sprintf("127.0.0.1:%d", port)
	eventually(s.t, time.Minute, "PgBouncer listens", func() bool {
		conn, err := (&net.Dialer{}).DialContext(s.t.Context(), "tcp", u.Host)
		if err != nil {
			return false
		}
		_ = conn.Close()
		return true
	})
	return u.String()
}

func TestProgramsWorkBehindATransactionPooler(t *testing.T) {
	t.Parallel()
	s := newSite(t, 0)
	dsn := s.pooler()
	s.exec(`CREATE TABLE public.effect (entry jsonb)`)
	s.exec(`SELECT penstock.set_statements('work', '{"run": "INSERT INTO public.effect VALUES ($1)"}')`)
	s.exec(`SELECT penstock.alter_queue('work', '{"capacity": 100000}')`)
	start(t, "leader", "leader", "--listen", "127.0.0.1:0", "--debug-listen", "127.0.0.1:0", "--open", "--database-url", dsn, "--database-pooled").says("elected")
	node := func(name string) *program {
		n := start(t, "tasknode", name, "--name", name, "--listen", "127.0.0.1:0", "--database-url", dsn, "--database-pooled",
			"--lease", nodeLease.String(), "--beat", "500ms", "--governor=false")
		n.says("task node started")
		return n
	}
	first := node("node_a")
	first.says("lack settings; set them for the role")
	s.exec(`SELECT penstock.push('work', to_jsonb(i), lock_key => CASE WHEN i % 3 = 0 THEN 'k' || i % 10 END,
	                             due_at => CASE WHEN i % 7 = 0 THEN now() + interval '2 s' END) FROM generate_series(1, 600) i`)
	eventually(t, time.Minute, "the node is at work", func() bool { return s.query(`SELECT count(*) FROM public.effect`) > 50 })
	first.signal(syscall.SIGKILL)
	node("node_b")
	eventually(t, time.Minute, "every entry has ended", func() bool { return s.query(`SELECT count(*) FROM penstock.entry`) == 0 })
	if n := s.query(`SELECT count(DISTINCT entry) FROM public.effect`); n != 600 || s.query(`SELECT count(*) FROM public.effect`) != 600 {
		t.Errorf("%d entries had their effect, want each of 600 once", n)
	}
	(&plant{site: s}).consistent()
}

// Under a fixed snapshot a finish would not see what was pushed meanwhile, and leave it behind.
func TestProgramsRefuseSessionsThatAreNotReadCommitted(t *testing.T) {
	t.Parallel()
	s := newSite(t, 0)
	s.exec(`DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET default_transaction_isolation = %L', current_database(), 'repeatable read'); END $$`)
	for _, program := range []string{"leader", "tasknode"} {
		p := start(t, program, program, "--listen", "127.0.0.1:0", "--database-url", s.dsn, "--database-pooled")
		p.says("must be read committed")
		if status := p.exit(); status != 1 {
			t.Errorf("%s ended with status %d, want 1", program, status)
		}
	}
	if q, err := invalidation.Open(t.Context(), s.pool, "work"); err != nil || q.Name != "work" {
		t.Errorf("our own sessions are fit: %v", err)
	}
}
