package main

import (
	"context"
	"log/slog"
	"reflect"
	"testing"
	"time"

	"github.com/penstock/penstock/internal/pgtest"
)

// startLeader runs a leader that is elected, until the test ends.
func startLeader(t *testing.T, change func(*pools)) *leader {
	t.Helper()
	cfg := defaults()
	cfg.Database.URL = pgtest.DSN(t)
	cfg.Leader.Election.Lease = time.Minute // a busy machine does not end the term
	p, err := open(t.Context(), cfg)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(p.close)
	change(p)
	l, err := newLeader(cfg, p, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- l.elector.Run(ctx, l.lead) }()
	t.Cleanup(func() {
		stop()
		if err := <-ended; err != nil {
			t.Errorf("elector ended: %v", err)
		}
	})
	return l
}

// All duties but one wait for the database: the last one goes on, and so does the autoscaler.
func TestEachDutyHasAConnection(t *testing.T) {
	others := reflect.TypeFor[duties]().NumField() - 1 // without the autoscaler
	l := startLeader(t, func(p *pools) {
		for range others - 1 {
			ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
			defer cancel()
			conn, err := p.duties.Acquire(ctx)
			if err != nil {
				t.Fatalf("%d duties share %d connections: %v", others, p.duties.Config().MaxConns, err)
			}
			t.Cleanup(conn.Release)
		}
	})
	for l.duties.Load() == nil || l.duties.Load().samples.Latest().At.IsZero() ||
		l.duties.Load().scaler.Status().Passes == 0 {
		select {
		case <-t.Context().Done():
			t.Fatal(t.Context().Err())
		case <-time.After(10 * time.Millisecond):
		}
	}
	if n := len(l.duties.Load().runs()); n != others {
		t.Errorf("%d loops are run for %d duties", n, others)
	}
}
