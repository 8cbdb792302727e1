package invalidation

import (
	"bytes"
	"context"
	"log/slog"
	"strings"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
)

// Each process logged a line every ten seconds for as long as the database was away.
func TestHintsThatAreNotHeardHaveOneLine(t *testing.T) {
	t.Parallel()
	conn, err := pgx.ParseConfig("postgres://127.0.0.1:1/nowhere?sslmode=disable&connect_timeout=1")
	if err != nil {
		t.Fatal(err)
	}
	var text bytes.Buffer
	l := NewListener(ListenConfig{Conn: conn, RetryMax: time.Millisecond, Log: slog.New(slog.NewTextHandler(&text, nil))})
	ctx, stop := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- l.Run(ctx) }()
	for l.Status().Reconnects < 5 {
		time.Sleep(time.Millisecond)
	}
	stop()
	if err := <-done; err != nil {
		t.Fatal(err)
	}
	if n := strings.Count(text.String(), "\n"); n != 1 {
		t.Errorf("five tries to connect give %d lines, want one: %s", n, text.String())
	}
}
