package main

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/user"
	"slices"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"golang.org/x/term"

	"github.com/penstock/penstock/internal/config"
	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/webhook"
)

// app is one run of the program: where it reads and writes, what its global flags say, and its way to the system.
type app struct {
	in  io.Reader
	out *output
	err io.Writer
	env func(string) string

	databaseURL string
	pooled      bool
	server      string
	token       string
	tokenFile   string
	caFile      string // of the server's certificate
	certFile    string // our own certificate, and its key
	keyFile     string
	timeout     time.Duration
	format      string
	noColor     bool
	actor       string

	command  string // as it is called, for errors
	seeState string // see stateVerbs
	started  bool   // our own code runs: errors are no longer about the command line's form
	colours  bool
	handler  http.Handler // of the API in this process; given by tests, else made when it is first needed
	pool     *pgxpool.Pool
	now      func() time.Time
	keeper   webhook.Keeper // of receivers of callbacks, for the handler in this process

	completionMax time.Duration // a person waits at the prompt for no longer
}

// output remembers the first error of its writes: what a command prints may be a secret that is shown once.
type output struct {
	io.Writer
	failed error
}

func (o *output) Write(text []byte) (int, error) {
	n, err := o.Writer.Write(text)
	if o.failed == nil {
		o.failed = err
	}
	return n, err
}

func newApp(in io.Reader, out, err io.Writer, env func(string) string) *app {
	return &app{in: in, out: &output{Writer: out}, err: err, env: env, now: time.Now, completionMax: time.Second}
}

// whoami names the person for the audit: the database user is often one for all.
func whoami() string {
	name := "unknown"
	if u, err := user.Current(); err == nil {
		name = u.Username
	}
	if host, err := os.Hostname(); err == nil {
		name += "@" + host
	}
	return name
}

// check looks at the global flags once they are read, and fills in what the environment says.
func (a *app) check() error {
	if !slices.Contains(formats, a.format) {
		return usagef("--output is %q: want table, wide, json, jsonl or yaml", a.format)
	}
	if a.databaseURL == "" && a.server == "" { // a flag counts more than the environment
		a.databaseURL, a.server = a.env("PENSTOCK_DATABASE_URL"), a.env("PENSTOCK_SERVER")
	}
	if a.server != "" && a.actor != "" {
		return usagef("--actor goes with --database-url: through the API the actor is that of the token")
	}
	if a.actor == "" {
		a.actor = whoami()
	}
	a.colours = terminal(a.out) && !a.noColor && a.env("NO_COLOR") == "" && a.env("TERM") != "dumb"
	return nil
}

func terminal(stream any) bool {
	if o, wrapped := stream.(*output); wrapped {
		stream = o.Writer
	}
	f, ok := stream.(*os.File)
	return ok && term.IsTerminal(int(f.Fd()))
}

// place is an error unless it is known where the system is, one way and not two.
func (a *app) place() error {
	if a.server != "" && a.databaseURL != "" {
		return usagef("--server (PENSTOCK_SERVER) and --database-url (PENSTOCK_DATABASE_URL) are both given: want " +
			"one of them")
	}
	if a.server == "" && a.databaseURL == "" && !config.LibpqHasDatabase(a.env) {
		return usagef("where is the system? Give --server (PENSTOCK_SERVER) to go through its API, or " +
			"--database-url (PENSTOCK_DATABASE_URL)")
	}
	return nil
}

// database returns the pool, which connects when it is first used.
func (a *app) database(ctx context.Context) (*pgxpool.Pool, error) {
	if a.pool != nil {
		return a.pool, nil
	}
	if err := a.place(); err != nil {
		return nil, err
	}
	if a.server != "" {
		return nil, usagef("%s works only on the database: use --database-url (PENSTOCK_DATABASE_URL)", a.command)
	}
	pool, err := postgres.Open(ctx, a.poolConfig())
	if err != nil {
		return nil, usageError{fmt.Errorf("%w; --database-url wants postgres://user:password@host:port/name", err)}
	}
	a.pool = pool
	return pool, nil
}

// connect returns the connection to the API: of the server that the flags name, or of a handler in this process.
func (a *app) connect(ctx context.Context) (conn, error) {
	if a.handler != nil {
		return a.inProcess(ctx)
	}
	if err := a.place(); err != nil {
		return conn{}, err
	}
	if a.server != "" {
		return a.overNetwork()
	}
	return a.inProcess(ctx)
}

func (a *app) close() {
	if a.pool != nil {
		a.pool.Close()
	}
}
