// Worker is a real inference worker on the CPU: it finds faces and tells languages.
package main

import (
	"fmt"
	"os"
)

const usage = `worker finds faces in pictures and tells languages of texts, behind the dispatcher protocol.

  worker [serve] [flags]    answer calls                     (worker serve --help)
  worker samples [flags]    write real inputs as JSON lines  (worker samples --help)
`

func main() {
	if err := command(os.Args[1:]); err != nil {
		fmt.Fprintln(os.Stderr, "worker:", err)
		os.Exit(1)
	}
}

func command(args []string) error {
	if len(args) == 0 || args[0][0] == '-' && args[0] != "-h" && args[0] != "--help" {
		return serve(args)
	}
	switch args[0] {
	case "serve":
		return serve(args[1:])
	case "samples":
		return samples(args[1:], os.Stdout)
	case "help", "-h", "--help":
		fmt.Print(usage)
		return nil
	}
	return fmt.Errorf("unknown command %q\n\n%s", args[0], usage)
}
