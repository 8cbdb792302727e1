package backend

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/penstock/penstock/pkg/scale"
)

// Local runs instances as processes of this machine. They outlive the leader: the next one finds
// them by their records in a directory, and, where a leader died between a start and its record, by
// their environment. The target of a deployment is {"command": "name"}: the commands are configured
// on the leader's machine, so that the right to change deployments is no right to run programs.
type Local struct {
	cfg  LocalConfig
	kept time.Duration // sessionKept

	mu    sync.Mutex
	ended map[string]string    // how processes that this leader started have ended
	seen  map[string]time.Time // when an instance was last found to have processes
}

// LocalConfig has the directory of records and the commands that may be run. Dir and Commands are
// required.
type LocalConfig struct {
	Dir      string // records and logs; one for all leaders of a machine
	Commands map[string]LocalCommand
	// Grace is how long SIGTERM may take before SIGKILL; only processes without requests are ended: 60 s.
	Grace time.Duration
	Log   *slog.Logger // slog.Default where it is nil
}

// LocalCommand is a program that serves a model. ${PORT} and ${GPU} in Command, Env and Endpoint are replaced.
type LocalCommand struct {
	Command  []string          `json:"command"`
	Env      map[string]string `json:"env,omitempty"`
	Endpoint string            `json:"endpoint"`          // such as http://127.0.0.1:${PORT}
	Slots    int               `json:"slots,omitempty"`   // 0: those of the policy
	Devices  []string          `json:"devices,omitempty"` // values of ${GPU}; a process has one for itself
}

// ReadLocalCommands reads a file of commands: an object from their names to LocalCommand.
func ReadLocalCommands(path string) (map[string]LocalCommand, error) {
	text, err := os.ReadFile(path) //nolint:gosec // the operator names the file
	if err != nil {
		return nil, fmt.Errorf("read local commands: %w", err)
	}
	var commands map[string]LocalCommand
	decoder := json.NewDecoder(bytes.NewReader(text))
	decoder.DisallowUnknownFields()
	if err := decoder.Decode(&commands); err != nil {
		return nil, fmt.Errorf("read local commands %s: %w", path, err)
	}
	for name, c := range commands {
		if len(c.Command) == 0 || c.Endpoint == "" {
			return nil, fmt.Errorf("read local commands %s: %q needs command and endpoint", path, name)
		}
		address, err := url.Parse(strings.NewReplacer("${PORT}", "1", "${GPU}", "0").Replace(c.Endpoint))
		if err != nil || !slices.Contains([]string{"http", "https"}, address.Scheme) || address.Host == "" ||
			address.User != nil {
			return nil, fmt.Errorf("read local commands %s: endpoint of %q is no address such as "+
				"http://127.0.0.1:${PORT}", path, name)
		}
	}
	return commands, nil
}

// NewLocal returns the backend, and makes its directory.
func NewLocal(cfg LocalConfig) (*Local, error) {
	cfg.Grace, cfg.Log = cmp.Or(cfg.Grace, time.Minute), cmp.Or(cfg.Log, slog.Default())
	dir, err := filepath.Abs(cfg.Dir)
	if err != nil {
		return nil, fmt.Errorf("directory of local instances: %w", err)
	}
	cfg.Dir = dir
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("make directory of local instances: %w", err)
	}
	return &Local{cfg: cfg, kept: sessionKept, ended: map[string]string{}, seen: map[string]time.Time{}}, nil
}

// Names of environment variables by which processes are found again.
const (
	envInstance = "PENSTOCK_INSTANCE"
	envDir      = "PENSTOCK_INSTANCE_DIR"
)

// envTemplate has the template of the deployment, as JSON, for what differs from one version of a model to the next.
const envTemplate = "PENSTOCK_TEMPLATE"

// inherited is what an instance gets of the leader's environment: paths, language and the settings of devices. The
// rest may be secrets, of the leader's database among them. What else a command needs is in its env.
func inherited() []string {
	return slices.DeleteFunc(os.Environ(), func(variable string) bool {
		name, _, _ := strings.Cut(variable, "=")
		switch name {
		case "PATH", "HOME", "USER", "LANG", "TZ", "TMPDIR", "LD_LIBRARY_PATH":
			return false
		}
		for _, prefix := range []string{"LC_", "CUDA_", "NVIDIA_"} {
			if strings.HasPrefix(name, prefix) {
				return false
			}
		}
		return true
	})
}

// Place implements scale.Placed: processes are found on their machine only, and by the records of one directory. The
// machine is its host name, and the directory has an id of its own.
func (l *Local) Place() (string, error) {
	host, err := os.Hostname()
	if err != nil {
		return "", fmt.Errorf("name of this machine: %w", err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	path := filepath.Join(l.cfg.Dir, "id")
	id, err := os.ReadFile(path) //nolint:gosec // a file of ours
	if errors.Is(err, os.ErrNotExist) {
		id = []byte(rand.Text())
		fresh := path + "." + string(id)
		if err := os.WriteFile(fresh, id, 0o600); err != nil {
			return "", fmt.Errorf("write the id of the directory: %w", err)
		}
		defer os.Remove(fresh)
		// Unlike a rename it replaces nothing: of two leaders that begin at once the first one names the directory.
		if err := os.Link(fresh, path); err != nil && !errors.Is(err, os.ErrExist) {
			return "", fmt.Errorf("write the id of the directory: %w", err)
		}
		id, err = os.ReadFile(path) //nolint:gosec // a file of ours
		if err != nil {
			return "", fmt.Errorf("read the id of the directory: %w", err)
		}
	} else if err != nil {
		return "", fmt.Errorf("read the id of the directory: %w", err)
	}
	return host + " " + string(id), nil
}

// List implements scale.Backend.
func (l *Local) List(ctx context.Context, d scale.BackendTarget) ([]scale.BackendInstance, error) {
	unlock, err := lockDir(ctx, l.cfg.Dir)
	if err != nil {
		return nil, err
	}
	defer unlock()
	records, err := l.records(ctx)
	if err != nil {
		return nil, err
	}
	var found []scale.BackendInstance
	for _, r := range records {
		if r.Deployment != d.Name || r.Model != d.Model {
			continue
		}
		i := scale.BackendInstance{
			Name: r.Name, Endpoint: r.Endpoint, Slots: r.Slots, Began: r.Began, State: scale.InstanceRunning,
			TemplateHash: r.TemplateHash,
		}
		state, all, err := l.processes(ctx, &r)
		if err != nil {
			return nil, err
		}
		switch {
		case state == gone && !r.Stopping.IsZero():
			if err := l.forget(r.Name); err != nil {
				return nil, err
			}
			continue
		case !r.Stopping.IsZero():
			i.State = scale.InstanceEnding
			if time.Since(r.Stopping) > l.cfg.Grace {
				if err := signal(r, all, syscall.SIGKILL); err != nil {
					return nil, err
				}
			}
		case state != alive:
			i.State, i.Message = scale.InstanceFailed, l.howEnded(r.Name)
		}
		if state == doubtful {
			i.Message = fmt.Sprintf("processes of session %d may be its own: end them, or remove its record %s", r.PID,
				l.path(r.Name))
		}
		found = append(found, i)
	}
	return found, nil
}

// Apply implements scale.Backend.
func (l *Local) Apply(ctx context.Context, o scale.Order) error {
	unlock, err := lockDir(ctx, l.cfg.Dir)
	if err != nil {
		return err
	}
	defer unlock()
	records, err := l.records(ctx)
	if err != nil {
		return err
	}
	var errs []error
	live := 0
	devices := map[string]bool{}
	for _, r := range records {
		own := r.Deployment == o.Name && r.Model == o.Model
		state, all, err := l.processes(ctx, &r)
		if err != nil {
			return err
		}
		if state != gone {
			devices[r.Device] = true
		}
		switch {
		case own && slices.Contains(o.Remove, r.Name):
			errs = append(errs, l.stop(r, state, all))
		case own && r.Stopping.IsZero():
			live++ // one that has ended too: it exists until an order removes it
		}
	}
	for ; live < o.Count; live++ {
		if err := l.start(ctx, o.BackendTarget, devices); err != nil {
			errs = append(errs, err)
			break
		}
	}
	return errors.Join(errs...)
}

// StopAll ends all processes of the directory, and waits for them at most as long as they have to end.
func (l *Local) StopAll(ctx context.Context) error {
	unlock, err := lockDir(ctx, l.cfg.Dir)
	if err != nil {
		return err
	}
	defer unlock()
	records, err := l.records(ctx)
	if err != nil {
		return err
	}
	return l.endAll(ctx, records)
}

// killWait is how long the system may take to end processes after SIGKILL.
const killWait = 5 * time.Second

// endAll asks for the end of instances until none is left. One that SIGKILL does not end is an error.
func (l *Local) endAll(ctx context.Context, records []record) error {
	for begin := time.Now(); ; {
		records = slices.Clone(records)
		waited := time.Since(begin)
		var left []string
		for i := range records {
			r := &records[i]
			state, all, err := l.processes(ctx, r)
			if err != nil {
				return err
			}
			if state != gone {
				left = append(left, r.Name)
			}
			if state == gone || r.Stopping.IsZero() {
				err = l.stop(*r, state, all)
				r.Stopping = time.Now()
			} else if waited > l.cfg.Grace {
				err = signal(*r, all, syscall.SIGKILL)
			}
			if err != nil {
				return err
			}
		}
		switch {
		case len(left) == 0:
			return nil
		case waited > l.cfg.Grace+killWait:
			return fmt.Errorf("local instances do not end: %s", strings.Join(left, ", "))
		}
		select {
		case <-ctx.Done():
			return fmt.Errorf("wait for local instances to end: %w", ctx.Err())
		case <-time.After(20 * time.Millisecond):
		}
	}
}

// start begins one instance. Its record is written first.
func (l *Local) start(ctx context.Context, d scale.BackendTarget, devices map[string]bool) error {
	var target struct {
		Command string `json:"command"`
	}
	if err := json.Unmarshal(d.Target, &target); err != nil {
		return fmt.Errorf("target of deployment %q: want {\"command\": \"name\"}: %w", d.Name, err)
	}
	command, known := l.cfg.Commands[target.Command]
	if !known {
		return fmt.Errorf("target of deployment %q: command %q is not configured here: have %s", d.Name, target.Command,
			strings.Join(slices.Sorted(maps.Keys(l.cfg.Commands)), ", "))
	}
	device, err := freeDevice(command.Devices, devices)
	if err != nil {
		return fmt.Errorf("start an instance of deployment %q: %w", d.Name, err)
	}
	port, err := freePort(ctx)
	if err != nil {
		return err
	}
	fill := strings.NewReplacer("${PORT}", strconv.Itoa(port), "${GPU}", device).Replace
	r := record{
		Name: d.Name + "-" + strconv.FormatInt(time.Now().UnixNano(), 36), Deployment: d.Name, Model: d.Model,
		TemplateHash: d.TemplateHash, Endpoint: fill(command.Endpoint), Slots: command.Slots, Device: device,
		Began: time.Now(),
	}
	if err := l.write(r); err != nil {
		return err
	}
	if device != "" {
		devices[device] = true
	}
	return l.spawn(ctx, command, d.Template, fill, r)
}

func (l *Local) spawn(
	ctx context.Context, command LocalCommand, template json.RawMessage, fill func(string) string, r record,
) error {
	log, err := os.OpenFile(filepath.Join(l.cfg.Dir, r.Deployment+".log"), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return fmt.Errorf("open the log of %s: %w", r.Name, err)
	}
	defer log.Close()
	args := make([]string, len(command.Command))
	for i, arg := range command.Command {
		args[i] = fill(arg)
	}
	cmd := exec.Command(args[0], args[1:]...) //nolint:gosec,noctx // configured here; it outlives this program
	cmd.Env = append(inherited(), envInstance+"="+r.Name, envDir+"="+l.cfg.Dir)
	if template != nil {
		cmd.Env = append(cmd.Env, envTemplate+"="+string(template))
	}
	for name, value := range command.Env {
		cmd.Env = append(cmd.Env, name+"="+fill(value))
	}
	cmd.Stdout, cmd.Stderr = log, log
	cmd.SysProcAttr = ownSession()
	if err := cmd.Start(); err != nil {
		l.note(r.Name, err.Error())
		return fmt.Errorf("start %s: %w", r.Name, err)
	}
	l.sees(r.Name)
	// Before anything waits for it: until then it has its entry among the processes, also where it has ended.
	p, found, err := lookUp(context.WithoutCancel(ctx), cmd.Process.Pid)
	go func() { // without it the process would stay a zombie as long as this leader lives
		err := cmd.Wait()
		l.note(r.Name, fmt.Sprintf("ended: %v, see %s", cmp.Or(err, errors.New("exit status 0")), log.Name()))
	}()
	// The record is complete or has no id: what is missing is found by the environment of the process.
	if err != nil || !found {
		return err
	}
	if r.Boot, err = bootID(); err != nil {
		return err
	}
	r.PID, r.Started = p.pid, p.started
	return l.write(r)
}

// stop asks the processes of an instance to end. It is forgotten when none is left.
func (l *Local) stop(r record, state condition, all []running) error {
	if state == gone {
		return l.forget(r.Name)
	}
	if r.Stopping.IsZero() {
		r.Stopping = time.Now()
		if err := l.write(r); err != nil {
			return err
		}
	}
	return signal(r, all, syscall.SIGTERM)
}

func (l *Local) note(name, text string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ended[name] = text
}

// sees notes that an instance has processes; saw says whether it had some a moment ago.
func (l *Local) sees(name string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.seen[name] = time.Now()
}

func (l *Local) saw(name string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	return time.Since(l.seen[name]) < l.kept
}

func (l *Local) howEnded(name string) string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return cmp.Or(l.ended[name], "its process is gone")
}

// freeDevice is a device that no live process has. Without devices there is nothing to choose.
func freeDevice(devices []string, used map[string]bool) (string, error) {
	if len(devices) == 0 {
		return "", nil
	}
	for _, device := range devices {
		if !used[device] {
			return device, nil
		}
	}
	return "", fmt.Errorf("all %d devices are in use: %w", len(devices), scale.ErrNoRoom)
}

// freePort is a port that is free now. Where another program takes it first, the process ends and is replaced.
func freePort(ctx context.Context) (int, error) {
	listener, err := new(net.ListenConfig).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return 0, fmt.Errorf("find a free port: %w", err)
	}
	defer listener.Close()
	address, ok := listener.Addr().(*net.TCPAddr)
	if !ok {
		return 0, fmt.Errorf("find a free port: %v is no address of TCP", listener.Addr())
	}
	return address.Port, nil
}
