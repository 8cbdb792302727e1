// Schemadump writes migrations/schema.sql: what the migrations make, for people to read.
//
// The file is a product of the migrations and nothing applies it. The test beside this program holds the two together:
// it loads the file into one database, migrates another, and compares their catalogs, which any version of Postgres can do.
// Where pg_dump of the version that wrote the file is installed, it compares the text as well.
//
//	make schema          write the file
//	make schema-check    compare
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/signal"
	"time"

	"github.com/penstock/penstock/internal/devpostgres"
	"github.com/penstock/penstock/migrations"
)

// stopTimeout bounds the stop of the private cluster; it stops by itself when this program is gone.
const stopTimeout = 10 * time.Second

func main() {
	out := flag.String("o", "migrations/schema.sql", "file to write")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, *out); err != nil {
		fmt.Fprintln(os.Stderr, "schemadump:", err)
		stop()
		os.Exit(1)
	}
}

func run(ctx context.Context, out string) error {
	server, err := devpostgres.Start(ctx, devpostgres.Config{Fast: true, Confirm: devpostgres.ConfirmOnTerminal})
	if err != nil {
		return fmt.Errorf("start Postgres: %w", err)
	}
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), stopTimeout)
		defer cancel()
		if err := server.Stop(ctx); err != nil {
			fmt.Fprintln(os.Stderr, "schemadump: stop Postgres:", err)
		}
	}()
	if _, err := migrations.Up(ctx, server.Config()); err != nil {
		return err
	}
	text, err := dump(ctx, server.ConnString())
	if err != nil {
		return err
	}
	if err := os.WriteFile(out, []byte(text), 0o644); err != nil {
		return fmt.Errorf("write schema: %w", err)
	}
	fmt.Printf("wrote %s from %s\n", out, server.Source())
	return nil
}
