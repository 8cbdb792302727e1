package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os/exec"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"

	"github.com/jackc/pgx/v5"
)

// errNoDumper says that this machine has no pg_dump of the server's major version.
// Another version's pg_dump words the same schema differently.
var errNoDumper = errors.New("no pg_dump of this version")

// dump returns the schema penstock of the database behind dsn as SQL, the same text for the same schema.
func dump(ctx context.Context, dsn string) (string, error) {
	major, err := serverMajor(ctx, dsn)
	if err != nil {
		return "", err
	}
	program, err := findDumper(ctx, major)
	if err != nil {
		return "", err
	}
	cmd := exec.CommandContext(ctx, program, "--schema-only", "--schema=penstock", "--no-owner", "--dbname="+dsn)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return "", fmt.Errorf("run %s: %w: %s", program, err, strings.TrimSpace(stderr.String()))
	}
	return header(major) + normalise(string(out)), nil
}

func header(major int) string {
	return fmt.Sprintf("-- What the migrations make. Written by `make schema` with pg_dump %d; nothing applies this file.\n\n", major)
}

// normalise removes what differs between two dumps of one schema:
// minor versions, the random tokens of \restrict, and a setting that older servers do not know.
func normalise(out string) string {
	var kept []string
	for line := range strings.Lines(out) {
		line = strings.TrimRight(line, " \n")
		switch {
		case strings.HasPrefix(line, `\restrict `), strings.HasPrefix(line, `\unrestrict `):
		case strings.HasPrefix(line, "-- Dumped "):
		case strings.HasPrefix(line, "-- PostgreSQL database dump"):
		case strings.HasPrefix(line, "SET transaction_timeout"):
		case line == "--": // above and below each object's name
		case line == "" && (len(kept) == 0 || kept[len(kept)-1] == ""):
		default:
			kept = append(kept, line)
		}
	}
	return strings.TrimRight(strings.Join(kept, "\n"), "\n") + "\n"
}

func serverMajor(ctx context.Context, dsn string) (int, error) {
	conn, err := pgx.Connect(ctx, dsn)
	if err != nil {
		return 0, fmt.Errorf("connect: %w", err)
	}
	defer conn.Close(ctx)
	var number int
	if err := conn.QueryRow(ctx, "SELECT current_setting('server_version_num')::int").Scan(&number); err != nil {
		return 0, fmt.Errorf("read server version: %w", err)
	}
	return number / 10_000, nil
}

var dumperVersion = regexp.MustCompile(`\(PostgreSQL\) (\d+)`)

// findDumper returns the path of a pg_dump of that major version.
func findDumper(ctx context.Context, major int) (string, error) {
	for _, path := range []string{
		"pg_dump",
		fmt.Sprintf("/usr/lib/postgresql/%d/bin/pg_dump", major),
		fmt.Sprintf("/usr/pgsql-%d/bin/pg_dump", major),
		fmt.Sprintf("/opt/homebrew/opt/postgresql@%d/bin/pg_dump", major),
		fmt.Sprintf("/usr/local/opt/postgresql@%d/bin/pg_dump", major),
		fmt.Sprintf("/Applications/Postgres.app/Contents/Versions/%d/bin/pg_dump", major),
	} {
		out, err := exec.CommandContext(ctx, path, "--version").Output()
		if err != nil {
			continue
		}
		found := dumperVersion.FindSubmatch(out)
		if found != nil && string(found[1]) == strconv.Itoa(major) {
			return filepath.Clean(path), nil
		}
	}
	return "", fmt.Errorf("find pg_dump %d: %w on PATH or where packages put it; install Postgres %d's client programs "+
		"(Debian: postgresql-client-%d) and try again", major, errNoDumper, major, major)
}
