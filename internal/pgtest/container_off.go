//go:build nocontainer

package pgtest

import (
	"context"
	"errors"
)

// startContainer is for machines without a Postgres. The client of Docker is a fifth of a test
// binary, and takes half of the time of its link.
func startContainer(context.Context, map[string]string) (engine, error) {
	return nil, errors.New("this test binary was built with -tags=nocontainer")
}
