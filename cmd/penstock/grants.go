package main

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/penstock/penstock/migrations"
)

func grantsCommand(a *app) *cobra.Command {
	var prefix, passwords string
	var duties []string
	var apply, replace bool
	c := &cobra.Command{
		Use: "grants", Args: cobra.NoArgs,
		Short: "Print or apply the rights of database roles, one for each program and duty",
		Long: `Print SQL that makes a database role for each duty (leader, node, gateway, operator, push, read) and
gives it exactly the rights of the duty; --apply carries it out. It can be repeated. Run it as the owner of the
schema after the first migration; later migrations keep the rights up to date.

The roles cannot log in unless --passwords names a directory with a file for each that should, named like the duty.
Without it, make login roles that are members of them.

Roles belong to the server: a second installation on it needs a --prefix of its own. The password of a role that can log
in already is replaced only if it has a duty in this database, or with --replace-passwords.`,
	}
	f := c.Flags()
	f.BoolVar(&apply, "apply", false, "carry it out instead of printing it")
	f.StringVar(&prefix, "prefix", "penstock", "what the names of the roles begin with")
	f.StringSliceVar(&duties, "duty", migrations.Duties, "the duties to grant")
	f.StringVar(&passwords, "passwords", "", "directory with a file for each role that may log in, named like its duty")
	f.BoolVar(&replace, "replace-passwords", false, "also those of roles without a duty in this database")
	c.RunE = func(c *cobra.Command, _ []string) error {
		roles, err := rolesOf(prefix, duties, passwords)
		if err != nil {
			return err
		}
		for i := range roles {
			roles[i].ReplacePassword = replace
		}
		db, err := a.database(c.Context())
		if err != nil {
			return err
		}
		if err := migrations.Check(c.Context(), db); err != nil {
			return err
		}
		if !apply {
			script, err := migrations.GrantSQL(c.Context(), db, roles)
			if err != nil {
				return err
			}
			fmt.Fprint(a.out, script)
			return nil
		}
		if err := a.pastPooler(); err != nil {
			return err
		}
		cfg, err := pgx.ParseConfig(a.databaseURL)
		if err != nil {
			return usageError{fmt.Errorf("read database address: %w", err)}
		}
		done, err := migrations.Grant(c.Context(), cfg, roles)
		if err != nil {
			return err
		}
		return printOne(a, done, func(w io.Writer) {
			for _, r := range roles {
				fmt.Fprintf(w, "%s has the rights of %s\n", r.Name, r.Duty)
			}
			fmt.Fprintf(w, "%s changed\n", many(int64(done.Changed), "right", "rights"))
			for _, note := range done.Notes {
				fmt.Fprintln(w, note)
			}
		})
	}
	return c
}

// rolesOf returns the roles of the duties, with the passwords that the directory holds for them.
func rolesOf(prefix string, duties []string, passwords string) ([]migrations.Role, error) {
	if prefix == "" {
		return nil, usagef("--prefix is empty: roles need a name of their own")
	}
	for _, duty := range duties {
		if !slices.Contains(migrations.Duties, duty) {
			return nil, usagef("--duty: there is no duty %q; there are %s", duty, strings.Join(migrations.Duties, ", "))
		}
	}
	roles := slices.DeleteFunc(migrations.Roles(prefix), func(r migrations.Role) bool {
		return !slices.Contains(duties, r.Duty)
	})
	if passwords == "" {
		return roles, nil
	}
	found := false
	for i, role := range roles {
		text, err := os.ReadFile(filepath.Join(passwords, role.Duty)) //nolint:gosec // the operator names the directory
		if os.IsNotExist(err) {
			continue
		} else if err != nil {
			return nil, fmt.Errorf("read password of %s: %w", role.Name, err)
		}
		if roles[i].Password = strings.TrimSpace(string(text)); roles[i].Password == "" {
			return nil, usagef("--passwords: the file %s is empty", role.Duty)
		}
		found = true
	}
	if !found {
		return nil, usagef("--passwords: %s has no file named %s", passwords, strings.Join(duties, " or "))
	}
	return roles, nil
}
