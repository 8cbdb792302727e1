package scale

import (
	"cmp"
	"errors"
	"maps"
	"strings"
	"sync"
	"time"
)

// notes are what the applier knows of one deployment besides its row. They are lost with the term.
type notes struct {
	round   *round // under way; nil where there is none
	removed string // removals that the deployment, if it is unlisted, was last told
	notice  string // about the last removal, see ErrCarriedOut
	failed  failedOrders
	refused map[string]refusal // instances, by name
}

// round is what is done for one deployment at a time: its backend is asked, the report written, and an order given.
type round struct {
	urgent <-chan struct{} // closed when it, or another one behind it, was asked for: it waits for no other round
	hurry  func()          // closes urgent
	again  bool            // another one was asked for: something changed since it read
}

// failedOrders are the orders of a deployment in a row that start nothing and failed. They tell nothing about starts:
// they block none, and are forgotten when an order was carried out.
type failedOrders struct {
	n       int
	retryAt time.Time
	message string // of the last one
}

// removeRetry is the longest pause after an order that starts nothing and failed: what it removes costs money.
const removeRetry = 15 * time.Second

// noted reads or changes the notes of a deployment.
func (a *applier) noted(deployment string, do func(*notes)) {
	a.mu.Lock()
	defer a.mu.Unlock()
	n := a.notes[deployment]
	if n == nil {
		n = &notes{}
		a.notes[deployment] = n
	}
	do(n)
}

// retain forgets what was noted about deployments that were removed: one that gets the name of another is not that one.
func (a *applier) retain(rows []applied) {
	exists := make(map[string]bool, len(rows))
	for _, s := range rows {
		exists[s.Name] = true
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	maps.DeleteFunc(a.notes, func(name string, n *notes) bool {
		if exists[name] {
			return false
		}
		*n = notes{round: n.round}
		return n.round == nil
	})
}

// changing are the deployments that have a round.
func (a *applier) changing() map[string]bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	names := map[string]bool{}
	for name, n := range a.notes {
		if n.round != nil {
			names[name] = true
		}
	}
	return names
}

// begin begins a round of the deployment, or returns nil where one is under way. Another one that was asked for is not
// lost then: it follows that one, which does not wait for other rounds any more.
func (a *applier) begin(deployment string, asked bool) (begun *round) {
	a.noted(deployment, func(n *notes) {
		if n.round == nil {
			urgent := make(chan struct{})
			begun = &round{urgent: urgent, hurry: sync.OnceFunc(func() { close(urgent) })}
			n.round = begun
		} else if asked {
			n.round.again = true
		}
		if asked {
			n.round.hurry()
		}
	})
	return begun
}

// end notes the end of a round, and says whether another round was asked for meanwhile.
func (a *applier) end(deployment string) (again bool) {
	a.noted(deployment, func(n *notes) { again, n.round = n.round.again, nil })
	return again
}

// answered notes what keeps a backend from removing instances, or from removing them as it should: until it carries out
// an order, or removes some without that.
func (n *notes) answered(o Order, err error, now time.Time) {
	carriedOut := errors.Is(err, ErrCarriedOut)
	switch {
	case carriedOut:
		n.notice = messageOf(err)
	case err == nil && len(o.Remove) > 0:
		n.notice = ""
	}
	switch {
	case err == nil || carriedOut:
		n.failed = failedOrders{}
	case !o.starts():
		failed := n.failed.n + 1
		pause := max(min(backoff(failed), removeRetry), pauseAfter(err, 0))
		n.failed = failedOrders{n: failed, retryAt: now.Add(pause), message: messageOf(err)}
	}
}

// message is what keeps a backend from removing instances, for people; empty where nothing does.
func (n *notes) message() string { return cmp.Or(n.failed.message, n.notice) }

// waits says whether an order is not to be given yet, because those before it failed that start nothing either.
func (n *notes) waits(o Order, now time.Time) bool {
	return !o.starts() && now.Before(n.failed.retryAt)
}

// isNews says whether an order to a backend that lists nothing differs from the one that it confirmed.
func (n *notes) isNews(s applied, o *Order) bool {
	same := o.Count == s.Ordered && s.AppliedID == s.OrderID && n.removed == strings.Join(o.Remove, " ")
	return !same || s.AppliedAt == nil || s.now().Sub(*s.AppliedAt) >= confirmUnlisted
}
