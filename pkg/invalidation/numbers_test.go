package invalidation

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"

	"github.com/penstock/penstock/internal/postgres"
)

var wildNumbers = []string{
	"1e309", "-1e309", "1e131071", "1.5e308", "1e-309", "-1e-16383", "0e-16383", "1" + strings.Repeat("0", 309), "0." + strings.Repeat("0", 16000) + "1",
	"1." + strings.Repeat("0", 16000),
}

func TestNumbersOfAnUnreadableLengthAreRefusedAtEachPush(t *testing.T) {
	b := newBed(t, Config{})
	for _, number := range wildNumbers {
		payload := json.RawMessage(fmt.Sprintf(`{"a": [1, "1e999", {"b": %s}]}`, number))
		if _, err := b.q.Push(b.ctx, Push{Payload: payload}); !errors.Is(err, ErrInvalid) {
			t.Errorf("Push of %.20s ended with %v", number, err)
		}
		if _, err := b.q.Push(b.ctx, Push{Payload: json.RawMessage(`{}`), Callback: json.RawMessage(`{"url": "x", "context": ` + number + `}`)}); !errors.Is(err, ErrInvalid) {
			t.Errorf("Push with a callback of %.20s ended with %v", number, err)
		}
		_, err := b.pool.Exec(b.ctx, `SELECT penstock.push('work', $1::text::jsonb)`, string(payload))
		if postgres.Code(err) != "PS002" {
			t.Errorf("penstock.push of %.20s ended with %v", number, err)
		}
		_, err = b.pool.Exec(b.ctx, `SELECT penstock.push_many('work', ARRAY['{}', $1::text]::jsonb[])`, string(payload))
		if postgres.Code(err) != "PS002" {
			t.Errorf("penstock.push_many of %.20s ended with %v", number, err)
		}
	}
	b.want(b.count(`SELECT count(*) FROM penstock.entry`), 0)
}

func TestNumbersThatProgramsUseAreAccepted(t *testing.T) {
	b := newBed(t, Config{})
	for _, number := range []string{"0", "-0.0", "1e308", "-1e308", "1e-308", "3.141592653589793238462643", "123456789012345678901234567890", "1.7e307", "0.1e-300"} {
		payload := `{"a": [` + number + `], "e1e999": "1e999\"1e999"}`
		if _, err := b.q.Push(b.ctx, Push{Payload: json.RawMessage(payload)}); err != nil {
			t.Errorf("Push of %s ended with %v", number, err)
		}
		b.exec(b.pool, `SELECT penstock.push('work', $1::text::jsonb)`, payload)
	}
}

func TestTracesAndCallbacksHaveBounds(t *testing.T) {
	b := newBed(t, Config{PayloadLimit: 100_000})
	const good = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
	b.pushAll(b.pool, Push{Trace: good, Callback: json.RawMessage(`{"url": "https://x/` + strings.Repeat("a", 2000) + `"}`)})
	for _, trace := range []string{"a\nb", "x", good + "0", strings.ToUpper(good), "ff" + good[2:], "00-" + strings.Repeat("0", 32) + good[35:]} {
		if _, err := b.q.Push(b.ctx, Push{Payload: json.RawMessage(`{}`), Trace: trace}); !errors.Is(err, ErrInvalid) {
			t.Errorf("a push with trace %q ended with %v", trace, err)
		}
	}
	long := func(n int) string {
		var s strings.Builder
		for i := 0; s.Len() < n; i++ {
			fmt.Fprintf(&s, "%x", i*2654435761)
		}
		return s.String()
	}
	for callback, want := range map[string]error{
		`{"url": "https://x/` + long(2048) + `"}`:                                               ErrInvalid,
		`{"url": "https://x/", "context": "` + long(70_000) + `"}`:                              ErrPayloadTooLarge,
		`{"url": "https://x/", "context": "` + long(60_000) + `", "b": "` + long(50_000) + `"}`: ErrPayloadTooLarge,
	} {
		if _, err := b.q.Push(b.ctx, Push{Payload: json.RawMessage(`{}`), Callback: json.RawMessage(callback)}); !errors.Is(err, want) {
			t.Errorf("a push with a callback of %d bytes ended with %v, want %v", len(callback), err, want)
		}
	}
}
