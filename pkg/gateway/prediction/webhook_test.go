package prediction

import (
	"context"
	"log/slog"
	"strings"
	"sync/atomic"
	"testing"
	"time"
	"unicode/utf8"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/penstock/penstock/internal/pgtest"
)

// A host may become shorter or longer in lower case, and its bytes need not be UTF-8: neither ends the program, and the
// flow of a delivery is text that the database takes.
func TestFlowOfADeliveryIsTextOfItsHost(t *testing.T) {
	t.Parallel()
	for address, want := range map[string]string{
		"https://Hooks.Example:8443/x":                   "hooks.example:8443",
		"https://%E2%84%AA.example/":                     "k.example", // the Kelvin sign, three bytes
		"https://\u212a.example/":                        "k.example",
		"https://" + strings.Repeat("a", 63) + "\u00e9/": strings.Repeat("a", 63),
		"https://%FF.example/":                           "\uFFFD.example",
		"https://" + strings.Repeat("\u0130", 40) + "/":  strings.Repeat("i", 40),
		"://": "",
	} {
		if got := hostOf(address); got != want || !utf8.ValidString(got) || len(got) > flowBytesMax {
			t.Errorf("%s: got %q, want %q", address, got, want)
		}
	}
}

func TestWebhooksHaveAHostInASCII(t *testing.T) {
	t.Parallel()
	for address, fits := range map[string]bool{
		"https://hooks.example/x":                      true,
		"http://[2001:db8::1]:8080/":                   true,
		"https://xn--bcher-kva.example/":               true,
		"https://b\u00fccher.example/":                 false,
		"https://%E2%84%AA.example/":                   false,
		"https:///x":                                   false,
		"ftp://hooks.example/":                         false,
		"https://a/" + strings.Repeat("x", webhookMax): false,
	} {
		if err := (&Predictions{}).checkWebhook(address); (err == nil) != fits {
			t.Errorf("%s: got %v", address, err)
		}
	}
}

// scans counts the statements that look through all predictions whose end is still to be reported.
type scans struct{ n atomic.Int64 }

func (s *scans) TraceQueryStart(ctx context.Context, _ *pgx.Conn, q pgx.TraceQueryStartData) context.Context {
	if strings.Contains(q.SQL, "ORDER BY p.created_at") {
		s.n.Add(1)
	}
	return ctx
}

func (*scans) TraceQueryEnd(context.Context, *pgx.Conn, pgx.TraceQueryEndData) {}

// Predictions that have ended are found a hundred at a time: those that run are passed over once for all of them.
func TestEndsOfPredictionsAreFoundTogether(t *testing.T) {
	t.Parallel()
	config, err := pgxpool.ParseConfig(pgtest.DSN(t))
	if err != nil {
		t.Fatal(err)
	}
	var seen scans
	config.ConnConfig.Tracer = &seen
	pool, err := pgxpool.NewWithConfig(t.Context(), config)
	if err != nil {
		t.Fatal(err)
	}
	defer pool.Close()
	_, err = pool.Exec(t.Context(), `
INSERT INTO penstock.prediction (id, owner, entry_id, queue_id, model, version, input, webhook, events)
SELECT 'p' || i, 'shop', i, 1, 'm', 'm', '{}', 'https://hooks.example/', '{}' FROM generate_series(1, 150) i`)
	if err != nil {
		t.Fatal(err)
	}
	s := &Predictions{db: pool, log: slog.New(slog.DiscardHandler)}
	for range 2 {
		if _, err := s.notify(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	var left int
	if err := pool.QueryRow(t.Context(), `SELECT count(*) FROM penstock.prediction WHERE notified_at IS NULL`).Scan(&left); err != nil || left != 0 {
		t.Errorf("%d of 150 ends are not noted: %v", left, err)
	}
	if n := seen.n.Load(); n != 2 {
		t.Errorf("%d statements looked for 150 predictions that have ended", n)
	}
}

// A look that takes long is followed by a pause that is longer still, within the bounds.
func TestPausesBetweenLooksGrowWithTheirCost(t *testing.T) {
	t.Parallel()
	for took, want := range map[time.Duration]time.Duration{
		0: noticeEvery, 10 * time.Millisecond: noticeEvery, 100 * time.Millisecond: 2 * time.Second, time.Minute: noticeIdle,
	} {
		if got := noticePause(took); got != want {
			t.Errorf("a look of %s is followed by a pause of %s, want %s", took, got, want)
		}
	}
}
