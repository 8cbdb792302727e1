package main

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"
	"github.com/spf13/cobra"

	"github.com/penstock/penstock/migrations"
	"github.com/penstock/penstock/pkg/doctor"
)

func migrateCommand(a *app) *cobra.Command {
	return noun("migrate", "The schema: apply, list, print and verify migrations and functions", migrateUp(a),
		migrateStatus(a), migrateSQL(a), migrateVerify(a))
}

// of returns the migrations in one state.
func of(all []migrations.Status, state string) []migrations.Status {
	return slices.DeleteFunc(slices.Clone(all), func(m migrations.Status) bool { return m.State != state })
}

func migrationColumns() []column[migrations.Status] {
	return []column[migrations.Status]{
		{title: "VERSION", right: true, text: func(m migrations.Status) string {
			if m.Name == migrations.FunctionsName {
				return "-"
			}
			return fmt.Sprint(m.Version)
		}},
		{title: "NAME", text: func(m migrations.Status) string { return cmp.Or(m.Name, "-") }},
		{title: "STATE", text: func(m migrations.Status) string { return m.State }},
		{title: "APPLIED", text: func(m migrations.Status) string { return cmp.Or(stamp(m.AppliedAt), "-") }},
	}
}

func migrateStatus(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "status", Args: cobra.NoArgs,
		Short: "Migrations: applied, pending, or unknown to this program",
	}
	c.RunE = func(c *cobra.Command, _ []string) error {
		all, err := a.migrations(c.Context())
		if err != nil {
			return err
		}
		return printList(a, migrationColumns(), all)
	}
	return c
}

// migrations lists the migrations of the database, or those that the server knows.
func (a *app) migrations(ctx context.Context) ([]migrations.Status, error) {
	if a.server != "" {
		api, err := a.connect(ctx)
		if err != nil {
			return nil, err
		}
		return unpaged[migrations.Status](ctx, api, "/v1/migrations", pageMax)
	}
	db, err := a.database(ctx)
	if err != nil {
		return nil, err
	}
	return migrations.List(ctx, db)
}

// pastPooler refuses what takes a lock that belongs to a session: a pooler gives that session to other programs.
func (a *app) pastPooler() error {
	if a.pooled {
		return usagef("migrations and grants go past a pooler: give the address of Postgres itself, without " +
			"--database-pooled")
	}
	return nil
}

func migrateUp(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "up", Short: "Apply pending migrations and functions; safe to run twice at once", Args: cobra.NoArgs,
		Long: "Apply what is pending. Migrations are short-locking, but for those that the changelog names, and the " +
			"programs of the\nversion before run on the new schema: migrate first, then roll out. Two calls at once " +
			"are safe, the second\nwaits for the first.",
	}
	var dry, yes bool
	c.Flags().BoolVarP(&yes, "yes", "y", false,
		"do not ask; nothing is asked here, scripts may give it as to other commands")
	c.Flags().BoolVar(&dry, "dry-run", false, "list what would be applied")
	c.RunE = func(c *cobra.Command, _ []string) error {
		ctx := c.Context()
		db, err := a.database(ctx)
		if err != nil {
			return err
		}
		all, err := migrations.List(ctx, db)
		if err != nil {
			return err
		}
		pending := of(all, migrations.Pending)
		if dry {
			return printList(a, migrationColumns(), pending)
		}
		if err := a.pastPooler(); err != nil {
			return err
		}
		// A connection as migrations want it, without the settings of a pool for keyed look-ups.
		cfg, err := pgx.ParseConfig(a.databaseURL)
		if err != nil {
			return usageError{fmt.Errorf("read database address: %w", err)}
		}
		done, err := migrations.Up(ctx, cfg)
		if err != nil {
			return err
		}
		return printOne(a, done, func(w io.Writer) {
			for _, note := range done.Notes {
				fmt.Fprintln(w, note)
			}
			if done.Applied == 0 || len(pending) == 0 {
				fmt.Fprintln(w, "nothing is pending")
				return
			}
			fmt.Fprintf(w, "applied %d, up to %s\n", done.Applied, pending[len(pending)-1].Name)
		})
	}
	return c
}

func migrateSQL(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "sql [NAME...]", Short: "Print migrations and functions as SQL, all by default, for use with " +
			"other migration tools",
		ValidArgsFunction: func(*cobra.Command, []string, string) ([]cobra.Completion, cobra.ShellCompDirective) {
			known, err := migrations.Names()
			var names []string
			for _, m := range known {
				names = append(names, m.Name)
			}
			if err != nil {
				return nil, cobra.ShellCompDirectiveError
			}
			return append(names, migrations.FunctionsName), cobra.ShellCompDirectiveNoFileComp
		},
	}
	c.RunE = func(_ *cobra.Command, args []string) error {
		known, err := migrations.Names()
		if err != nil {
			return err
		}
		known = append(known, migrations.Status{Name: migrations.FunctionsName})
		for _, name := range args {
			if !slices.ContainsFunc(known, func(m migrations.Status) bool { return m.Name == name }) {
				return usagef("there is no migration %q; penstock migrate status lists them", name)
			}
		}
		for _, m := range known {
			if len(args) > 0 && !slices.Contains(args, m.Name) {
				continue
			}
			text, err := migrations.SQL(m.Name)
			if err != nil {
				return err
			}
			fmt.Fprintf(a.out, "-- %s\n%s\n", m.Name, strings.TrimRight(text, "\n"))
		}
		return nil
	}
	return c
}

func migrateVerify(a *app) *cobra.Command {
	c := &cobra.Command{
		Use: "verify", Short: "Compare the schema with what was applied; exit code 10 if something is pending, 20 " +
			"if it has drifted", Args: cobra.NoArgs,
		Long: "Compare every table, column, constraint, index, view, function, trigger, type and sequence of the " +
			"schema with what was there when\n" +
			"migrations and functions were applied last, and say whether indexes are valid and each queue has its " +
			"table. Rights and added\n" +
			"indexes are not compared.",
	}
	c.RunE = func(c *cobra.Command, _ []string) error {
		db, err := a.database(c.Context())
		if err != nil {
			return err
		}
		f, err := doctor.Schema(c.Context(), db)
		if err != nil {
			return err
		}
		f.Check = "schema"
		if err := printOne(a, f, func(w io.Writer) { a.writeFinding(w, f) }); err != nil {
			return err
		}
		return severityExit(f.Severity)
	}
	return c
}
