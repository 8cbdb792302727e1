package devpostgres

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// find starts a server from the first source that works.
// A source that exists but does not start a server ends the search: its error is what there is to mend.
func find(ctx context.Context, cfg Config, acct account, at []place) (*Server, error) {
	tried := attempts{{Source: "given DSN", Reason: "none was given"}}
	major, err := keptMajor(cfg.DataDir)
	if err != nil {
		return nil, err
	}
	if bin, ok := installed(ctx, acct, major, at, &tried); ok {
		return startCluster(ctx, cfg, acct, bin)
	}
	return nil, &NotFoundError{Attempts: tried}
}

// keptMajor is the version that made the cluster in a kept directory, 0 if there is none: only the same version can run it.
func keptMajor(dir string) (int, error) {
	if dir == "" {
		return 0, nil
	}
	text, err := os.ReadFile(filepath.Join(dir, "pgdata", "PG_VERSION"))
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, fmt.Errorf("read version of data directory: %w", err)
	}
	major, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		return 0, fmt.Errorf("read version of data directory: %w", err)
	}
	return major, nil
}
