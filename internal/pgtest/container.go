package pgtest

import (
	"context"
	"fmt"

	"github.com/testcontainers/testcontainers-go"
	"github.com/testcontainers/testcontainers-go/modules/postgres"
)

// image is the server in a container, of the version that Penstock is developed on.
const image = "postgres:17-alpine"

// startContainer runs a Postgres in Docker. testcontainers-go's reaper removes it when this process is gone.
func startContainer(ctx context.Context) (dsn string, err error) {
	c, err := postgres.Run(ctx, image, postgres.WithPassword("postgres"), postgres.BasicWaitStrategies(),
		testcontainers.WithCmd("postgres", "-c", "fsync=off", "-c", "full_page_writes=off", "-c", "max_connections=300"))
	if err != nil {
		return "", fmt.Errorf("start %s by testcontainers-go: %w", image, err)
	}
	return c.ConnectionString(ctx, "sslmode=disable")
}
