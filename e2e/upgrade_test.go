package e2e_test

import (
	"context"
	"encoding/json"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"
)

// newer builds leader and task node of the next version: with another text of one function. The programs are named
// newer/leader and newer/tasknode.
func newer(t *testing.T) {
	t.Helper()
	dir, err := binaries()
	if err != nil {
		t.Fatal(err)
	}
	const name = "../migrations/functions/explain.sql"
	text, err := os.ReadFile(name)
	if err != nil {
		t.Fatal(err)
	}
	text = append(text, `
CREATE OR REPLACE FUNCTION penstock.ago(i interval) RETURNS text LANGUAGE sql IMMUTABLE AS $$ SELECT 'newer' $$;
`...)
	place, err := filepath.Abs(name)
	if err != nil {
		t.Fatal(err)
	}
	replacement, overlay := filepath.Join(t.TempDir(), "explain.sql"), filepath.Join(t.TempDir(), "overlay.json")
	described, err := json.Marshal(map[string]map[string]string{"Replace": {place: replacement}})
	if err != nil {
		t.Fatal(err)
	}
	for file, content := range map[string][]byte{replacement: text, overlay: described} {
		if err := os.WriteFile(file, content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	build := exec.CommandContext(t.Context(), "go", "build", "-ldflags=-s -w", "-overlay", overlay, "-o", filepath.Join(dir, "newer")+"/",
		"../cmd/leader", "../cmd/tasknode")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build the next version: %v\n%s", err, out)
	}
}

// A rolling upgrade: programs of both versions push, claim and finish while all functions are replaced, and programs of
// the version before that start afterwards leave the newer functions alone.
func TestProgramsOfTheVersionBeforeWorkWhileFunctionsAreReplaced(t *testing.T) {
	t.Parallel()
	newer(t)
	p := &plant{site: newSite(t, 1)}
	p.elected(0)
	p.exec(`SELECT penstock.set_statements('work', '{"run": "SELECT 1"}')`)
	p.startNode("node_before")

	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	done := func() int64 { return p.query(`SELECT count(*) FROM penstock.result WHERE outcome = 'done'`) }
	pushed := make(chan int64, 1)
	go func() {
		var n int64
		for ; ctx.Err() == nil && n < 20_000; n++ {
			const sql = `SELECT penstock.push('work', jsonb_build_object('n', $1::bigint), lock_key => 'key ' || $1 % 7)`
			if _, err := p.pool.Exec(t.Context(), sql, n); err != nil {
				t.Errorf("push %d: %v", n, err)
				break
			}
			if n%100 == 99 {
				p.fewerThan(ctx, 500)
			}
			time.Sleep(2 * time.Millisecond) // a load that two cores can take beside the programs
		}
		pushed <- n
	}()
	goesOn := func(what string) {
		t.Helper()
		before := done()
		eventually(t, time.Minute, what, func() bool { return done() >= before+100 })
	}
	replaced := func() bool { return p.query(`SELECT (penstock.ago('1 hour') = 'newer')::int`) == 1 }

	goesOn("the version before works")
	p.startPrograms("newer/leader", "leader_newer")
	if !replaced() {
		t.Fatal("the leader of the next version has not replaced the functions")
	}
	goesOn("the node of the version before works on newer functions")
	p.startLeader("leader_again")
	if !replaced() {
		t.Error("a leader of the version before took the newer functions back")
	}
	p.startPrograms("newer/tasknode", "node_newer", "--name", "node_newer", "--lease", nodeLease.String(), "--beat", "500ms")
	p.startNode("node_again")
	goesOn("nodes of both versions work side by side")

	stop()
	want := <-pushed
	eventually(t, time.Minute, "every entry is done once", func() bool { return done() == want })
	if n := p.query(`SELECT count(*) FROM penstock.failure`); n != 0 {
		t.Errorf("%d failures", n)
	}
	p.consistent()
}

// fewerThan returns when fewer entries than that are left, so that pushes stay within what the nodes can do, or when ctx ends.
func (p *plant) fewerThan(ctx context.Context, most int) {
	for left := most; left >= most && ctx.Err() == nil; time.Sleep(20 * time.Millisecond) {
		if p.pool.QueryRow(ctx, `SELECT count(*) FROM penstock.entry`).Scan(&left) != nil {
			return // ctx has ended
		}
	}
}

// startPrograms starts a program of the next version with a database role of its own and waits until it has started.
func (s *site) startPrograms(binary, role string, args ...string) {
	s.t.Helper()
	if filepath.Base(binary) == "leader" {
		s.exec(`CREATE ROLE ` + role + ` SUPERUSER LOGIN`) // it migrates
	} else {
		s.login(role, "node")
	}
	u, err := url.Parse(s.dsn)
	if err != nil {
		s.t.Fatal(err)
	}
	u.User = url.User(role)
	args = append(args, "--listen", "127.0.0.1:0", "--database-url", u.String())
	started := "task node started"
	if filepath.Base(binary) == "leader" {
		args, started = append(args, "--debug-listen", "127.0.0.1:0", "--open"), "leader started"
	}
	start(s.t, binary, role, args...).says(started)
}
