package api

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/penstock/penstock/internal/tokenbucket"
	"github.com/penstock/penstock/pkg/invalidation"
)

// keyed is a queue that knows the keys that it was given.
type keyed map[string]invalidation.EntryID

func (k keyed) Push(_ context.Context, pushes ...invalidation.Push) ([]invalidation.Pushed, error) {
	pushed := make([]invalidation.Pushed, len(pushes))
	for i, p := range pushes {
		pushed[i].Verdict = invalidation.Replayed
		if k[p.IdempotencyKey] == 0 {
			k[p.IdempotencyKey] = invalidation.EntryID(len(k) + 1)
			pushed[i].Verdict = invalidation.Inserted
		}
		pushed[i].ID = k[p.IdempotencyKey]
	}
	return pushed, nil
}

func (k keyed) AcceptedBefore(_ context.Context, pushes ...invalidation.Push) (n int, err error) {
	for n < len(pushes) && k[pushes[n].IdempotencyKey] != 0 {
		n++
	}
	return n, nil
}

// A stream that a rate refused is sent again from its first line: what was accepted before costs nothing then.
func TestAStreamThatIsRepeatedGetsFurtherThanTheBurst(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		const line, lines = `{"payload": 1}` + "\n", 40
		body := strings.Repeat(line, lines)
		var r rates
		c, queue := limitedTo(2, 4), keyed{}
		again := func() (Streamed, error) {
			answered := httptest.NewRecorder()
			s := &lineStream{
				queue: queue, timeout: time.Minute, allowed: func(context.Context) error { return nil },
				answers:  &answers{w: answered, rc: http.NewResponseController(answered)},
				spend:    func(n int) (int, error) { return r.some(c, n) },
				giveBack: func(n int) { r.giveBack(c, n) },
				pushOf: func(e entryToPush, number int64) (invalidation.Push, error) {
					return (&API{}).pushOf(c, e, "night", "", number)
				},
				registerKey: func(string) (func(), error) { return func() {}, nil },
			}
			err := s.run(t.Context(), strings.NewReader(body), func() {})
			return s.answers.sum, err
		}
		for before := int64(0); ; {
			sum, err := again()
			if err == nil {
				break
			}
			var fast *rateError
			if !errors.As(err, &fast) || sum.Lines <= before {
				t.Fatalf("%+v after %d lines (%v), want more of them", sum, before, err)
			}
			before = sum.Lines
			time.Sleep(fast.wait)
		}
		if len(queue) != lines {
			t.Errorf("%d entries, want %d", len(queue), lines)
		}
		time.Sleep(time.Hour)
		if sum, err := again(); err != nil || sum.Replayed != lines {
			t.Errorf("all of it again: %+v (%v)", sum, err)
		}
		body = strings.Repeat("\n", 30) + strings.Repeat(line, 10)
		if sum, err := again(); err != nil || sum.Replayed != 10 || sum.Lines != 10 {
			t.Errorf("blank lines for those before: %+v (%v)", sum, err)
		}
		if may, err := r.some(c, lines); may != 4 || err == nil {
			t.Errorf("%d were let through (%v), want the burst", may, err)
		}
	})
}

// A client that lost an answer would take a refusal by the limits of its token for that of its entries. What is not
// known by its key is refused.
func TestWhatWasAcceptedBeforeIsAnsweredBeyondTheLimitsOfTheToken(t *testing.T) {
	w := newWorld(t)
	w.exec(`SELECT penstock.create_queue('work'), penstock.register_model('m', '{"protocol": "openai"}')`)
	const entries, stream = "/v1/queues/work/entries", "{\"payload\": 4}\n{\"payload\": 5}\n"
	requests := []struct {
		path, media, body string
		status            int    // of the first answer
		more              string // what is not known under the same key
	}{
		{entries, "application/json", `[{"payload": 1}, {"payload": 2}]`, 201, `[{"payload": 1}, {"payload": 2}, {"payload": 7}]`},
		{entries, "application/json", `{"payload": 3}`, 201, `[{"payload": 3}]`},
		{entries, "application/x-ndjson", stream, 200, stream + `{"payload": 7}`},
		{"/queue/submit", "application/json", `{"model": "m", "payload": 6}`, 200, ""},
	}
	tokens := map[string]string{
		"rate":   w.token(`"name": "rate", "scopes": ["push"], "flows": ["rate"], "rate": 0.001, "burst": 6`),
		"budget": w.token(`"name": "budget", "scopes": ["push"], "flows": ["budget"], "gpu_ms": 1000, "gpu_period": "day"`),
	}
	w.api = New(w.pool, Config{})
	send := func(token, path, media, body, key string) (status int, said string) {
		answered := w.ask(tokens[token], "POST", path, body, "Content-Type", media, "Idempotency-Key", key)
		return answered.Code, answered.Body.String()
	}
	for token := range tokens {
		for i, r := range requests {
			if status, said := send(token, r.path, r.media, r.body, fmt.Sprint(i)); status != r.status {
				t.Fatalf("%s, request %d: %d %s", token, i, status, said)
			}
		}
	}
	w.exec(`
INSERT INTO penstock.usage_hour (hour, queue_id, model, flow, calls, gpu_ms, wasted_ms, tokens_in, tokens_cached, tokens_out)
SELECT date_trunc('hour', now() + v.ahead, 'UTC'), id, 'm', 'budget', 1, 1000, 0, 0, 0, 0
  FROM penstock.queue, (VALUES (interval '0'), (interval '1 day')) v(ahead) WHERE name = 'work'`) // also of the next day
	w.api = New(w.pool, Config{}) // what it read of the budget is kept for two seconds
	spent := &pushBucket{}
	spent.Take(time.Now(), tokenbucket.Rate{PerSecond: 0.001, Burst: 6}, 6)
	w.api.rates.of = map[string]*pushBucket{"rate": spent}
	for token := range tokens {
		for i, r := range requests {
			for range 2 {
				if status, said := send(token, r.path, r.media, r.body, fmt.Sprint(i)); status != http.StatusOK {
					t.Errorf("%s, request %d again: %d %s, want 200", token, i, status, said)
				}
			}
			if status, said := send(token, r.path, r.media, r.body, fmt.Sprint("new", i)); status != http.StatusTooManyRequests {
				t.Errorf("%s, request %d under a new key: %d %s, want 429", token, i, status, said)
			}
			if r.more == "" {
				continue
			}
			if status, said := send(token, r.path, r.media, r.more, fmt.Sprint(i)); status != http.StatusTooManyRequests {
				t.Errorf("%s, request %d with more: %d %s, want 429", token, i, status, said)
			}
		}
		var pushed int
		err := w.pool.QueryRow(t.Context(), `SELECT count(*) FROM penstock.entry WHERE flow = $1`, token).Scan(&pushed)
		if err != nil || pushed != 6 {
			t.Errorf("%s: %d entries were accepted (%v), want those of the first requests, 6", token, pushed, err)
		}
	}
}
