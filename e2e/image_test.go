package e2e_test

import (
	"context"
	crand "crypto/rand"
	"encoding/base64"
	"fmt"
	"io"
	"net/url"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/moby/moby/api/types/container"
	"github.com/testcontainers/testcontainers-go"
	"github.com/testcontainers/testcontainers-go/wait"

	"github.com/penstock/penstock/internal/devpostgres"
	"github.com/penstock/penstock/internal/machine"
	"github.com/penstock/penstock/pkg/worker"
)

// image is the container image on a database of its own, set up in the steps of deploy/compose: the schema, a role with a
// password for each program, then the programs, read-only and without capabilities.
type image struct {
	*site
	name    string
	secrets string // a directory with the passwords of the roles, /run/secrets in the containers
	owner   *url.URL
}

func newImage(t *testing.T) *image {
	t.Helper()
	name := os.Getenv("PENSTOCK_IMAGE")
	if name == "" {
		t.Skip("PENSTOCK_IMAGE names no image: make image, then make check-image")
	}
	server, err := devpostgres.Start(t.Context(), devpostgres.Config{Port: machine.FreePort(t), Fast: true})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = server.Stop(context.WithoutCancel(t.Context())) })
	owner, err := url.Parse(server.ConnString())
	if err != nil {
		t.Fatal(err)
	}
	pool, err := pgxpool.New(t.Context(), owner.String())
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(pool.Close)
	i := &image{
		site: &site{t: t, dsn: owner.String(), pool: pool}, name: name, owner: owner, secrets: t.TempDir(),
	}
	for _, role := range []string{"leader", "node", "gateway"} {
		i.secret(role, crand.Text())
	}
	key := make([]byte, 32)
	_, _ = crand.Read(key) // never fails
	i.secret("webhook", base64.StdEncoding.EncodeToString(key))
	return i
}

// secret writes a file that the user of the containers, who has no name, can read.
func (i *image) secret(name, value string) {
	i.t.Helper()
	for path := i.secrets; strings.HasPrefix(path, os.TempDir()+"/"); path = filepath.Dir(path) {
		if err := os.Chmod(path, 0o755); err != nil {
			i.t.Fatal(err)
		}
	}
	if err := os.WriteFile(filepath.Join(i.secrets, name), []byte(value), 0o444); err != nil {
		i.t.Fatal(err)
	}
}

// run starts a program of the image and waits for the state.
func (i *image) run(state wait.Strategy, database *url.URL, command ...string) testcontainers.Container {
	i.t.Helper()
	c, err := testcontainers.Run(i.t.Context(), i.name,
		testcontainers.WithEntrypoint("/usr/local/bin/"+command[0]),
		testcontainers.WithCmd(command[1:]...),
		testcontainers.WithEnv(map[string]string{"PENSTOCK_DATABASE_URL": database.String()}),
		testcontainers.WithHostConfigModifier(func(host *container.HostConfig) {
			host.NetworkMode = "host"
			host.ReadonlyRootfs = true
			host.CapDrop = []string{"ALL"}
			host.SecurityOpt = []string{"no-new-privileges:true"}
			host.Binds = []string{i.secrets + ":/run/secrets:ro"}
		}),
		testcontainers.WithWaitStrategyAndDeadline(time.Minute, state))
	if c != nil {
		i.t.Cleanup(func() {
			if i.t.Failed() {
				i.t.Logf("%s said:\n%s", command[0], i.said(c))
			}
			_ = c.Terminate(context.WithoutCancel(i.t.Context()))
		})
	}
	if err != nil {
		i.t.Fatalf("%s: %v", strings.Join(command, " "), err)
	}
	return c
}

func (i *image) said(c testcontainers.Container) string {
	logs, err := c.Logs(context.WithoutCancel(i.t.Context()))
	if err != nil {
		return err.Error()
	}
	defer logs.Close()
	text, _ := io.ReadAll(logs) // as far as it can be read
	return string(text)
}

// once runs a command that has to end with status 0.
func (i *image) once(command ...string) {
	i.t.Helper()
	c := i.run(wait.ForExit(), i.owner, command...)
	i.ended(c, strings.Join(command, " "))
}

func (i *image) ended(c testcontainers.Container, what string) {
	i.t.Helper()
	state, err := c.State(i.t.Context())
	if err != nil {
		i.t.Fatal(err)
	}
	if state.ExitCode != 0 {
		i.t.Errorf("%s ended with status %d", what, state.ExitCode)
	}
}

// as is the address of the database for the role of a program.
func (i *image) as(duty string) *url.URL {
	i.t.Helper()
	password, err := os.ReadFile(filepath.Join(i.secrets, duty))
	if err != nil {
		i.t.Fatal(err)
	}
	u := *i.owner
	u.User = url.UserPassword("penstock_"+duty, string(password))
	return &u
}

func TestImageRunsEntriesAndDrains(t *testing.T) {
	i := newImage(t)
	i.once("penstock", "version")
	i.once("penstock", "migrate", "up")
	i.once("penstock", "grants", "--apply", "--passwords", "/run/secrets")
	started := func(line string) wait.Strategy { return wait.ForLog(line) }
	leader := i.run(started("leader started"), i.as("leader"), "leader", "--migrate=false",
		"--listen", fmt.Sprintf("127.0.0.1:%d", machine.FreePort(t)), "--debug-listen", "127.0.0.1:0")
	gateway := i.run(started("gateway started"), i.as("gateway"), "gateway",
		"--listen", fmt.Sprintf("127.0.0.1:%d", machine.FreePort(t)), "--debug-listen", "127.0.0.1:0")
	node := i.run(started("task node started"), i.as("node"), "tasknode", "--listen", "127.0.0.1:0",
		"--webhook-key", "file:/run/secrets/webhook", "--governor=false")
	p := &plant{site: i.site}
	p.queue = p.register(worker.Model{Name: "echo"}, 4, p.startWorker(4))
	p.push(p.queue, 100)
	eventually(t, time.Minute, "every entry is done", func() bool {
		return p.query(`SELECT count(*) FROM penstock.result WHERE outcome = 'done'`) == int64(len(p.ids))
	})
	grace := 30 * time.Second
	for _, one := range []struct {
		name string
		c    testcontainers.Container
	}{{"task node", node}, {"gateway", gateway}, {"leader", leader}} {
		if err := one.c.Stop(t.Context(), &grace); err != nil {
			t.Fatal(err)
		}
		i.ended(one.c, one.name)
	}
	if n := p.query(`SELECT count(*) FROM penstock.node`); n != 0 {
		t.Errorf("%d nodes that were drained are still registered", n)
	}
}
