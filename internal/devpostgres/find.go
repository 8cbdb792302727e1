package devpostgres

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"iter"
	"os"
	"path/filepath"
	"strconv"
	"strings"
)

// errUnfit marks an error of the source, so that the next one is tried.
var errUnfit = errors.New("these binaries do not work")

// find starts a server from the first source that works.
// An error that is not the source's (a data directory in use, say) ends the search.
func find(ctx context.Context, cfg Config, at []place) (*Server, error) {
	tried := attempts{{Source: "given DSN", Reason: "none was given"}}
	made, err := keptBy(cfg.DataDir)
	if err != nil {
		return nil, err
	}
	if cfg.Major != 0 && made != 0 && cfg.Major != made {
		return nil, fmt.Errorf("version %d is asked for, and %s was made by version %d", cfg.Major, cfg.DataDir, made)
	}
	server, err := findBinaries(ctx, cfg, at, cmp.Or(made, cfg.Major), &tried)
	if server != nil || err != nil {
		return server, err
	}
	if ctx.Err() != nil {
		return nil, fmt.Errorf("find a Postgres: %w", ctx.Err())
	}
	return nil, &NotFoundError{Attempts: tried}
}

// findBinaries starts a private cluster with the first binaries that work; nil, nil if there are none.
func findBinaries(ctx context.Context, cfg Config, at []place, major int, tried *attempts) (*Server, error) {
	acct, err := serverAccount()
	if err != nil {
		tried.add("binaries", err.Error())
		return nil, nil
	}
	for bin := range usable(ctx, cfg, acct, major, at, tried) {
		server, err := startCluster(ctx, cfg, acct, bin)
		if !errors.Is(err, errUnfit) {
			return server, err
		}
		tried.add(bin.String(), err.Error())
	}
	return nil, nil
}

// usable are the binaries on this machine and then the downloaded ones, which are not fetched before they are
// asked for.
func usable(ctx context.Context, cfg Config, acct account, wantMajor int, at []place,
	tried *attempts,
) iter.Seq[binaries] {
	return func(yield func(binaries) bool) {
		for bin := range installed(ctx, acct, wantMajor, at, tried) {
			if !yield(bin) {
				return
			}
		}
		if bin, ok := downloaded(ctx, cfg, acct, wantMajor, tried); ok {
			yield(bin)
		}
	}
}

// keptBy is the version that made the cluster in a kept directory, 0 if there is none: only its binaries can run it.
func keptBy(dir string) (major int, err error) {
	if dir == "" {
		return 0, nil
	}
	text, err := os.ReadFile(filepath.Join(dir, clusterData, "PG_VERSION"))
	if errors.Is(err, fs.ErrNotExist) {
		return 0, nil
	}
	if err == nil {
		major, err = strconv.Atoi(strings.TrimSpace(string(text)))
	}
	if err != nil {
		return 0, fmt.Errorf("read version of data directory: %w", err)
	}
	return major, nil
}
