package devpostgres

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/shirou/gopsutil/v3/process"

	"github.com/penstock/penstock/internal/machine"
)

func TestZeroConfigIsDurableAndOnSocketOnly(t *testing.T) {
	server := start(t, Config{})
	for setting, want := range map[string]string{
		"fsync": "on", "synchronous_commit": "on", "full_page_writes": "on",
		"listen_addresses": "", "max_connections": "200", "server_encoding": "UTF8",
	} {
		if got := query(t, server.ConnString(), "SHOW "+setting); got != want {
			t.Errorf("%s is %q, want %q", setting, got, want)
		}
	}
	if server.Config().Host != filepath.Dir(socketPath(server.cluster.socketDir, socketPort)) {
		t.Errorf("Config leads to host %s", server.Config().Host)
	}
}

func TestFastGivesUpSyncingAlone(t *testing.T) {
	server := start(t, Config{Fast: true, Settings: map[string]string{"work_mem": "7MB", "application_name": "it's"}})
	for setting, want := range map[string]string{
		"fsync": "off", "synchronous_commit": "on", "work_mem": "7MB", "application_name": "it's",
	} {
		if got := query(t, server.ConnString(), "SHOW "+setting); got != want {
			t.Errorf("%s is %q, want %q", setting, got, want)
		}
	}
}

func TestOnlyFastClusterLivesInMemoryAndOnlyWhereThereIsRoom(t *testing.T) {
	for _, c := range []struct {
		fast, roomy bool
		tmpdir      string
		want        string
	}{
		{fast: true, roomy: true, want: "/dev/shm"},
		{fast: true, roomy: false, want: "/tmp"},
		{fast: false, roomy: true, want: "/tmp"},
		{fast: true, roomy: true, tmpdir: "/elsewhere", want: "/elsewhere"},
	} {
		if got := temporaryBases(Config{Fast: c.fast}, c.tmpdir, c.roomy)[0]; got != c.want {
			t.Errorf("%+v: got %s", c, got)
		}
	}
}

func TestGivenServerIsUsedAndLeftAlone(t *testing.T) {
	owner := start(t, Config{Fast: true})
	guest := start(t, Config{DSN: owner.ConnString()})
	if guest.ConnString() != owner.ConnString() || guest.Source() != "given DSN" {
		t.Errorf("guest is %s from %s", guest.ConnString(), guest.Source())
	}
	if err := guest.Halt(t.Context(), Crash); !errors.Is(err, ErrNotOurs) {
		t.Errorf("halt a given server: got %v, want ErrNotOurs", err)
	}
	if err := guest.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	query(t, owner.ConnString(), "SELECT 'still up'")
}

func TestGivenDSNThatDoesNotAnswerIsAnErrorAndNoReasonToLookFurther(t *testing.T) {
	server, err := Start(t.Context(), Config{DSN: "postgres://nobody@127.0.0.1:1/none?connect_timeout=2"})
	if err == nil {
		stopAfter(t, server)
		t.Fatalf("a server was started from %s instead", server.Source())
	}
	if !strings.Contains(err.Error(), "use given DSN") {
		t.Errorf("got %v", err)
	}
}

func TestStopDeletesEphemeralClusterAndMayBeRepeated(t *testing.T) {
	server := start(t, Config{Fast: true})
	dir, pid := server.cluster.dir.path, postmasterID(t, server.ConnString())
	for range 2 {
		if err := server.Stop(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if exists(dir) {
		t.Errorf("%s still exists", dir)
	}
	if alive(t.Context(), pid) {
		t.Errorf("postmaster %d still runs", pid)
	}
}

func TestKeptClusterKeepsDataAndAddress(t *testing.T) {
	dir := keptDir(t)
	first := start(t, Config{DataDir: dir, Fast: true})
	exec1(t, first.ConnString(), "CREATE TABLE kept AS SELECT 'still here' AS word")
	if err := first.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	second := start(t, Config{DataDir: dir, Fast: true})
	if second.ConnString() != first.ConnString() {
		t.Errorf("the address was %s and is %s", first.ConnString(), second.ConnString())
	}
	if got := query(t, second.ConnString(), "SELECT word FROM kept"); got != "still here" {
		t.Errorf("kept data: got %q", got)
	}
}

func TestHaltedServerResumesWithCommittedData(t *testing.T) {
	server := start(t, Config{Fast: true})
	for i, sig := range []Signal{Fast, Immediate, Crash} {
		exec1(t, server.ConnString(), fmt.Sprintf("CREATE TABLE kept_%d ()", i))
		if err := server.Halt(t.Context(), sig); err != nil {
			t.Fatalf("halt by %s: %v", sig, err)
		}
		if _, err := tryQuery(t.Context(), server.ConnString(), "SELECT 'up'"); err == nil {
			t.Errorf("a server halted by %s answers", sig)
		}
		if err := server.Resume(t.Context()); err != nil {
			t.Fatalf("resume after %s: %v", sig, err)
		}
		if got := query(t, server.ConnString(), fmt.Sprintf("SELECT coalesce(to_regclass('kept_%d')::text, 'lost')", i)); got == "lost" {
			t.Errorf("a committed table was lost by %s", sig)
		}
	}
}

func TestHaltedServerIsCleanedUpAfter(t *testing.T) {
	server := start(t, Config{Fast: true})
	if err := server.Halt(t.Context(), Crash); err != nil {
		t.Fatal(err)
	}
	if err := server.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	if exists(server.cluster.dir.path) {
		t.Errorf("%s still exists", server.cluster.dir.path)
	}
}

func TestPortOpensLoopbackWithPassword(t *testing.T) {
	dir := keptDir(t)
	port := machine.FreePort(t)
	server := start(t, Config{DataDir: dir, Port: port, Fast: true})
	if got := query(t, server.ConnString(), "SELECT host(inet_server_addr())"); got != "127.0.0.1" {
		t.Errorf("the server is reached at %s", got)
	}
	config := server.Config()
	config.Password = "guess"
	if conn, err := pgx.ConnectConfig(t.Context(), config); err == nil {
		conn.Close(t.Context())
		t.Error("a wrong password is let in")
	}
	if err := server.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	again := start(t, Config{DataDir: dir, Port: port, Fast: true})
	if again.ConnString() != server.ConnString() {
		t.Error("the password of a kept cluster changed")
	}
}

func TestServerThatCannotStartSaysWhyAndLeavesNothing(t *testing.T) {
	t.Setenv("TMPDIR", openTempDir(t))
	_, err := Start(t.Context(), Config{Settings: map[string]string{"shared_buffers": "no number"}})
	if err == nil || !strings.Contains(err.Error(), "shared_buffers") {
		t.Errorf("got %v, want the server's own words about shared_buffers", err)
	}
	left, err := os.ReadDir(os.TempDir())
	if err != nil || len(left) != 0 {
		t.Errorf("left behind: %v %v", left, err)
	}
}

func TestRootHandsServerToAnotherUser(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("for root only")
	}
	server := start(t, Config{Fast: true})
	p, err := process.NewProcess(postmasterID(t, server.ConnString()))
	if err != nil {
		t.Fatal(err)
	}
	ids, err := p.Uids()
	if err != nil || ids[0] == 0 {
		t.Errorf("the postmaster's user ids are %v (%v)", ids, err)
	}
}

func TestDataDirectoryOutOfReachOfServersUserIsRefused(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("for root only")
	}
	closed := keptDir(t)
	if err := os.Mkdir(closed, 0o700); err != nil {
		t.Fatal(err)
	}
	_, err := Start(t.Context(), Config{DataDir: filepath.Join(closed, "cluster")})
	if err == nil || !strings.Contains(err.Error(), "may not enter "+closed) {
		t.Errorf("got %v, want an error that names %s", err, closed)
	}
}

// initdb is what a cold start cannot do without. The least of several tries of each, one after the other, is compared.
func TestTimedColdStartToFirstQueryTakesLittleLongerThanInitdb(t *testing.T) {
	const tries, most = 5, 2
	byStart, byInitdb := time.Hour, time.Hour
	for range tries {
		began := time.Now()
		server := start(t, Config{})
		query(t, server.ConnString(), "SELECT 'first'")
		byStart = min(byStart, time.Since(began))
		byInitdb = min(byInitdb, initdbAlone(t, server.cluster))
		if err := server.Stop(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	ratio := byStart.Seconds() / byInitdb.Seconds()
	t.Logf("cold start to first query: %v, %.2f times the %v of initdb", byStart, ratio, byInitdb)
	if ratio > most {
		t.Errorf("a cold start took %.2f times as long as initdb, want %d at most", ratio, most)
	}
}

// initdbAlone makes another data directory as that of a cluster was made, and returns how long that took.
func initdbAlone(t *testing.T, c *cluster) time.Duration {
	t.Helper()
	dir, err := openDirectory(t.Context(), c.cfg, c.acct)
	if err != nil {
		t.Fatal(err)
	}
	began := time.Now()
	err = initialise(t.Context(), c.cfg, c.acct, c.bin, dir)
	took := time.Since(began)
	if err := errors.Join(err, dir.release(t.Context())); err != nil {
		t.Fatal(err)
	}
	return took
}

func BenchmarkColdStart(b *testing.B) {
	for b.Loop() {
		server, err := Start(b.Context(), Config{})
		if err != nil {
			b.Fatal(err)
		}
		query(b, server.ConnString(), "SELECT 'first'")
		b.StopTimer()
		if err := server.Stop(b.Context()); err != nil {
			b.Fatal(err)
		}
		b.StartTimer()
	}
}

// openTempDir is a temporary directory which the server's user may enter.
func openTempDir(t *testing.T) string {
	t.Helper()
	dir := keptDir(t)
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	return dir
}
