package scale

import (
	"maps"
	"time"
)

// refusal is the answer of the database to the last try to register an instance that a backend reported.
type refusal struct {
	endpoint string // that was refused
	n        int    // tries in a row
	retryAt  time.Time
	message  string
	paused   bool // the instance is not to be tried in this round, unless it has another endpoint
}

// refusedRetry is the longest pause before an instance is tried again that could not be registered: what it waits for
// may have been put right, and it costs money while it serves nothing.
const refusedRetry = time.Minute

// noteRefused keeps the refusals of a round, and those that the round did not try again.
func (a *applier) noteRefused(deployment string, round *steps) {
	a.mu.Lock()
	defer a.mu.Unlock()
	before, kept := a.refused[deployment], map[string]refusal{}
	maps.Copy(kept, round.paused)
	for _, i := range round.register {
		if err := round.refused[i.Name]; err != nil {
			n := before[i.Name].n + 1
			kept[i.Name] = refusal{
				endpoint: i.Endpoint, n: n, message: messageOf(err),
				retryAt: time.Now().Add(min(backoff(n), refusedRetry)),
			}
		}
	}
	if len(kept) == 0 {
		delete(a.refused, deployment)
		return
	}
	a.refused[deployment] = kept
}

// refusedOf are the instances of a deployment that could not be registered, by name.
func (a *applier) refusedOf(deployment string) map[string]refusal {
	a.mu.Lock()
	defer a.mu.Unlock()
	refused := maps.Clone(a.refused[deployment])
	for name, r := range refused {
		r.paused = time.Now().Before(r.retryAt)
		refused[name] = r
	}
	return refused
}
