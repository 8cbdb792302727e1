package main

import (
	"math/rand/v2"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/penstock/penstock/chaos/judge"
	"github.com/penstock/penstock/chaos/pgproxy"
)

// rule is a fault that waits for its occasion: transactions of a kind, on links whose names begin
// with link.
type rule struct {
	link    string
	kind    pgproxy.Kind // empty: any
	fault   pgproxy.Fault
	code    string // SQLSTATE
	delay   time.Duration
	chance  float64
	left    int
	until   time.Time
	onlyEnd bool // only groups that end a transaction
}

// sqlstates are the errors that are injected, at any statement.
var sqlstates = []string{
	"40001", "40P01", "55P03", "57014", "57P01", "57P02", "57P03", "53300", "53100", "53200", "25006", "08006",
	"08003", "58030", "XX000",
}

// faultKey is a row of the table of what happened.
type faultKey struct {
	kind  pgproxy.Kind
	fault string
}

// policy holds the rules that are armed, kills processes for those that ask for it, and counts.
type policy struct {
	mu      sync.Mutex
	random  *rand.Rand
	rules   []*rule
	killer  func(link string)
	happens map[faultKey]int
	commits map[pgproxy.Kind]int
	beats   []judge.Beat
	named   func(link string) string // current incarnation of the process of a link
	base    bool                     // transactions meet faults without a rule, by chance
}

// baseChance is the share of transactions of each kind that meet a fault at their commit at any
// time. Kinds that are rare meet it more often.
var baseChance = map[pgproxy.Kind]float64{
	pgproxy.Push: 0.06, pgproxy.Claim: 0.06, pgproxy.Finish: 0.06, pgproxy.Recover: 0.3, pgproxy.Cron: 0.15,
	pgproxy.Elect: 0.1, pgproxy.Beat: 0.03,
}

// baseFaults are those faults; one of them is drawn.
var baseFaults = append(
	slices.Repeat([]pgproxy.Fault{pgproxy.Swallow}, 10),
	pgproxy.Late, pgproxy.Late, pgproxy.Mute, pgproxy.Unsent, pgproxy.Unsent, pgproxy.CutBefore,
)

func newPolicy(seed uint64) *policy {
	return &policy{
		random: rand.New(rand.NewPCG(seed, 2)), happens: map[faultKey]int{}, commits: map[pgproxy.Kind]int{},
		named: func(link string) string { return link }, killer: func(string) {},
	}
}

func (p *policy) arm(r rule) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.rules = append(p.rules, &r)
}

// begin lets transactions meet faults by chance.
func (p *policy) begin() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.base = true
}

// disarm ends all faults at transactions.
func (p *policy) disarm() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.rules, p.base = nil, false
}

// Decide implements pgproxy.Policy.
func (p *policy) Decide(link *pgproxy.Link, kind pgproxy.Kind, commits bool) pgproxy.Decision {
	p.mu.Lock()
	defer p.mu.Unlock()
	now := time.Now()
	kept := p.rules[:0]
	for _, r := range p.rules {
		if r.left > 0 && (r.until.IsZero() || now.Before(r.until)) {
			kept = append(kept, r)
		}
	}
	p.rules = kept
	for _, r := range p.rules {
		if !strings.HasPrefix(link.Name, r.link) || r.kind != "" && r.kind != kind ||
			r.kind == "" && kind == pgproxy.Other {
			continue
		}
		if r.onlyEnd && !commits || p.random.Float64() >= r.chance {
			continue
		}
		r.left--
		name := link.Name
		return pgproxy.Decision{
			Fault:    r.fault,
			SQLSTATE: r.code,
			Delay:    r.delay,
			Kill:     func() { p.killer(name) },
		}
	}
	if p.base && commits && p.random.Float64() < baseChance[kind] {
		delay := time.Duration(p.random.Int64N(int64(2 * time.Second)))
		return pgproxy.Decision{Fault: baseFaults[p.random.IntN(len(baseFaults))], Delay: delay}
	}
	return pgproxy.Decision{}
}

// Happened implements pgproxy.Policy.
func (p *policy) Happened(_ *pgproxy.Link, kind pgproxy.Kind, fault pgproxy.Fault) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.happens[faultKey{kind, fault.String()}]++
}

// Committed implements pgproxy.Policy.
func (p *policy) Committed(link *pgproxy.Link, kind pgproxy.Kind, at time.Time) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.commits[kind]++
	if kind == pgproxy.Beat {
		p.beats = append(p.beats, judge.Beat{Process: p.named(link.Name), At: at})
	}
}
