package devpostgres

import (
	"context"
	"fmt"
	"iter"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// binaries is a directory with the programs postgres and initdb in it.
type binaries struct {
	dir     string
	version string // "15.18"
}

func (b binaries) String() string { return fmt.Sprintf("Postgres %s in %s", b.version, b.dir) }

func (b binaries) program(name string) string { return filepath.Join(b.dir, name) }

// place is a usual location of an installation: a pattern of directories and its name.
type place struct{ name, pattern string }

// places lists the usual homes of Postgres binaries, most specific first.
func places() []place {
	return []place{
		{"Debian packages", "/usr/lib/postgresql/*/bin"},
		{"RPM packages", "/usr/pgsql-*/bin"},
		{"Homebrew", "/opt/homebrew/opt/postgresql*/bin"},
		{"Homebrew", "/usr/local/opt/postgresql*/bin"},
		{"Homebrew", "/home/linuxbrew/.linuxbrew/opt/postgresql*/bin"},
		{"Postgres.app", "/Applications/Postgres.app/Contents/Versions/*/bin"},
	}
}

// installed searches binaries on this machine: first on PATH, then in the usual places, the newest
// version first. wantMajor, if not 0, is the only accepted version. Every place without usable
// binaries is added to tried.
func installed(ctx context.Context, acct account, wantMajor int, at []place, tried *attempts) iter.Seq[binaries] {
	return func(yield func(binaries) bool) {
		if path, err := exec.LookPath("postgres"); err != nil {
			tried.add("binaries on PATH", "no postgres there")
		} else if b, err := inspectPath(ctx, acct, path, wantMajor); err != nil {
			tried.add("binaries on PATH", err.Error())
		} else if !yield(b) {
			return
		}
		for _, p := range at {
			for b := range installedAt(ctx, acct, wantMajor, p, tried) {
				if !yield(b) {
					return
				}
			}
		}
	}
}

func installedAt(ctx context.Context, acct account, wantMajor int, p place, tried *attempts) iter.Seq[binaries] {
	return func(yield func(binaries) bool) {
		found, err := filepath.Glob(p.pattern)
		if err != nil || len(found) == 0 {
			tried.add(p.name, p.pattern+" does not exist")
			return
		}
		slices.SortFunc(found, func(a, b string) int { return numberIn(b) - numberIn(a) })
		for _, dir := range found {
			if b, err := inspect(ctx, acct, dir, wantMajor); err != nil {
				tried.add(p.name, err.Error())
			} else if !yield(b) {
				return
			}
		}
	}
}

var number = regexp.MustCompile(`\d+`)

// numberIn is the last number in path, its version: 17 in /usr/lib/postgresql/17/bin, 0 if there is none.
func numberIn(path string) int {
	all := number.FindAllString(path, -1)
	if len(all) == 0 {
		return 0
	}
	n, _ := strconv.Atoi(all[len(all)-1])
	return n
}

// inspectPath follows links: initdb is beside the real postgres, not beside a link to it.
func inspectPath(ctx context.Context, acct account, postgres string, wantMajor int) (binaries, error) {
	resolved, err := filepath.EvalSymlinks(postgres)
	if err != nil {
		return binaries{}, err
	}
	resolved, err = filepath.Abs(resolved)
	if err != nil {
		return binaries{}, err
	}
	return inspect(ctx, acct, filepath.Dir(resolved), wantMajor)
}

var versionLine = regexp.MustCompile(`\(PostgreSQL\) ((\d+)\S*)`)

// inspect runs the postgres in dir for its version, as the account that would run the server.
func inspect(ctx context.Context, acct account, dir string, wantMajor int) (binaries, error) {
	for _, name := range []string{"postgres", "initdb"} {
		if _, err := os.Stat(filepath.Join(dir, name)); err != nil {
			return binaries{}, fmt.Errorf("%s has no %s", dir, name)
		}
	}
	cmd := exec.CommandContext(ctx, filepath.Join(dir, "postgres"), "--version")
	cmd.SysProcAttr = acct.attributes()
	cmd.Dir = "/"
	out, err := cmd.CombinedOutput()
	if err != nil {
		return binaries{}, fmt.Errorf("run %s: %w: %s", cmd.Path, err, strings.TrimSpace(string(out)))
	}
	match := versionLine.FindStringSubmatch(string(out))
	if match == nil {
		return binaries{}, fmt.Errorf("%s calls itself %q", cmd.Path, strings.TrimSpace(string(out)))
	}
	major, err := strconv.Atoi(match[2])
	switch {
	case err != nil:
		return binaries{}, fmt.Errorf("%s calls itself %q", cmd.Path, match[0])
	case wantMajor != 0 && major != wantMajor:
		return binaries{}, fmt.Errorf("%s is version %s, and version %d is needed", dir, match[1], wantMajor)
	case major < minMajor:
		return binaries{}, fmt.Errorf("%s is version %s, older than %d", dir, match[1], minMajor)
	}
	return binaries{dir: dir, version: match[1]}, nil
}
