package main

import (
	"bufio"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock/penstock/bench/database"
	"github.com/penstock/penstock/pkg/inference"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/worker"
)

const modelName = "llm"

// testbed is a database with one model, the worker that runs it, and Penstock's programs.
type testbed struct {
	options
	ctx      context.Context //nolint:containedctx // of the scenario that runs
	pool     *pgxpool.Pool
	closeAll func()
	queue    *invalidation.Queue
	worker   *program
	gateway  *program
	node     *program
	programs []*program
}

func newTestbed(ctx context.Context, o options) (*testbed, error) {
	pool, closeAll, err := database.Open(ctx, "", 16)
	if err != nil {
		return nil, err
	}
	p := &testbed{options: o, ctx: ctx, pool: pool, closeAll: closeAll}
	if err := p.prepare(); err != nil {
		p.close()
		return nil, err
	}
	return p, nil
}

func (p *testbed) prepare() (err error) {
	_ = os.Remove(p.log)
	args := append(strings.Fields(p.options.worker), "--listen", "127.0.0.1:0", "--slots", strconv.Itoa(p.slots),
		"--log", p.log)
	if p.worker, err = p.start("worker", "listening on ", args...); err != nil {
		return err
	}
	model := worker.Model{Name: modelName, Protocol: worker.ProtocolOpenAI, LoadPath: "/health", Stream: true}
	if model.RemoteName, err = p.remoteName(); err != nil {
		return err
	}
	by := inference.By{Actor: "bench"}
	name, err := inference.RegisterModel(p.ctx, p.pool, model, by)
	if err != nil {
		return err
	}
	if _, err := inference.RegisterInstance(p.ctx, p.pool, modelName, "gpu-1", p.worker.url, p.slots, nil,
		by); err != nil {
		return err
	}
	// Each path may have all slots while it is measured.
	const allSlots = `SELECT penstock.set_gateway_policy($1, '{"reserved": 0, "batch_reserved": 0}', 'measured')`
	if _, err := p.pool.Exec(p.ctx, allSlots, modelName); err != nil {
		return err
	}
	if p.queue, err = invalidation.Open(p.ctx, p.pool, name); err != nil {
		return err
	}
	p.queue = p.queue.Hinting(invalidation.NewHinter(p.pool, 0))
	if _, err = p.startProgram("leader", "leader", "--open", "--debug-listen", "127.0.0.1:0"); err != nil {
		return err
	}
	if p.node, err = p.startNode("n1"); err != nil {
		return err
	}
	p.gateway, err = p.startProgram("gateway", "gateway", "--open", "--debug-listen", "127.0.0.1:0", "--name", "g1")
	return err
}

// remoteName is the name that the worker has for its model.
func (p *testbed) remoteName() (string, error) {
	var list struct{ Data []struct{ ID string } }
	if err := get(p.ctx, p.worker.url+"/v1/models", &list); err != nil {
		return "", err
	}
	return list.Data[0].ID, nil
}

func (p *testbed) startNode(name string) (*program, error) {
	return p.startProgram(name, "tasknode", "--name", name, "--governor=false")
}

func (p *testbed) startProgram(name, file string, args ...string) (*program, error) {
	args = append([]string{
		filepath.Join(p.bin, file), "--listen", "127.0.0.1:0", "--database-url", p.pool.Config().ConnString(),
	}, args...)
	return p.start(name, "listen=", args...)
}

// program is a process that serves HTTP.
type program struct {
	cmd *exec.Cmd
	url string
}

// start starts a program and waits until it says its address behind a sign.
func (p *testbed) start(name, sign string, args ...string) (*program, error) {
	cmd := exec.Command(args[0], args[1:]...) //nolint:gosec,noctx // programs of ours; close ends them
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	cmd.Stderr = cmd.Stdout
	log := io.Discard
	if p.logs != "" {
		file, err := os.Create(filepath.Join(p.logs, name+".log"))
		if err != nil {
			return nil, err
		}
		log = file
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	started := &program{cmd: cmd}
	p.programs = append(p.programs, started)
	lines := bufio.NewScanner(io.TeeReader(out, log))
	for lines.Scan() {
		if _, rest, found := strings.Cut(lines.Text(), sign); found {
			address, _, _ := strings.Cut(rest, " ")
			started.url = "http://" + address
			go func() { _, _ = io.Copy(log, out) }()
			return started, nil
		}
		if p.logs == "" {
			fmt.Fprintf(os.Stderr, "%s: %s\n", name, lines.Text())
		}
	}
	return nil, fmt.Errorf("%s did not say %q", name, sign)
}

// within runs a scenario, or what follows it, for so long at most.
func (p *testbed) within(ctx context.Context, most time.Duration, run func(*testbed) error) error {
	bounded, cancel := context.WithTimeout(ctx, most)
	defer cancel()
	p.ctx = bounded
	return run(p)
}

func (p *testbed) close() {
	for i := len(p.programs) - 1; i >= 0; i-- {
		one := p.programs[i]
		_ = one.cmd.Process.Signal(syscall.SIGTERM)
		late := time.AfterFunc(10*time.Second, func() { _ = one.cmd.Process.Kill() })
		_ = one.cmd.Wait()
		late.Stop()
	}
	p.closeAll()
}

// health is what the worker counts.
type health struct {
	Active int   `json:"active_jobs"`
	Queued int   `json:"queued"`
	Tokens int64 `json:"tokens"`
	Ended  int64 `json:"ended"`
	Steps  int64 `json:"steps"`
}

func (p *testbed) health() (h health, err error) {
	return h, get(p.ctx, p.worker.url+"/health", &h)
}

func get(ctx context.Context, url string, into any) error {
	request, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	return json.NewDecoder(answer.Body).Decode(into)
}

// event is a line of the worker's log: a request arrives, begins (has a slot), ends, or stops (its caller is gone).
type event struct {
	At    float64 `json:"at"` // seconds since 1970
	Event string  `json:"event"`
	Key   int     `json:"key"`
	Made  int     `json:"made"` // tokens
	Entry string  `json:"entry"`
	User  string  `json:"user"`
}

func (p *testbed) events() (all []event, err error) {
	file, err := os.Open(p.log)
	if err != nil {
		return nil, err
	}
	defer file.Close()
	lines := bufio.NewScanner(file)
	for lines.Scan() {
		var e event
		if json.Unmarshal(lines.Bytes(), &e) == nil { // the last line may be written at this moment
			all = append(all, e)
		}
	}
	return all, lines.Err()
}

func seconds(at time.Time) float64 { return float64(at.UnixMicro()) / 1e6 }

// until waits for a condition, for 60 s at most.
func (p *testbed) until(what string, condition func() (bool, error)) error {
	for end := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		done, err := condition()
		if done || err != nil {
			return err
		}
		if p.ctx.Err() != nil || time.Now().After(end) {
			return fmt.Errorf("waited in vain until %s", what)
		}
	}
}

// active waits until the worker runs n calls.
func (p *testbed) active(n int) error {
	return p.until(fmt.Sprintf("the worker runs %d calls", n), func() (bool, error) {
		h, err := p.health()
		return h.Active == n && h.Queued == 0, err
	})
}

// clear cancels the entries that are left, and waits until nothing runs.
func (p *testbed) clear() error {
	return p.until("nothing runs", func() (bool, error) {
		rows, _ := p.pool.Query(p.ctx, `SELECT id FROM penstock.entry
			WHERE id NOT IN (SELECT entry_id FROM penstock.cancel_request)`)
		ids, err := pgx.CollectRows(rows, pgx.RowTo[int64])
		if err != nil {
			return false, err
		}
		for _, id := range ids { // an error: it has ended meanwhile
			_, _ = p.pool.Exec(p.ctx, `SELECT penstock.cancel_entry($1, 'end of the scenario')`, id)
		}
		var left int
		if err := p.pool.QueryRow(p.ctx, `SELECT count(*) FROM penstock.entry`).Scan(&left); err != nil {
			return false, err
		}
		h, err := p.health()
		return left == 0 && h.Active+h.Queued == 0, err
	})
}
