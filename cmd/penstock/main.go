// Penstock is the operator's CLI: it sees everything and changes what can be changed, through the API of a leader, or
// through the same API in its own process on the database, so that it works while no leader runs. Nouns are commands,
// verbs are their subcommands; docs/cli.md is the manual.
package main

import (
	"context"
	"os"
	"os/signal"
	"syscall"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	code := run(ctx, newApp(os.Stdin, os.Stdout, os.Stderr, os.Getenv), os.Args[1:])
	stop()
	os.Exit(code)
}
