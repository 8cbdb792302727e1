// Package container runs a Postgres for tests in Docker, by testcontainers-go, on machines that have no binaries of it.
// It is a package of its own so that linters read it under the tag nocontainer too, with which internal/pgtest does not
// import it.
package container

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/url"
	"slices"
	"time"

	_ "github.com/jackc/pgx/v5/stdlib" // the driver of the wait strategy
	"github.com/moby/moby/api/types/container"
	"github.com/moby/moby/api/types/network"
	"github.com/moby/moby/client"
	"github.com/testcontainers/testcontainers-go"
	"github.com/testcontainers/testcontainers-go/wait"

	"github.com/penstock/penstock/internal/devpostgres"
)

// image is the server in a container, of the version that devpostgres would fetch.
const image = "postgres:17-alpine"

// Server is a Postgres in Docker. testcontainers-go's reaper removes it when this process is gone.
type Server struct {
	container testcontainers.Container
	dsn       string
}

// Start starts a container on a port of this machine that it keeps over restarts.
// The port is open on every interface, since tests that run in a container themselves do not reach the loopback one;
// hence the random password.
func Start(ctx context.Context, settings map[string]string) (*Server, error) {
	port, err := freePort(ctx)
	if err != nil {
		return nil, fmt.Errorf("find a port for %s: %w", image, err)
	}
	const inside = "5432/tcp"
	password := rand.Text()
	args := []string{"postgres"}
	for _, name := range slices.Sorted(maps.Keys(settings)) {
		args = append(args, "-c", name+"="+settings[name])
	}
	ready := wait.ForSQL(inside, "pgx", func(host string, port network.Port) string {
		return dsnOf(password, host, port.Port())
	}).WithStartupTimeout(time.Minute)
	c, err := testcontainers.Run(ctx, image,
		testcontainers.WithEnv(map[string]string{
			"POSTGRES_PASSWORD":    password,
			"POSTGRES_INITDB_ARGS": "--no-locale --encoding=UTF8",
		}),
		testcontainers.WithExposedPorts(inside),
		testcontainers.WithCmd(args...),
		testcontainers.WithWaitStrategy(ready),
		testcontainers.WithHostConfigModifier(func(host *container.HostConfig) {
			host.PortBindings = network.PortMap{
				network.MustParsePort(inside): {{HostPort: port}},
			}
		}))
	if err != nil {
		err = fmt.Errorf("start %s: %w", image, err)
		if c != nil {
			err = errors.Join(err, c.Terminate(context.WithoutCancel(ctx)))
		}
		return nil, err
	}
	host, err := c.Host(ctx)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("find address of %s: %w", image, err),
			c.Terminate(context.WithoutCancel(ctx)))
	}
	return &Server{container: c, dsn: dsnOf(password, host, port)}, nil
}

func dsnOf(password, host, port string) string {
	u := url.URL{
		Scheme: "postgres", User: url.UserPassword("postgres", password),
		Host: net.JoinHostPort(host, port), Path: "/postgres", RawQuery: "sslmode=disable",
	}
	return u.String()
}

// ConnString is the DSN of the database postgres, with the superuser and its password.
func (s *Server) ConnString() string { return s.dsn }

// Stop ends the container and removes it with its data.
func (s *Server) Stop(ctx context.Context) error { return s.container.Terminate(ctx) }

// Halt signals the server, which is the container's first process, and waits until the container has ended.
func (s *Server) Halt(ctx context.Context, sig devpostgres.Signal) error {
	docker, err := testcontainers.NewDockerClientWithOpts(ctx)
	if err != nil {
		return fmt.Errorf("connect to Docker: %w", err)
	}
	defer docker.Close()
	id := s.container.GetContainerID()
	if _, err := docker.ContainerKill(ctx, id, client.ContainerKillOptions{Signal: "SIG" + string(sig)}); err != nil {
		return fmt.Errorf("signal container: %w", err)
	}
	ended := docker.ContainerWait(ctx, id, client.ContainerWaitOptions{Condition: container.WaitConditionNotRunning})
	select {
	case err := <-ended.Error:
		return fmt.Errorf("wait for container: %w", err)
	case <-ended.Result:
		return nil
	}
}

// Resume starts the container again and waits until the server accepts connections.
func (s *Server) Resume(ctx context.Context) error { return s.container.Start(ctx) }

func freePort(ctx context.Context) (string, error) {
	listener, err := (&net.ListenConfig{}).Listen(ctx, "tcp", "127.0.0.1:0")
	if err != nil {
		return "", err
	}
	defer listener.Close()
	_, port, err := net.SplitHostPort(listener.Addr().String())
	return port, err
}
