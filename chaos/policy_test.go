package main

import (
	"testing"
	"time"

	"github.com/penstock/penstock/chaos/pgproxy"
)

// The report does not count the time in which a leader was held up against its recovery. That time is what the proxy
// saw: a delay may be longer than a lease, and a leader may give up before it is over.
func TestTheTimeInWhichALeaderIsHeldUpIsTheOneThatWasSeen(t *testing.T) {
	now := time.Now()
	for _, kind := range []pgproxy.Kind{pgproxy.Recover, pgproxy.Renew, pgproxy.Elect} {
		for _, fault := range []pgproxy.Fault{pgproxy.Swallow, pgproxy.Late, pgproxy.Mute, pgproxy.Slow} {
			p := newPolicy(1, false)
			over := p.Happened(nil, pgproxy.Group{Kind: kind}, fault, now)
			list := p.heldUp(now.Add(4 * time.Second))
			if len(list) != 1 || !list[0].From.Equal(now) || !list[0].To.Equal(now.Add(4*time.Second)) {
				t.Fatalf("%s, %v: while it lasts: %+v", kind, fault, list)
			}
			over(now.Add(9 * time.Second))
			list = p.heldUp(now.Add(time.Hour))
			if d := list[0]; len(list) != 1 || !d.From.Equal(now) || !d.To.Equal(now.Add(9*time.Second)) {
				t.Errorf("%s, %v: from %v to %v", kind, fault, d.From.Sub(now), d.To.Sub(now))
			}
		}
	}
	p := newPolicy(1, false)
	p.Happened(nil, pgproxy.Group{Kind: pgproxy.Push}, pgproxy.Slow, now)(now)
	if list := p.heldUp(now); len(list) != 0 {
		t.Errorf("a push: %v", list)
	}
}

// A fault at a pass over due entries costs a leader that pass, from when it begins until it is over.
func TestFaultsInThePassOfDueEntriesAreDisturbances(t *testing.T) {
	now := time.Now()
	for _, kind := range []pgproxy.Kind{pgproxy.Promote, pgproxy.Expire} {
		p := newPolicy(1, false)
		over := p.Happened(nil, pgproxy.Group{Kind: kind}, pgproxy.Late, now)
		if list := p.refusals(); len(list) != 1 || !list[0].To.Equal(now.Add(refusalCost)) {
			t.Errorf("%s: %v while it lasts", kind, list)
		}
		over(now.Add(2 * time.Second))
		if list := p.refusals(); len(list) != 1 || !list[0].From.Equal(now) || !list[0].To.Equal(now.Add(2*time.Second+refusalCost)) {
			t.Errorf("%s: %v afterwards", kind, list)
		}
	}
}

// An error costs a leader the pass in which entries come in line. Errors of other duties and programs do not.
func TestErrorsInThePassOfDueEntriesAreDisturbances(t *testing.T) {
	sites := map[string]bool{
		"commit #1": true, "SELECT set_config('statement_timeout', '2000', true #2": true, "SELECT id, name, kind #3": true,
		"SELECT extract(epoch FROM least( (SELECT min(due_at #4": true, "WITH due AS MATERIALIZED ( SELECT ctid #5": true,
		"SELECT id FROM penstock.batch WHERE ended_at IS NULL #6": false,
	}
	for site, counts := range sites {
		for _, incarnation := range []string{"l1.2", "n1.2", "g1.2"} {
			p := newPolicy(1, false)
			p.note(pgproxy.Group{Kind: pgproxy.Other, Site: site}, incarnation, "57P01")
			if want := counts && incarnation == "l1.2"; (len(p.refusals()) == 1) != want {
				t.Errorf("%s at %s: %v, want a disturbance: %v", site, incarnation, p.refusals(), want)
			}
		}
	}
}

// The commits of each kind are those of a run of eight minutes, five times: with one share for all of its time, a kind
// was lost 320 times and another 1,600 times.
func TestAsManyAnswersOfEachKindAreLost(t *testing.T) {
	commits := map[pgproxy.Kind]int{
		pgproxy.Push: 4000, pgproxy.Claim: 4600, pgproxy.Finish: 6600, pgproxy.Recover: 550, pgproxy.Cron: 320,
		pgproxy.Renew: 570, pgproxy.Beat: 5000,
	}
	for seed := range uint64(5) {
		p := newPolicy(seed, true)
		p.begin()
		link := &pgproxy.Link{Name: "n1"}
		due := map[pgproxy.Kind]float64{}
		for range 5 * 320 {
			for _, kind := range pgproxy.Frequent {
				for due[kind] += float64(commits[kind]) / 320; due[kind] >= 1; due[kind]-- {
					now := time.Now()
					if d := p.Decide(link, pgproxy.Group{Kind: kind, Commits: true}); d.Fault != pgproxy.Pass {
						p.Happened(link, pgproxy.Group{Kind: kind}, d.Fault, now)(now)
					}
				}
			}
		}
		for _, kind := range pgproxy.Frequent {
			if lost := p.lost(kind); lost < 1000 || lost > 1500 {
				t.Errorf("seed %d: %d answers to a %s were lost", seed, lost, kind)
			}
		}
	}
}
