// Command greeting handles the entries of one queue in its own process, and pushes the names among its arguments. It
// ends at an interrupt.
package main

import (
	"context"
	"errors"
	"log"
	"os"
	"os/signal"
	"strings"

	"github.com/penstock/penstock"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/tasknode"
)

// Greeting is the payload of the queue.
type Greeting struct {
	Name string `json:"name"`
}

var greetings = invalidation.Definition[Greeting]{Name: "greeting"}

// greet handles one entry. After an error the queue's retry policy counts; a permanent error fails the entry at once.
func greet(_ context.Context, run *invalidation.Run, g Greeting) (any, error) {
	if strings.TrimSpace(g.Name) == "" {
		return nil, invalidation.Permanent(errors.New("the name is empty"))
	}
	log.Printf("entry %d: greeting %s", run.Entry.ID, g.Name)
	return map[string]string{"text": "Hello, " + g.Name}, nil
}

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := serve(ctx, penstock.Config{URL: os.Getenv("PENSTOCK_DATABASE_URL")}, os.Args[1:]); err != nil {
		log.Fatal(err)
	}
}

// serve makes the queue if it is missing, pushes the names, and runs a task node until ctx ends.
func serve(ctx context.Context, database penstock.Config, names []string) error {
	db, err := penstock.Open(ctx, database)
	if err != nil {
		return err
	}
	defer db.Close()
	if err := invalidation.Sync(ctx, db.Pool, greetings); err != nil {
		return err
	}
	queue, err := greetings.Open(ctx, db.Pool)
	if err != nil {
		return err
	}
	hinter := invalidation.NewHinter(db.Pool, 0)
	go func() { _ = hinter.Run(ctx) }()
	queue = queue.Hinting(hinter) // its pushes wake nodes, which else find the entries with their next poll
	for _, name := range names {
		push, err := greetings.NewPush(Greeting{Name: name}, invalidation.Push{})
		if err != nil {
			return err
		}
		pushed, err := queue.Push(ctx, push)
		if err != nil {
			return err
		}
		log.Printf("entry %d: pushed", pushed[0].ID)
	}

	node := tasknode.New(tasknode.Config{Name: "greeting"}, db.Pool, db.Beats)
	node.Handle(greetings.Name, greetings.Handler(greet))
	listener := invalidation.NewListener(invalidation.ListenConfig{
		Conn: db.Listen, Wake: node.Wake, Cancelled: node.Cancelled,
	})
	go func() { _ = listener.Run(ctx) }() // it connects again by itself, and polls find what it misses
	return node.Run(ctx)
}
