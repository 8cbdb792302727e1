package api

import (
	"context"
	"errors"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"testing/synctest"
	"time"

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
