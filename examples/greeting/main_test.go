package main

import (
	"context"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock"
	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/pkg/invalidation"
)

const outcomesSQL = `
SELECT outcome || ': ' || (result->>'text') FROM penstock.result
 UNION ALL
SELECT 'failed: ' || error FROM penstock.failure ORDER BY 1`

// Two entries are pushed by the example, one in a transaction of a program's own pool, whose sessions have no settings
// of Penstock's.
func TestTheExampleRunsWhatItAndOthersPush(t *testing.T) {
	cfg := penstock.Config{URL: pgtest.DSN(t)}
	db, err := penstock.Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	if err := invalidation.Sync(t.Context(), db.Pool, greetings); err != nil {
		t.Fatal(err)
	}
	own, err := pgx.Connect(t.Context(), cfg.URL)
	if err != nil {
		t.Fatal(err)
	}
	defer own.Close(context.WithoutCancel(t.Context()))
	err = pgx.BeginFunc(t.Context(), own, func(tx pgx.Tx) error {
		_, err := greetings.Push(t.Context(), tx, Greeting{Name: "Bob"})
		return err
	})
	if err != nil {
		t.Fatal(err)
	}

	ctx, stop := context.WithCancel(t.Context())
	defer stop()
	ended := make(chan error, 1)
	go func() { ended <- serve(ctx, cfg, []string{"Ann", " "}) }()
	want := []string{"done: Hello, Ann", "done: Hello, Bob", "failed: the name is empty"}
	var got []string
	for deadline := time.Now().Add(time.Minute); len(got) < len(want) && time.Now().Before(deadline); {
		time.Sleep(10 * time.Millisecond)
		rows, _ := own.Query(t.Context(), outcomesSQL)
		if got, err = pgx.CollectRows(rows, pgx.RowTo[string]); err != nil {
			t.Fatal(err)
		}
	}
	if !slices.Equal(got, want) {
		t.Errorf("outcomes are %q, want %q", got, want)
	}
	stop()
	if err := <-ended; err != nil {
		t.Errorf("serve: %v", err)
	}
}

// Nodes of other programs hear of the entries, and need not wait for their next poll.
func TestThePushesOfTheExampleSendHints(t *testing.T) {
	cfg := penstock.Config{URL: pgtest.DSN(t)}
	db, err := penstock.Open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	defer db.Close()
	heard := make(chan int32, 100)
	listener := invalidation.NewListener(invalidation.ListenConfig{
		Conn: db.Listen, Wake: func(queue int32, _ *invalidation.Lane) { heard <- queue },
	})
	ctx, stop := context.WithCancel(t.Context())
	var group sync.WaitGroup
	defer group.Wait()
	defer stop()
	group.Go(func() { _ = listener.Run(ctx) })
	for deadline := time.Now().Add(time.Minute); !listener.Status().Connected; time.Sleep(10 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the listener does not connect")
		}
	}
	group.Go(func() { _ = serve(ctx, cfg, []string{"Ann"}) })
	select {
	case <-heard:
	case <-time.After(time.Minute):
		t.Error("no hint was sent")
	}
}
