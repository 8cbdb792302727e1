package devpostgres

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/jackc/pgx/v5"
)

// image is the container image. Its version is that of the downloaded binaries.
const image = "postgres:17-alpine"

// container is a Postgres in Docker or Podman, run by their command-line client.
// The client stays attached: when this process ends, so does the client's input, then the container's,
// and the supervisor inside stops the server. --rm then removes the container.
type container struct {
	engine string
	name   string
	hold   *os.File
	log    *os.File
	run    *supervised
}

// findContainer starts a container with the first engine that works; nil, nil if there is none.
func findContainer(ctx context.Context, cfg Config, made maker, tried *attempts) (*Server, error) {
	switch {
	case cfg.NoContainer:
		tried.add("containers", "ruled out by the caller")
		return nil, nil
	case made.major != 0:
		tried.add("containers", "the data directory was made by binaries, and needs them again")
		return nil, nil
	}
	for _, engine := range []string{"docker", "podman"} {
		if err := usableEngine(ctx, cfg, engine); err != nil {
			tried.add(engine, err.Error())
			continue
		}
		return startContainer(ctx, cfg, engine)
	}
	return nil, nil
}

// usableEngine returns an error unless the engine runs and has the image, or may fetch it.
func usableEngine(ctx context.Context, cfg Config, engine string) error {
	if _, err := exec.LookPath(engine); err != nil {
		return errors.New("not on PATH")
	}
	if _, err := runEngine(ctx, engine, "version"); err != nil {
		return err
	}
	if _, err := runEngine(ctx, engine, "image", "inspect", image); err == nil || cfg.AllowDownload {
		return nil
	}
	if cfg.Confirm != nil && cfg.Confirm("There is no Postgres here. Fetch the image "+image+" with "+engine+"?") {
		return nil
	}
	return fmt.Errorf("it has no image %s, and fetching one was not allowed: set PENSTOCK_ALLOW_DOWNLOAD=1", image)
}

// runEngine runs the client with a short command and returns its output, or the last line of its
// error output.
func runEngine(ctx context.Context, engine string, args ...string) (string, error) {
	ctx, cancel := context.WithTimeout(ctx, 10*time.Second)
	defer cancel()
	out, err := exec.CommandContext(ctx, engine, args...).CombinedOutput()
	answer := strings.TrimSpace(string(out))
	if err != nil {
		last := answer[strings.LastIndex(answer, "\n")+1:]
		return "", fmt.Errorf("run %s %s: %w: %s", engine, args[0], err, last)
	}
	return answer, nil
}

func startContainer(ctx context.Context, cfg Config, engine string) (*Server, error) {
	hold, log, password, err := containerFiles(ctx, cfg)
	if err != nil {
		return nil, err
	}
	c := &container{engine: engine, name: "penstock-" + strings.ToLower(rand.Text()[:12]), hold: hold, log: log}
	c.run, err = supervise(c.command(cfg, password), hold, log)
	if err != nil {
		return nil, errors.Join(err, hold.Close(), log.Close())
	}
	server, err := c.open(ctx, password)
	if err != nil {
		cleanup, cancel := context.WithTimeout(context.WithoutCancel(ctx), startTimeout)
		defer cancel()
		return nil, errors.Join(err, c.stop(cleanup))
	}
	return server, nil
}

// containerFiles opens what a container has on this side: for a kept one its directory, for others files
// without a name.
func containerFiles(ctx context.Context, cfg Config) (hold, log *os.File, password string, err error) {
	if cfg.DataDir == "" {
		if hold, err = namelessFile(); err != nil {
			return nil, nil, "", err
		}
		if log, err = namelessFile(); err != nil {
			return nil, nil, "", errors.Join(err, hold.Close())
		}
		return hold, log, rand.Text(), nil
	}
	dir, err := keptDirectory(ctx, cfg, account{})
	if err != nil {
		return nil, nil, "", err
	}
	password, err = dir.password()
	if err == nil {
		err = os.MkdirAll(filepath.Join(dir.path, containerData), 0o755) // Podman, unlike Docker, does not create it
	}
	if err == nil {
		log, err = os.Create(dir.log())
	}
	if err != nil {
		return nil, nil, "", errors.Join(fmt.Errorf("open data directory: %w", err), dir.hold.Close())
	}
	return dir.hold, log, password, nil
}

func namelessFile() (*os.File, error) {
	f, err := os.CreateTemp("", "penstock-pg-")
	if err != nil {
		return nil, fmt.Errorf("open temporary file: %w", err)
	}
	if err := os.Remove(f.Name()); err != nil {
		return nil, errors.Join(fmt.Errorf("open temporary file: %w", err), f.Close())
	}
	return f, nil
}

// command is the client's command line. The password goes by the environment, where other users do not see it.
func (c *container) command(cfg Config, password string) *exec.Cmd {
	port := "127.0.0.1::5432"
	if cfg.Port != 0 {
		port = "127.0.0.1:" + strconv.Itoa(cfg.Port) + ":5432"
	}
	args := []string{
		"run", "--rm", "--interactive", "--name", c.name, "--publish", port, "--shm-size", "256m",
		"--env", "POSTGRES_PASSWORD", "--env", "POSTGRES_INITDB_ARGS=--no-locale --encoding=UTF8",
	}
	if cfg.DataDir != "" {
		args = append(args, "--volume", filepath.Join(filepath.Dir(c.hold.Name()), containerData)+
			":/var/lib/postgresql/data")
	}
	args = append(args, "--entrypoint", "/bin/sh", image, "-c", supervisorScript, "penstock-postgres", string(Fast),
		"docker-entrypoint.sh", "postgres")
	settings := cfg.settings()
	for _, name := range slices.Sorted(maps.Keys(settings)) {
		args = append(args, "-c", name+"="+settings[name])
	}
	cmd := exec.Command(c.engine, args...) //nolint:noctx // its life is the pipe's
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	cmd.Env = append(os.Environ(), "POSTGRES_PASSWORD="+password)
	return cmd
}

// open waits until the server in the container accepts connections. The caller bounds the time,
// that for fetching the image included.
func (c *container) open(ctx context.Context, password string) (*Server, error) {
	port, err := c.port(ctx)
	if err != nil {
		return nil, err
	}
	uri := tcpURI(password, port)
	config, err := pgx.ParseConfig(uri)
	if err != nil {
		return nil, fmt.Errorf("build DSN: %w", err)
	}
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	err = c.await(ctx, func() error { return ping(ctx, config) })
	if err != nil {
		return nil, err
	}
	return &Server{source: image + " in " + c.engine, config: config, uri: uri, container: c}, nil
}

// port asks the engine where on this machine the server's port is.
func (c *container) port(ctx context.Context) (int, error) {
	var port int
	err := c.await(ctx, func() error {
		answer, err := runEngine(ctx, c.engine, "port", c.name, "5432/tcp")
		if err != nil {
			return err
		}
		first, _, _ := strings.Cut(answer, "\n")
		port, err = strconv.Atoi(first[strings.LastIndex(first, ":")+1:])
		return err
	})
	return port, err
}

// await repeats try until it succeeds, the container ends or the context does.
func (c *container) await(ctx context.Context, try func() error) error {
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for {
		err := try()
		if err == nil {
			return nil
		}
		select {
		case <-tick.C:
		case <-c.run.done:
			return fmt.Errorf("start %s in %s: it ended (%w): %s", image, c.engine, c.run.err, c.logTail())
		case <-ctx.Done():
			return fmt.Errorf("start %s in %s: %w: %w: %s", image, c.engine, ctx.Err(), err, c.logTail())
		}
	}
}

func (c *container) logTail() string {
	info, err := c.log.Stat()
	if err != nil {
		return err.Error()
	}
	text := make([]byte, min(info.Size(), 2000))
	n, _ := c.log.ReadAt(text, info.Size()-int64(len(text)))
	return strings.TrimSpace(string(text[:n]))
}

// stop ends the container; one that does not go by itself is removed by force.
func (c *container) stop(ctx context.Context) error {
	err := c.run.stop(ctx)
	if err != nil {
		_, removeErr := runEngine(context.WithoutCancel(ctx), c.engine, "rm", "--force", c.name)
		err = errors.Join(err, removeErr)
	}
	return errors.Join(err, c.hold.Close(), c.log.Close())
}
