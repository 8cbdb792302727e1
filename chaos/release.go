package main

import (
	"context"
	"fmt"
	"time"

	"github.com/penstock/penstock/chaos/pgproxy"
)

// A release run lasts until so many programs were killed, and so many answers to commits of each kind were swallowed.
const (
	releaseKills   = 500
	releaseAnswers = 1000
)

// untilReleased returns when a release run has met enough, or ctx ends.
func (s *site) untilReleased(ctx context.Context) {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	for said := time.Now(); ctx.Err() == nil; {
		missing := s.missingForRelease()
		if len(missing) == 0 {
			return
		}
		if time.Since(said) > 5*time.Minute {
			said = time.Now()
			fmt.Printf("chaos: %s, still missing: %q\n", said.UTC().Format(time.TimeOnly), missing)
		}
		select {
		case <-ctx.Done():
		case <-tick.C:
		}
	}
}

// missingForRelease says of which faults a release run has met too few.
func (s *site) missingForRelease() (list []string) {
	kills := 0
	for _, p := range s.all() {
		kills += p.kills()
	}
	if kills < releaseKills {
		list = append(list, fmt.Sprintf("%d programs were killed, %d are asked for", kills, releaseKills))
	}
	s.policy.mu.Lock()
	defer s.policy.mu.Unlock()
	for _, kind := range pgproxy.Frequent {
		if lost := s.policy.lost(kind); lost < releaseAnswers {
			list = append(list,
				fmt.Sprintf("%d answers to a %s were swallowed, %d are asked for", lost, kind, releaseAnswers))
		}
	}
	return list
}
