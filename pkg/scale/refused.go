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

// refuse keeps the refusals of a round, and those that the round did not try again.
func (n *notes) refuse(round *steps, now time.Time) {
	kept := map[string]refusal{}
	maps.Copy(kept, round.paused)
	for _, i := range round.register {
		if err := round.refused[i.Name]; err != nil {
			tries := n.refused[i.Name].n + 1
			kept[i.Name] = refusal{
				endpoint: i.Endpoint, n: tries, message: messageOf(err),
				retryAt: now.Add(min(backoff(tries), refusedRetry)),
			}
		}
	}
	n.refused = kept
}

// refusedAt are the instances that could not be registered, by name.
func (n *notes) refusedAt(now time.Time) map[string]refusal {
	refused := maps.Clone(n.refused)
	for name, r := range refused {
		r.paused = now.Before(r.retryAt)
		refused[name] = r
	}
	return refused
}
