//go:build !nocontainer

package pgtest

import (
	"context"

	"github.com/penstock/penstock/internal/pgtest/container"
)

func startContainer(ctx context.Context, settings map[string]string) (engine, error) {
	server, err := container.Start(ctx, settings)
	if err != nil {
		return nil, err
	}
	return server, nil
}
