package pgtest

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"strconv"

	"github.com/penstock/penstock/internal/devpostgres"
)

// engine is a runner of Postgres for tests: a private cluster, or a container if there are no
// binaries.
type engine interface {
	ConnString() string
	Halt(ctx context.Context, sig devpostgres.Signal) error
	Resume(ctx context.Context) error
	Stop(ctx context.Context) error
}

// startShared gives the test binary its server: the one that PENSTOCK_TEST_DATABASE_URL names, or
// an own one. It is not stopped explicitly: it ends with this process.
func startShared(ctx context.Context) (engine, error) {
	if dsn := os.Getenv("PENSTOCK_TEST_DATABASE_URL"); dsn != "" {
		return devpostgres.Start(ctx, devpostgres.Config{DSN: dsn})
	}
	return startOwn(ctx, nil)
}

// startOwn starts a private cluster or, if there are no binaries, a container. PENSTOCK_TEST_POSTGRES names the version
// that the tests are about: 15, 16, ...
func startOwn(ctx context.Context, settings map[string]string) (engine, error) {
	contents, err := migrated()
	if err != nil {
		return nil, err
	}
	cfg := devpostgres.Config{
		Fast: true, Contents: contents, Settings: map[string]string{"max_connections": "300"},
	}
	maps.Copy(cfg.Settings, settings)
	if name := os.Getenv("PENSTOCK_TEST_POSTGRES"); name != "" {
		major, err := strconv.Atoi(name)
		if err != nil {
			return nil, fmt.Errorf("PENSTOCK_TEST_POSTGRES is %q, want a version of Postgres as 17", name)
		}
		cfg.Major = major
	}
	server, err := devpostgres.Start(ctx, cfg)
	if err == nil {
		return server, nil
	}
	var missing *devpostgres.NotFoundError
	if !errors.As(err, &missing) || cfg.Major != 0 {
		return nil, err
	}
	return instead(ctx, cfg, missing)
}

// migrated has the template written once for all test binaries, instead of once for each. It returns nil where the key
// would not tell templates apart.
func migrated() (*devpostgres.Contents, error) {
	key, whole, err := templateKey()
	if err != nil || !whole {
		return nil, err
	}
	return &devpostgres.Contents{
		Key: key,
		Write: func(ctx context.Context, server *devpostgres.Server) error {
			b, err := newBackend(ctx, server)
			if err != nil {
				return err
			}
			b.close(ctx)
			return nil
		},
	}, nil
}

// instead starts a container; where that does not work either, the error says so beside all else that was tried.
func instead(ctx context.Context, cfg devpostgres.Config, missing *devpostgres.NotFoundError) (engine, error) {
	settings := map[string]string{"fsync": "off", "full_page_writes": "off"}
	maps.Copy(settings, cfg.Settings)
	c, err := startContainer(ctx, settings)
	if err != nil {
		missing.Attempts = append(missing.Attempts,
			devpostgres.Attempt{Source: "container by testcontainers-go", Reason: err.Error()})
		return nil, missing
	}
	return c, nil
}
