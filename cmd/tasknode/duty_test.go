package main

import (
	"log/slog"
	"net"
	"testing"
	"time"

	"github.com/penstock/penstock"
	"github.com/penstock/penstock/internal/pgtest"
)

// The runs of a node lean on its other duties: where one of them ends the node drains, and says why.
func TestANodeDrainsWhenADutyFails(t *testing.T) {
	pool := pgtest.New(t)
	cfg := defaults()
	cfg.TaskNode.Governor = false
	n, err := newNode(cfg, &penstock.DB{Pool: pool, Beats: pool}, nil, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	listener, err := (&net.ListenConfig{}).Listen(t.Context(), "tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	if err := listener.Close(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- n.run(t.Context(), listener) }()
	select {
	case err := <-ended:
		if err == nil {
			t.Error("it ended without an error")
		}
	case <-time.After(30 * time.Second):
		t.Fatal("the node goes on without its listener")
	}
}
