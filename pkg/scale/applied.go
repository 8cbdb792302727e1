package scale

import (
	"slices"
	"time"

	"github.com/jackc/pgx/v5"
)

// applied is a deployment whose number is applied: its row, and what a round knows of it besides.
type applied struct {
	deploymentRow

	readAt time.Time // At by the clock of this machine
	full   bool      // bounds and the budget have no room for one instance more than desired
	behind bool      // a deployment of the model that is filled later has instances in the same backend
	frees  bool      // another one of the model is about to have fewer there
	// Instances that the backend reported and that could not be registered when they were last tried, by name.
	refused map[string]refusal
	// Instances of the model that belong to no deployment and have the name or the endpoint of one that the backend
	// reported.
	others []registration
}

// readDeployment notes when a row was read: the times in it are compared with the clock of the database.
func readDeployment(row pgx.CollectableRow) (applied, error) {
	s, err := pgx.RowToStructByName[deploymentRow](row)
	s.read()
	return applied{deploymentRow: s, readAt: time.Now()}, err
}

// withoutResting leaves out deployments at rest but for those whose reports are oldest: asking the backends of a
// thousand idle models once a second would hold up the one that is waited for.
func withoutResting(rows []applied, now time.Time) []applied {
	var old, kept []applied
	for _, s := range rows {
		switch {
		case !s.rests():
			kept = append(kept, s)
		case now.Sub(*s.SeenAt) >= restEvery:
			old = append(old, s)
		}
	}
	slices.SortFunc(old, func(a, b applied) int { return a.SeenAt.Compare(*b.SeenAt) })
	return append(kept, old[:min(len(old), restMax)]...)
}

// now is the time by the clock of the database, which all times of the row are from.
func (s applied) now() time.Time {
	if s.At.IsZero() {
		return time.Now()
	}
	return s.At.Add(time.Since(s.readAt))
}

// bounded notes which deployments may not have one instance more than desired, not even while they replace one.
func bounded(deployments []applied, now time.Time) {
	cost := 0.0
	for _, s := range deployments {
		if s.Cost <= costMax { // not so if it is no number
			cost += float64(s.atMost(now)) * s.Cost
		}
	}
	for i := range deployments {
		s := &deployments[i]
		p := s.policy.WithDefaults()
		s.full = s.Budget > 0 && !(cost+s.Cost <= s.Budget)
		for _, most := range []int{p.Max, p.EmergencyMax, int(s.MaxAll)} {
			s.full = s.full || most > 0 && s.Desired >= most
		}
	}
}

// neighbours notes for each deployment which room others of its model have in the same backend, or give up. Those of
// a model come one after another, in the order in which they are filled.
func neighbours(deployments []applied, now time.Time) {
	for len(deployments) > 0 {
		n := 1
		for n < len(deployments) && deployments[n].Model == deployments[0].Model {
			n++
		}
		neighboursOfModel(deployments[:n], now)
		deployments = deployments[n:]
	}
}

// neighboursOfModel is neighbours for the deployments of one model.
func neighboursOfModel(deployments []applied, now time.Time) {
	for i := range deployments {
		s := &deployments[i]
		for j := range deployments {
			other := &deployments[j]
			if i == j || other.Backend != s.Backend {
				continue
			}
			s.behind = s.behind || j > i && other.Existing != nil && *other.Existing > 0
			leaves := func(name string) bool { return !other.overdue(name, now) }
			s.frees = s.frees || slices.ContainsFunc(other.Removing, leaves)
		}
	}
}
