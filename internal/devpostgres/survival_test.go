package devpostgres

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/shirou/gopsutil/v3/process"
)

func TestKilledParentLeavesNeitherServerNorDirectory(t *testing.T) {
	helper, dsn := startHelper(t, "server:")
	pid := postmasterID(t, dsn)
	dir := filepath.Dir(query(t, dsn, "SHOW data_directory"))

	if err := helper.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the postmaster is gone", func() bool { return !alive(t.Context(), pid) })
	eventually(t, "the directory "+dir+" is gone", func() bool { return !exists(dir) })
}

func TestParentKilledBeforeItsServerRunsLeavesNoDirectory(t *testing.T) {
	helper, dir := startHelper(t, "directory:")
	if !exists(dir) {
		t.Fatalf("%s does not exist", dir)
	}
	if err := helper.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the directory "+dir+" is gone", func() bool { return !exists(dir) })
}

func TestKeptClusterOfKilledParentIsStoppedAndStartsAgain(t *testing.T) {
	dir := keptDir(t)
	helper, dsn := startHelper(t, "server:"+dir)
	exec1(t, dsn, "CREATE TABLE kept AS SELECT 'still here' AS word")
	pid := postmasterID(t, dsn)

	if err := helper.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	_ = helper.Wait()
	// At once, while the old server may still be shutting down: the new one waits for it.
	server := start(t, Config{DataDir: dir})
	if alive(t.Context(), pid) && postmasterID(t, server.ConnString()) != pid {
		t.Error("two postmasters run in one data directory")
	}
	if got := query(t, server.ConnString(), "SELECT word FROM kept"); got != "still here" {
		t.Errorf("kept data: got %q", got)
	}
}

func TestKilledSupervisorDoesNotUntieServerFromParent(t *testing.T) {
	helper, dsn := startHelper(t, "server:")
	pid := postmasterID(t, dsn)
	postmaster, err := process.NewProcess(pid)
	if err != nil {
		t.Fatal(err)
	}
	supervisor, err := postmaster.Ppid()
	if err != nil {
		t.Fatal(err)
	}
	if err := syscall.Kill(int(supervisor), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	if err := helper.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the postmaster is gone", func() bool { return !alive(t.Context(), pid) })
}

// What stands in a pid file after a crash, and whose process has that id by now.
func TestStalePidFileDoesNotKeepServerFromStarting(t *testing.T) {
	for name, occupy := range map[string]func(t *testing.T) int{
		"of a process that is gone":         deadProcess,
		"of a zombie nobody reaps":          zombieProcess,
		"of a process that got the id anew": unrelatedProcess,
	} {
		t.Run(name, func(t *testing.T) {
			dir := keptDir(t)
			server := start(t, Config{DataDir: dir, Fast: true})
			if err := server.Halt(t.Context(), Crash); err != nil {
				t.Fatal(err)
			}
			pid := occupy(t)
			for _, file := range []string{"postmaster.pid", ".s.PGSQL.5432.lock"} {
				replacePid(t, filepath.Join(dir, clusterData, file), pid)
			}
			if err := server.Resume(t.Context()); err != nil {
				t.Fatal(err)
			}
			query(t, server.ConnString(), "SELECT 'up'")
		})
	}
}

// Without clearStale the two living ids above would be fatal: this is what Postgres says of them.
func TestPostgresItselfRefusesPidFileOfZombie(t *testing.T) {
	dir := keptDir(t)
	server := start(t, Config{DataDir: dir, Fast: true})
	if err := server.Halt(t.Context(), Crash); err != nil {
		t.Fatal(err)
	}
	replacePid(t, filepath.Join(dir, clusterData, "postmaster.pid"), zombieProcess(t))
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	cmd := exec.CommandContext(ctx, server.cluster.bin.program("postgres"), "-D", filepath.Join(dir, clusterData))
	cmd.SysProcAttr = mustAccount(t).attributes()
	out, err := cmd.CombinedOutput()
	if err == nil || !strings.Contains(string(out), "already exists") {
		t.Errorf("postgres started over a zombie's pid file: %v\n%s", err, out)
	}
}

func TestServerStartedByOtherMeansIsNotDisturbed(t *testing.T) {
	dir := keptDir(t)
	server := start(t, Config{DataDir: dir, Fast: true})
	if err := server.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	data := filepath.Join(dir, clusterData)
	foreign := exec.CommandContext(t.Context(), server.cluster.bin.program("postgres"), "-D", data)
	foreign.SysProcAttr = mustAccount(t).attributes()
	foreign.Cancel = func() error { return foreign.Process.Signal(syscall.SIGQUIT) }
	if err := foreign.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = foreign.Wait() })
	eventually(t, "the other server is up", func() bool {
		_, err := tryQuery(t.Context(), server.ConnString(), "SELECT 'up'")
		return err == nil
	})

	_, err := Start(t.Context(), Config{DataDir: dir})
	if err == nil || !strings.Contains(err.Error(), fmt.Sprint(foreign.Process.Pid)) {
		t.Errorf("got %v, want an error with process id %d", err, foreign.Process.Pid)
	}
	query(t, server.ConnString(), "SELECT 'unharmed'")
}

func TestTwoEphemeralServersRunAtOnce(t *testing.T) {
	var servers [2]*Server
	var errs [2]error
	var wait sync.WaitGroup
	for i := range servers {
		wait.Go(func() { servers[i], errs[i] = Start(t.Context(), Config{Fast: true}) })
	}
	wait.Wait()
	for i, server := range servers {
		if errs[i] != nil {
			t.Fatal(errs[i])
		}
		stopAfter(t, server)
	}
	exec1(t, servers[0].ConnString(), "CREATE TABLE only_here ()")
	if got := query(t, servers[1].ConnString(), "SELECT coalesce(to_regclass('only_here')::text, 'absent')"); got != "absent" {
		t.Error("two servers share their data")
	}
}

func TestSecondServerInOneDataDirectoryIsRefused(t *testing.T) {
	dir := keptDir(t)
	helper, dsn := startHelper(t, "server:"+dir)
	_, err := Start(t.Context(), Config{DataDir: dir})
	if err == nil || !strings.Contains(err.Error(), fmt.Sprintf("in use by process %d", helper.Process.Pid)) {
		t.Errorf("got %v, want an error that names process %d", err, helper.Process.Pid)
	}
	query(t, dsn, "SELECT 'unharmed'")
}

func TestOneOfTwoServersWinsNewDataDirectory(t *testing.T) {
	dir := keptDir(t)
	var servers [2]*Server
	var errs [2]error
	var wait sync.WaitGroup
	for i := range servers {
		wait.Go(func() { servers[i], errs[i] = Start(t.Context(), Config{DataDir: dir, Fast: true}) })
	}
	wait.Wait()
	winners := 0
	for i, server := range servers {
		switch {
		case errs[i] == nil:
			winners++
			stopAfter(t, server)
			query(t, server.ConnString(), "SELECT 'up'")
		case !strings.Contains(errs[i].Error(), "in use by process"):
			t.Errorf("the loser's error is %v", errs[i])
		}
	}
	if winners != 1 {
		t.Errorf("%d servers run in one data directory", winners)
	}
}

func TestSocketPathIsRefusedFromOneByteOverTheLimit(t *testing.T) {
	limit := 107
	if !strings.HasPrefix(os.Getenv("GOOS"), "linux") && !exists("/proc/self") {
		limit = 103
	}
	base := filepath.Dir(keptDir(t))
	for _, over := range []int{0, 1} {
		name := strings.Repeat("s", limit+over-len(base)-len("//.s.PGSQL.5432"))
		dir := filepath.Join(base, name)
		if err := os.Mkdir(dir, 0o700); err != nil {
			t.Fatal(err)
		}
		if err := mustAccount(t).own(dir); err != nil {
			t.Fatal(err)
		}
		server, err := Start(t.Context(), Config{SocketDir: dir, Fast: true})
		if over == 0 {
			if err != nil {
				t.Fatalf("socket path of %d bytes: %v", limit, err)
			}
			stopAfter(t, server)
			query(t, server.ConnString(), "SELECT 'up'")
			continue
		}
		if err == nil {
			stopAfter(t, server)
		}
		want := fmt.Sprintf("is %d bytes long, and the system allows %d", limit+1, limit)
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want an error with %q", err, want)
		}
	}
}

func TestATemporaryDirectoryWithALongNameIsAvoided(t *testing.T) {
	long := filepath.Join(filepath.Dir(keptDir(t)), strings.Repeat("t", 100))
	if err := os.Mkdir(long, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Setenv("TMPDIR", long)
	server := start(t, Config{Fast: true})
	query(t, server.ConnString(), "SELECT 'up'")
	left, err := os.ReadDir(long)
	if err != nil || len(left) != 0 {
		t.Errorf("left in the unfit directory: %v %v", left, err)
	}
}

func TestDirectoryNotCreatedHereIsNeverDeleted(t *testing.T) {
	dir := keptDir(t)
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	foreign := filepath.Join(dir, "thesis.txt")
	if err := os.WriteFile(foreign, []byte("two years' work"), 0o600); err != nil {
		t.Fatal(err)
	}
	server := start(t, Config{DataDir: dir, Fast: true})
	if err := server.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	if _, err := Start(t.Context(), Config{DataDir: dir, Settings: map[string]string{"no_such_setting": "1"}}); err == nil {
		t.Error("a server started with a setting that does not exist")
	}
	for _, path := range []string{foreign, filepath.Join(dir, clusterData, "PG_VERSION")} {
		if !exists(path) {
			t.Errorf("%s is gone", path)
		}
	}
}

func TestClusterMadeByOtherMeansIsRefusedAsDataDirectory(t *testing.T) {
	dir := keptDir(t)
	server := start(t, Config{DataDir: dir, Fast: true})
	if err := server.Stop(t.Context()); err != nil {
		t.Fatal(err)
	}
	_, err := Start(t.Context(), Config{DataDir: filepath.Join(dir, clusterData)})
	if err == nil || !strings.Contains(err.Error(), "made by other means") {
		t.Errorf("got %v", err)
	}
}

// replacePid puts a process id in the first line of a pid file.
func replacePid(t *testing.T, path string, pid int) {
	t.Helper()
	lines, err := readLines(path)
	if err != nil {
		t.Fatal(err)
	}
	lines[0] = fmt.Sprint(pid)
	if err := os.WriteFile(path, []byte(strings.Join(lines, "\n")+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
}

// The processes below belong to the server's user: Postgres takes those of other users for strangers.

func deadProcess(t *testing.T) int {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "/bin/sh", "-c", "exit 0")
	cmd.SysProcAttr = mustAccount(t).attributes()
	if err := cmd.Run(); err != nil {
		t.Fatal(err)
	}
	return cmd.Process.Pid
}

func zombieProcess(t *testing.T) int {
	t.Helper()
	cmd := exec.Command("/bin/sh", "-c", "exit 0") //nolint:noctx // a context would reap it
	cmd.SysProcAttr = mustAccount(t).attributes()
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = cmd.Wait() })
	pid := cmd.Process.Pid
	eventually(t, "the process is a zombie", func() bool {
		p, err := process.NewProcess(int32(pid))
		return err == nil && isZombie(t.Context(), p)
	})
	return pid
}

func unrelatedProcess(t *testing.T) int {
	t.Helper()
	cmd := exec.CommandContext(t.Context(), "/bin/sh", "-c", "read -r _")
	cmd.SysProcAttr = mustAccount(t).attributes()
	in, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		in.Close()
		_ = cmd.Wait()
	})
	return cmd.Process.Pid
}

// A postmaster ignores signals in its first milliseconds. Who is killed just then must not leave it running.
func TestServerStoppedAsSoonAsItIsStartedGoes(t *testing.T) {
	server := start(t, Config{DataDir: keptDir(t), Fast: true})
	if err := server.Halt(t.Context(), Fast); err != nil {
		t.Fatal(err)
	}
	c := server.cluster
	log, err := os.Create(c.dir.log())
	if err != nil {
		t.Fatal(err)
	}
	defer log.Close()
	for range 5 {
		run, err := supervise(supervisorCommand(c.acct, c.bin, c.dir.data(), Fast), c.dir.hold, log)
		if err != nil {
			t.Fatal(err)
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		if err := run.stop(ctx); err != nil {
			t.Errorf("%v: %s", err, c.logTail())
		}
		cancel()
	}
}
