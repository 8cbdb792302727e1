package api

import (
	"context"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
)

// 16 streams that send a blank now and then once took all the memory of streams, also after their token was revoked.
func TestStreamsOfOneTokenKeepNoOtherOutAndEndWithTheToken(t *testing.T) {
	pool := pgtest.New(t)
	if _, err := invalidation.Create(t.Context(), pool, "work", invalidation.Config{}); err != nil {
		t.Fatal(err)
	}
	a := New(pool, Config{})
	server := httptest.NewServer(a)
	defer server.Close()
	secrets := map[string]string{}
	for _, name := range []string{"slow", "good"} {
		secrets[name] = newToken(t, pool, operator.Grant{Name: name, Scopes: []string{"push"}})
	}
	send := func(ctx context.Context, token string, body io.Reader) (int, string, error) {
		r, err := http.NewRequestWithContext(ctx, "POST", server.URL+pushTo, body)
		if err != nil {
			return 0, "", err
		}
		r.Header.Set("Authorization", "Bearer "+secrets[token])
		r.Header.Set("Content-Type", "application/x-ndjson")
		answer, err := server.Client().Do(r)
		if err != nil {
			return 0, "", err
		}
		defer answer.Body.Close()
		text, err := io.ReadAll(answer.Body)
		return answer.StatusCode, string(text), err
	}
	const slow = 16
	ended := make(chan string, slow)
	bodies := make([]*io.PipeWriter, slow)
	for i := range bodies {
		body, in := io.Pipe()
		bodies[i] = in
		go func() {
			_, text, _ := send(t.Context(), "slow", body)
			ended <- text
		}()
		if _, err := io.WriteString(in, "\n"); err != nil {
			t.Fatal(err)
		}
	}
	within, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	for {
		a.streams.mu.Lock()
		held := a.streams.of["slow"]
		a.streams.mu.Unlock()
		if held == slow*streamBase {
			break
		}
		if within.Err() != nil {
			t.Fatalf("%d idle streams hold %d bytes", slow, held)
		}
		time.Sleep(5 * time.Millisecond)
	}
	if status, text, err := send(t.Context(), "good", strings.NewReader(`{"payload": 1}`)); status != http.StatusOK {
		t.Errorf("a stream beside %d slow ones of another token: %d %s (%v)", slow, status, text, err)
	}
	if err := a.operator.RevokeToken(t.Context(), "slow", invalidation.By{Actor: "test", Reason: "test"}); err != nil {
		t.Fatal(err)
	}
	blank := time.NewTicker(time.Second)
	defer blank.Stop()
	for left := slow; left > 0; {
		select {
		case text := <-ended:
			left--
			if !strings.Contains(text, `"unauthorized"`) {
				t.Errorf("a stream ended with %q", text)
			}
		case <-blank.C:
			for _, in := range bodies {
				go func() { _, _ = io.WriteString(in, "\n") }()
			}
		case <-within.Done():
			t.Fatalf("%d streams go on after the revocation of their token", left)
		}
	}
	for _, in := range bodies {
		in.Close()
	}
}

func TestAStreamTakesWhatItHoldsAndGivesItBack(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		memory := newStreamMemory(16 << 20)
		one := caller{APIToken: operator.APIToken{Name: "one"}, secret: "x"}
		two := caller{APIToken: operator.APIToken{Name: "two"}, secret: "y"}
		long, _ := memory.enter(one)
		short, err := memory.enter(one)
		if err != nil {
			t.Fatal(err)
		}
		for name, err := range map[string]error{
			"a long line":       long.grow(t.Context(), lineBytesMax),
			"as it was decoded": long.add(t.Context(), 2<<20),
			"lines of the base": short.add(t.Context(), streamBase),
		} {
			if err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
		start := time.Now()
		another, err := memory.enter(one)
		if err != nil {
			t.Fatal(err)
		}
		if err := another.grow(t.Context(), lineBytesMax); !errors.Is(err, errBusy) || time.Since(start) < streamPatience {
			t.Errorf("more than one token may: %v after %s", err, time.Since(start))
		}
		other, err := memory.enter(two)
		if err != nil {
			t.Fatal(err)
		}
		if err := other.grow(t.Context(), lineBytesMax); err != nil {
			t.Errorf("another token: %v", err)
		}
		go func() {
			time.Sleep(time.Second)
			long.shrink(lineBytesMax)
			long.done(2 << 20)
		}()
		if err := another.grow(t.Context(), lineBytesMax); err != nil {
			t.Errorf("after another stream gave it back: %v", err)
		}
		for _, s := range []*streamShare{long, short, another, other} {
			s.close()
		}
		if err := long.grow(t.Context(), lineBytesMax); err == nil { // its reader goes on for a moment
			t.Error("a stream that has ended takes bytes")
		}
		short.shrink(1)
		if memory.free != 16<<20 || len(memory.of) != 0 {
			t.Errorf("%d bytes are free of %d, and %v hold some", memory.free, 16<<20, memory.of)
		}
	})
}
