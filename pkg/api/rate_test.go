package api

import (
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/penstock/penstock/pkg/operator"
)

func limitedTo(rate float64, burst int32) caller {
	c := caller{APIToken: operator.APIToken{Name: "ci", Rate: &rate}}
	if burst > 0 {
		c.Burst = &burst
	}
	return c
}

func TestATokenPushesItsBurstAndThenItsRate(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var r rates
		c := limitedTo(10, 20)
		if err := r.take(c, 20); err != nil {
			t.Fatalf("the burst: %v", err)
		}
		var fast *rateError
		if err := r.take(c, 5); !errors.As(err, &fast) || fast.wait != 500*time.Millisecond {
			t.Fatalf("5 more at once: %v, want to wait 500ms", err)
		}
		time.Sleep(fast.wait)
		if err := r.take(c, 5); err != nil {
			t.Errorf("after that wait: %v", err)
		}
		pushed := 0
		for start := time.Now(); time.Since(start) < time.Minute; time.Sleep(10 * time.Millisecond) {
			if r.take(c, 1) == nil {
				pushed++
			}
		}
		if pushed < 599 || pushed > 601 {
			t.Errorf("%d entries in a minute, want 600", pushed)
		}
		if err := r.take(c, 21); !errors.As(err, &fast) || fast.wait != 0 {
			t.Errorf("more than the burst: %v, want it refused without a time", err)
		}
		c.Name = "streaming"
		if may, err := r.some(c, 20); may != 20 || err != nil {
			t.Errorf("the burst of a stream: %d (%v)", may, err)
		}
		if may, err := r.some(c, 3); may != 0 || !errors.Is(err, errRate) {
			t.Errorf("some of nothing: %d (%v)", may, err)
		}
		time.Sleep(250 * time.Millisecond)
		if may, err := r.some(c, 3); may != 2 || !errors.Is(err, errRate) {
			t.Errorf("some of two and a half: %d (%v)", may, err)
		}
		if err := r.take(caller{}, 1_000_000); err != nil {
			t.Errorf("a token without a rate: %v", err)
		}
	})
}

// At most rates the time of an entry is no whole number of nanoseconds.
func TestATokenThatWaitsAsItWasToldPushes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for rate := 0.3; rate < 30; rate *= 1.7 {
			var r rates
			c := limitedTo(rate, 3)
			if err := r.take(c, 3); err != nil {
				t.Fatalf("the burst at %v: %v", rate, err)
			}
			var fast *rateError
			if err := r.take(c, 1); !errors.As(err, &fast) || fast.wait == 0 {
				t.Fatalf("one more at %v: %v, want it refused with a time", rate, err)
			}
			time.Sleep(fast.wait)
			if err := r.take(c, 1); err != nil {
				t.Errorf("after that wait at %v: %v", rate, err)
			}
		}
	})
}

func TestBucketsAreBoundedAndNotRenewedWhileInUse(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var r rates
		c := limitedTo(1, 1)
		for i := range bucketsMax {
			c.Name = fmt.Sprint("old", i)
			_ = r.take(c, 1)
		}
		time.Sleep(2 * time.Minute)
		c.Name = "new"
		if err := r.take(c, 1); err != nil || len(r.of) != 1 {
			t.Errorf("%d buckets (%v), want those of before forgotten", len(r.of), err)
		}
		if err := r.take(c, 1); err == nil {
			t.Error("a second entry at once was let in")
		}
	})
}

// TestATokenBeyondItsRateIsToldWhenToComeBack pushes by each way that a token of scope push has.
func TestATokenBeyondItsRateIsToldWhenToComeBack(t *testing.T) {
	w := newWorld(t)
	w.exec(`SELECT penstock.create_queue('work'), penstock.register_model('m', '{"protocol": "openai"}')`)
	status, answer := w.send("POST", "/v1/tokens",
		`{"name": "ci", "scopes": ["push"], "rate": 0.01, "burst": 4, `+reason+`}`)
	if status != http.StatusCreated {
		t.Fatalf("create: %d %v", status, answer)
	}
	secret, _ := answer["secret"].(string)
	w.api = New(w.pool, Config{})
	push := func(path, body string) (int, string) {
		answered := w.ask(secret, "POST", path, body)
		return answered.Code, answered.Header().Get("Retry-After") + " " + answered.Body.String()
	}
	const entries = "/v1/queues/work/entries"
	if status, said := push(entries, `[{"payload": 1}, {"payload": 2}]`); status != http.StatusCreated {
		t.Fatalf("the first two: %d %s", status, said)
	}
	if status, said := push("/queue/submit", `{"model": "m", "payload": 1}`); status != http.StatusOK {
		t.Fatalf("the third: %d %s", status, said)
	}
	for path, body := range map[string]string{
		entries:                    `[{"payload": 1}, {"payload": 2}]`,
		"/v1/queues/work/entries?": `[1,2,3]`,
	} {
		if body == `[1,2,3]` {
			body = `[{"payload": 1}, {"payload": 2}, {"payload": 3}, {"payload": 4}, {"payload": 5}]`
			if status,
				said := push(path, body); status != 429 || !strings.HasPrefix(said, " ") || !strings.Contains(said,
				"4 entries at once") {
				t.Errorf("more than the burst: %d %s, want 429 without a time", status, said)
			}
			continue
		}
		if status,
			said := push(path, body); status != 429 || !strings.Contains(said,
			"rate_exceeded") || strings.HasPrefix(said, " ") {
			t.Errorf("two more: %d %s, want 429 with Retry-After", status, said)
		}
	}
	lines := strings.Repeat(`{"payload": 1}`+"\n", 3)
	answered := w.ask(secret, "POST", entries, lines, "Content-Type", "application/x-ndjson")
	if answered.Code != 429 || !strings.Contains(answered.Body.String(), `"inserted":1`) {
		t.Errorf("a stream of three: %d %s, want one line accepted and then 429", answered.Code, answered.Body)
	}
	if status, said := push("/queue/submit", `{"model": "m", "payload": 1}`); status != 429 {
		t.Errorf("beyond the rate: %d %s", status, said)
	}
	var pushed int
	if err := w.pool.QueryRow(t.Context(),
		`SELECT count(*) FROM penstock.entry`).Scan(&pushed); err != nil || pushed != 4 {
		t.Errorf("%d entries were accepted (%v), want the burst of 4", pushed, err)
	}
	w.api = New(w.pool, Config{Open: true})
	for _, body := range []string{
		`"scopes": ["admin"], "rate": 1`, `"scopes": ["push"], "rate": 0`,
		`"scopes": ["push"], "burst": 3`,
	} {
		if status,
			answer := w.send("POST", "/v1/tokens",
			`{"name": "x", `+body+`, `+reason+`}`); status != http.StatusUnprocessableEntity {
			t.Errorf("%s: %d %v, want 422", body, status, answer)
		}
	}
}
