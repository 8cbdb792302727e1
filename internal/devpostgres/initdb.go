package devpostgres

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
)

// superuser owns a private cluster.
const superuser = "postgres"

// initialise creates the cluster's data unless it is there.
// It works in a directory of another name first, so that a kill half-way leaves no half-made cluster behind.
func initialise(ctx context.Context, cfg Config, acct account, bin binaries, dir *directory) error {
	if _, err := os.Stat(filepath.Join(dir.data(), "PG_VERSION")); err == nil {
		return nil
	} else if !errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("open data directory: %w", err)
	}
	work, err := os.MkdirTemp(dir.path, "unfinished-")
	if err != nil {
		return fmt.Errorf("create data directory: %w", err)
	}
	err = acct.own(work)
	if err == nil {
		err = fill(ctx, cfg, acct, bin, dir, work)
	}
	if err == nil {
		err = os.Rename(work, dir.data())
	}
	if err != nil {
		return errors.Join(fmt.Errorf("create cluster: %w", err), os.RemoveAll(work))
	}
	return nil
}

// initdb fills the empty directory work, and adds what belongs to every cluster of this package.
func initdb(ctx context.Context, cfg Config, acct account, bin binaries, dir *directory, work string) error {
	args := append([]string{"-D", work}, initdbArgs(cfg.Fast || !dir.kept())...)
	cmd := exec.CommandContext(ctx, bin.program("initdb"), args...)
	cmd.ExtraFiles = []*os.File{dir.hold}
	cmd.SysProcAttr = acct.attributes()
	cmd.Dir = "/"
	cmd.Env = serverEnvironment()
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%w: run initdb: %w: %s", errUnfit, err, strings.TrimSpace(string(out)))
	}
	conf, err := os.OpenFile(filepath.Join(work, "postgresql.conf"), os.O_APPEND|os.O_WRONLY, 0)
	if err != nil {
		return err
	}
	_, err = conf.WriteString("\ninclude 'penstock.conf'\n")
	if err := errors.Join(err, conf.Close()); err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(work, "pg_hba.conf"), []byte(accessRules), 0o600)
}

// initdbArgs are the arguments besides the directory. Bytewise collation makes the cluster the same on every system.
func initdbArgs(unsynced bool) []string {
	args := []string{"-U", superuser, "--auth=trust", "--encoding=UTF8", "--no-locale", "--no-instructions"}
	if unsynced {
		args = append(args, "--no-sync")
	}
	return args
}

// accessRules: the socket is in a directory that only the owner may enter; TCP is open to every local user.
const accessRules = `local all all trust
local replication all trust
host all all 127.0.0.1/32 scram-sha-256
host all all ::1/128 scram-sha-256
`

// writeSettings writes the settings of this start. ALTER SYSTEM wins over them.
func writeSettings(cfg Config, acct account, data, socketDir string) error {
	settings := cfg.settings()
	settings["unix_socket_directories"] = socketDir
	settings["unix_socket_permissions"] = "0700"
	settings["listen_addresses"] = ""
	settings["port"] = strconv.Itoa(cfg.port())
	if cfg.Port != 0 {
		settings["listen_addresses"] = "127.0.0.1"
	}
	var b strings.Builder
	b.WriteString("# written at each start; use ALTER SYSTEM for settings of your own\n")
	for _, name := range slices.Sorted(maps.Keys(settings)) {
		fmt.Fprintf(&b, "%s = '%s'\n", name, strings.ReplaceAll(settings[name], "'", "''"))
	}
	path := filepath.Join(data, "penstock.conf")
	if err := os.WriteFile(path, []byte(b.String()), 0o600); err != nil {
		return fmt.Errorf("write settings: %w", err)
	}
	if err := acct.own(path); err != nil {
		return fmt.Errorf("write settings: %w", err)
	}
	return nil
}
