package main

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/spf13/cobra"
)

// commands are everything the program can do, in the order of its help.
var commands = []func(*app) *cobra.Command{
	queueCommand, entryCommand, groupCommand, failureCommand,
	lockCommand, nodeCommand, limitCommand, flowCommand, pauseCommand, applicationCommand, operationCommand,
	auditCommand, tokenCommand,
	cronCommand, batchCommand, modelCommand, instanceCommand, slotCommand, scaleCommand, webhookCommand, gatewayCommand,
	topCommand, doctorCommand, migrateCommand, grantsCommand, replayCommand, devCommand, versionCommand,
}

// newRoot builds the tree of commands for one run.
func newRoot(a *app) *cobra.Command {
	root := &cobra.Command{
		Use:   "penstock",
		Short: "Inspect and control Penstock, a task queue on Postgres for calls to GPU workers",
		Long: "Inspect and control Penstock, a task queue on Postgres for calls to GPU workers. Commands use the\n" +
			"API of a leader, or run the same API in this process on the database, so that they work while no\n" +
			"leader runs.\n\n" +
			"The API is --server or PENSTOCK_SERVER, with a token in --token-file or PENSTOCK_TOKEN.\n" +
			"The database is --database-url or PENSTOCK_DATABASE_URL, else PGHOST, PGUSER and so on.\n" +
			"Commands that change behaviour need a --reason, which is recorded in the audit.\n\n" + exitHelp,
		SilenceUsage: true, SilenceErrors: true,
		PersistentPreRunE: func(c *cobra.Command, args []string) error {
			a.started, a.command, a.seeState = true, c.CommandPath(), stateVerbs(c)
			if err := checkForm(c, args); err != nil {
				return err
			}
			return a.check()
		},
	}
	root.SetIn(a.in)
	root.SetOut(a.out)
	root.SetErr(a.err)
	root.SetFlagErrorFunc(readable)
	flags := root.PersistentFlags()
	// The variable is read later and not as a default, or --help would print the password in it.
	flags.StringVar(&a.databaseURL, "database-url", "", "postgres://user:password@host/name (PENSTOCK_DATABASE_URL)")
	flags.BoolVar(&a.pooled, "database-pooled", false, "there is a pooler in transaction mode in between")
	flags.StringVar(&a.server, "server", "", "https://host:port of the API, instead of the database (PENSTOCK_SERVER)")
	flags.StringVar(&a.token, "token", "", "for the API; others on this machine see flags: rather give "+
		"PENSTOCK_TOKEN or --token-file")
	flags.StringVar(&a.tokenFile, "token-file", "", "file with the token")
	flags.StringVar(&a.caFile, "ca-file", "",
		"file with certificates of authorities for the API's, instead of the system's (PENSTOCK_CA_FILE)")
	flags.StringVar(&a.certFile, "cert-file", "",
		"file with a certificate of ours, where the API asks for one (PENSTOCK_CERT_FILE)")
	flags.StringVar(&a.keyFile, "key-file", "", "file with its key (PENSTOCK_KEY_FILE)")
	flags.DurationVar(&a.timeout, "timeout", 30*time.Second, "of one statement or request")
	flags.StringVarP(&a.format, "output", "o", "table", "table, wide, json, jsonl or yaml")
	flags.BoolVar(&a.noColor, "no-color", false,
		"no colours (NO_COLOR); there are none where the output is not a terminal")
	flags.StringVar(&a.actor, "actor", "", "the actor, for the audit; by default user@host, through the API "+
		"always the token")
	must(root.RegisterFlagCompletionFunc("output", cobra.FixedCompletions(formats, cobra.ShellCompDirectiveNoFileComp)))
	for _, name := range []string{"database-url", "server", "token"} {
		must(root.RegisterFlagCompletionFunc(name, cobra.NoFileCompletions))
	}
	for _, command := range commands {
		root.AddCommand(command(a))
	}
	completeNoFiles(root)
	return root
}

// run carries out one command line and returns the exit code.
func run(ctx context.Context, a *app, args []string) int {
	defer a.close()
	root := newRoot(a)
	root.SetArgs(args)
	c, err := root.ExecuteContextC(ctx)
	if err != nil && !a.started { // cobra refused it before any of our code ran
		if strings.Contains(err.Error(), "arg(s)") {
			err = fmt.Errorf("%w: %s", err, c.UseLine())
		} else if strings.Contains(err.Error(), "unknown shorthand flag") {
			err = fmt.Errorf("%w; arguments that begin with a dash follow --", err)
		}
		err = usageError{err}
	}
	if a.out.failed != nil && (err == nil || isA[exitStatus](err)) {
		err = partialError{fmt.Errorf("the command was carried out, and its output could not be written: %w",
			a.out.failed)}
	}
	return a.report(ctx, err)
}

// noun is a command that only holds verbs. Alone it prints its help; with a verb that it does not have it fails, so
// that a script with a misspelt verb does not go on.
func noun(use, short string, verbs ...*cobra.Command) *cobra.Command {
	c := &cobra.Command{Use: use, Short: short, SuggestionsMinimumDistance: 2}
	c.Args = func(c *cobra.Command, args []string) error {
		if len(args) == 0 {
			return nil
		}
		err := fmt.Errorf("%q is not a verb of %s", args[0], c.CommandPath())
		if near := c.SuggestionsFor(args[0]); len(near) > 0 {
			err = fmt.Errorf("%w: did you mean %s?", err, strings.Join(near, " or "))
		}
		return err
	}
	c.RunE = func(c *cobra.Command, _ []string) error { return c.Help() }
	c.AddCommand(verbs...)
	return c
}

// must is for mistakes in the tree of commands itself, which every test meets.
func must(err error) {
	if err != nil {
		panic(err)
	}
}
