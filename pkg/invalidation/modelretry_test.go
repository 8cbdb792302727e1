package invalidation

import (
	"errors"
	"testing"
	"time"
)

// Workers are restarted within minutes: fifty retries of a model take 24 minutes, and not 39 hours.
func TestRetriesOfModelsWaitHalfAMinuteAtMost(t *testing.T) {
	for name, c := range map[string]struct {
		config Config
		want   time.Duration
	}{
		"of a model":               {Config{Model: "flux"}, 30 * time.Second},
		"of a model, with a cap":   {Config{Model: "flux", Retry: RetryPolicy{Cap: Seconds(2 * time.Minute)}}, 2 * time.Minute},
		"of a model, for a class":  {Config{Model: "flux", Retry: RetryPolicy{Classes: map[string]RetryPolicy{"oom": {Cap: Seconds(time.Minute)}}}}, time.Minute},
		"of a queue without model": {Config{}, 1024 * time.Second},
	} {
		t.Run(name, func(t *testing.T) {
			r := &Run{Queue: &Queue{Config: c.config}, Lock: &Lock{}, Entry: Entry{Attempt: 10}}
			ending := Judge(r, nil, WithClass("oom", errors.New("out of memory")), time.Second, 0)
			if ending.Verb() != "retry" || ending.delay != c.want {
				t.Errorf("%s after %s, want a retry after %s", ending.Verb(), ending.delay, c.want)
			}
		})
	}
}
