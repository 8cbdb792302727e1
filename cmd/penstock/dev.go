package main

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net/url"
	"os"
	"os/signal"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/spf13/cobra"

	"github.com/penstock/penstock/internal/devpostgres"
	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/migrations"
	"github.com/penstock/penstock/pkg/inference"
	"github.com/penstock/penstock/pkg/worker"
)

// devOptions say what `penstock dev` starts.
type devOptions struct {
	data    string
	entries int
	nodes   int
	slots   int
	every   time.Duration
	once    bool
}

func devCommand(a *app) *cobra.Command {
	var o devOptions
	c := &cobra.Command{
		Use:   "dev",
		Short: "Start the whole platform on a private Postgres, and push real work through it",
		Long: `Start a private Postgres, a leader, task nodes, a gateway and an inference worker, push real pictures and
texts through them and show the results. The programs are those beside this one (make build puts them there).
Each is a process of its own that may be killed: it is started again, and no entry is lost.
The autoscaler starts one to three workers that find faces, and each change is printed with its reasons.
Ctrl-C stops everything.`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error { return dev(c.Context(), a.out, o) },
	}
	f := c.Flags()
	f.StringVar(&o.data, "data", "", "keep the database in this directory; without it, it is deleted in the end")
	f.IntVar(&o.entries, "entries", 200, "entries of the first batch")
	f.IntVar(&o.nodes, "nodes", 2, "task nodes")
	f.IntVar(&o.slots, "slots", 4, "calls the worker takes at once")
	f.DurationVar(&o.every, "every", time.Second, "push another entry so often after the first batch; 0: none")
	f.BoolVar(&o.once, "once", false, "stop when the first batch has ended")
	return c
}

// platform is everything that dev has started.
type platform struct {
	out      io.Writer
	logs     string
	source   string            // of Postgres
	roles    map[string]string // duty to the address of the database for its role
	pool     *pgxpool.Pool     // of the operator
	worker   string            // address
	leader   string            // address
	programs *supervisor
	queues   map[string]string // model to queue
}

func dev(ctx context.Context, out io.Writer, o devOptions) (err error) {
	if o.entries < 1 || o.nodes < 1 || o.slots < 1 {
		return usagef("--entries, --nodes and --slots must be at least 1")
	}
	ctx, stop := signal.NotifyContext(ctx, syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	server, err := devpostgres.Start(ctx, devpostgres.Config{DataDir: o.data, Confirm: devpostgres.ConfirmOnTerminal})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, server.Stop(context.WithoutCancel(ctx))) }()
	p := &platform{out: out, source: server.Source()}
	if err := endLeftovers(ctx, os.TempDir(), out); err != nil {
		return err
	}
	if p.logs, err = os.MkdirTemp("", devPrefix); err != nil {
		return fmt.Errorf("make directory for logs: %w", err)
	}
	owner, err := holdDir(p.logs)
	if err != nil {
		return err
	}
	defer owner.Close()
	if _, err := migrations.Up(ctx, server.Config()); err != nil {
		return err
	}
	if p.roles, err = grantRoles(ctx, server); err != nil {
		return err
	}
	if p.pool, err = postgres.Open(ctx, postgres.Config{DSN: p.roles["operator"], MaxConns: 4}); err != nil {
		return err
	}
	defer p.pool.Close()
	if err := p.start(ctx, o); err != nil {
		return interrupted(ctx, err)
	}
	defer func() {
		p.programs.stop(out)
		err = errors.Join(err, p.stopInstances(context.WithoutCancel(ctx)))
	}()
	explaining, done := context.WithCancel(ctx)
	var explainer sync.WaitGroup
	explainer.Go(func() { p.explainScaling(explaining) })
	defer explainer.Wait()
	defer done()
	return interrupted(ctx, p.work(ctx, o))
}

// grantRoles makes a database role for each duty, with a password of its own for this start, and returns the addresses
// with which they log in: no program runs as the superuser of the cluster.
func grantRoles(ctx context.Context, server *devpostgres.Server) (map[string]string, error) {
	roles := migrations.Roles("penstock")
	for i := range roles {
		roles[i].Password = rand.Text()
	}
	if _, err := migrations.Grant(ctx, server.Config(), roles); err != nil {
		return nil, err
	}
	addresses := map[string]string{}
	for _, role := range roles {
		address, err := url.Parse(server.ConnString())
		if err != nil {
			return nil, fmt.Errorf("read the address of the server: %w", err)
		}
		address.User = url.UserPassword(role.Name, role.Password)
		addresses[role.Duty] = address.String()
	}
	return addresses, nil
}

// interrupted makes an error that follows from Ctrl-C none.
func interrupted(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return nil
	}
	return err
}

// start brings the processes up, in the order in which they need each other.
func (p *platform) start(ctx context.Context, o devOptions) (err error) {
	if p.programs, err = newSupervisor(p.logs, p.out); err != nil {
		return err
	}
	defer func() {
		if err != nil {
			p.programs.stop(p.out)
			err = errors.Join(err, p.stopInstances(context.WithoutCancel(ctx)))
		}
	}()
	if p.worker, err = p.programs.start(ctx, "worker", "listening on ", "--listen", "127.0.0.1:0", "--slots",
		fmt.Sprint(o.slots)); err != nil {
		return err
	}
	// The key is no secret: what it seals is on this machine alone, like the receivers that may be called.
	const key = "PENSTOCK_SECRET_WEBHOOK=penstock dev, known to everybody"
	p.programs.env = []string{"PENSTOCK_DATABASE_URL=" + p.roles["leader"]}
	const receivers = "127.0.0.0/8"
	instances, commands, err := p.localInstances(o)
	if err != nil {
		return err
	}
	if p.leader, err = p.programs.start(ctx, "leader", "listen=", "--listen", "127.0.0.1:0", "--debug-listen",
		"localhost:0", "--open",
		"--callback-allow-networks", receivers, "--scale-local-dir", instances,
		"--scale-local-commands", commands); err != nil {
		return err
	}
	if err := p.register(ctx, o); err != nil {
		return err
	}
	p.programs.env = []string{"PENSTOCK_DATABASE_URL=" + p.roles["node"], key}
	for i := range o.nodes {
		name := fmt.Sprintf("tasknode-%d", i+1)
		if _, err = p.programs.start(ctx, name, "listen=", "--listen", "127.0.0.1:0", "--name", name,
			"--webhook-key", "env:PENSTOCK_SECRET_WEBHOOK", "--webhook-allow-networks", receivers); err != nil {
			return err
		}
	}
	p.programs.env = []string{"PENSTOCK_DATABASE_URL=" + p.roles["gateway"]}
	front, err := p.programs.start(ctx, "gateway", "listen=", "--listen", "127.0.0.1:0",
		"--debug-listen", "localhost:0", "--open",
		"--api-url", "http://"+p.leader)
	if err != nil {
		return err
	}
	fmt.Fprintf(p.out, "dashboard   http://%s/ui/  (open to this machine: no login needed)\n", p.leader)
	fmt.Fprintf(p.out, "postgres    %s\n", p.source)
	fmt.Fprintf(p.out, "worker      %s  (%d slots; tells languages)\n", p.worker, o.slots)
	fmt.Fprintf(p.out, "autoscaler  1 to 3 workers that find faces; why: penstock scale history %s\n", scaledModel)
	fmt.Fprintf(p.out, "leader      http://%s  (the API, as open)\n", p.leader)
	fmt.Fprintf(p.out, "call        curl http://%s/v1/queues  (all there is: /openapi.yaml)\n", p.leader)
	fmt.Fprintf(p.out, "gateway     http://%s  (the OpenAI API, on the slots of the queues)\n", front)
	fmt.Fprintf(p.out, "stream      curl -N http://%s/v1/chat/completions -d '%s'\n", front, chatExample)
	fmt.Fprintf(p.out, "task nodes  %d\nlogs        %s\n", o.nodes, p.logs)
	fmt.Fprintf(p.out, "look        psql %q -c 'TABLE penstock.queue_status'\n", p.roles["operator"])
	fmt.Fprintf(p.out, "            %s top --database-url %q\n\n", os.Args[0], p.roles["operator"])
	return nil
}

// chatModel is what the gateway serves: the example worker's way to speak OpenAI's protocol. It answers with the
// language of the last message.
const (
	chatModel   = "tell-language"
	chatExample = `{"model": "` + chatModel + `", "stream": true, ` +
		`"messages": [{"role": "user", "content": "Wo geht es hier zum Bahnhof?"}]}`
)

// register makes the worker's models known; that makes their queues.
func (p *platform) register(ctx context.Context, o devOptions) error {
	by := inference.By{Actor: "penstock dev", Reason: "first start"}
	retries := 1
	p.queues = map[string]string{}
	for _, name := range []string{"faces", "language"} {
		queue, err := inference.RegisterModel(ctx, p.pool,
			worker.Model{Name: name, Protocol: worker.ProtocolGeneric, MaxRetries: &retries}, by)
		if err != nil {
			return err
		}
		p.queues[name] = queue
		if name == scaledModel {
			continue // its workers are started by the autoscaler
		}
		if _, err := inference.RegisterInstance(ctx, p.pool, name, "dev", p.worker+"/"+name, o.slots, nil,
			by); err != nil {
			return err
		}
	}
	if err := p.deploy(ctx, o); err != nil {
		return err
	}
	if _, err := inference.RegisterModel(ctx, p.pool, worker.Model{
		Name:     chatModel,
		Protocol: worker.ProtocolOpenAI, MaxRetries: &retries,
	}, by); err != nil {
		return err
	}
	_, err := inference.RegisterInstance(ctx, p.pool, chatModel, "dev", p.worker, o.slots, nil, by)
	return err
}

// beside returns the path of a program that was built together with this one.
func beside(name string) (string, error) {
	self, err := os.Executable()
	if err != nil {
		return "", fmt.Errorf("find this program: %w", err)
	}
	path := filepath.Join(filepath.Dir(self), name)
	if _, err := os.Stat(path); err != nil {
		return "", fmt.Errorf("program %q is not beside %s: build all of them with `make build`, or start with "+
			"`make run`", name, self)
	}
	return path, nil
}
