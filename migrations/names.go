package migrations

import (
	"fmt"
	"io/fs"
	"path"
	"strconv"
	"strings"
)

// Names returns every known migration in order, without asking a database: AppliedAt is zero.
func Names() ([]Status, error) {
	names, err := fs.Glob(files, "*.sql")
	if err != nil {
		return nil, fmt.Errorf("list migrations: %w", err)
	}
	list := make([]Status, len(names))
	for i, name := range names {
		digits, _, _ := strings.Cut(path.Base(name), "_")
		version, err := strconv.ParseInt(digits, 10, 64)
		if err != nil {
			return nil, fmt.Errorf("read version of migration %q: %w", name, err)
		}
		list[i] = Status{Version: version, Name: name}
	}
	return list, nil
}
