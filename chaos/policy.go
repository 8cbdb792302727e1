package main

import (
	"math/rand/v2"
	"regexp"
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

// slowMax is the longest time for which a commit is held.
const slowMax = 400 * time.Millisecond

// sqlstates are the errors that are injected, at any statement.
var sqlstates = []string{
	"40001", "40P01", "55P03", "57014", "57P01", "57P02", "57P03", "53300", "53100", "53200", "25006", "08006",
	"08003", "58030", "XX000",
}

// finalStates are those after which a node does not send an ending again: it leaves the entry to recovery.
var finalStates = []string{"58030", "XX000"}

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
	named   func(link string) string  // current incarnation of the process of a link
	working map[string]time.Time      // since when an incarnation does more than start
	rare    bool                      // as many answers of each kind are lost
	base    bool                      // transactions meet faults without a rule, by chance
	faults  []pgproxy.Fault           // one of them is drawn
	tried   map[string]map[string]int // SQLSTATEs injected, by call site and code
	seen    map[string]int            // groups of messages, by call site
	final   []judge.Death             // statements that met an error of finalStates
	unheard []judge.Death             // faults at heartbeats, by incarnation
	held    []heldStatement           // by faults that let a process wait
	delayed []judge.Disturbance       // faults at answers to terms and recoveries; To is zero while one lasts
	refused []judge.Disturbance       // SQLSTATEs and faults that leaders met in their pass over due entries

	atLeaders []judge.Disturbance // SQLSTATEs that leaders were answered at any statement
}

// baseChance is the share of transactions of each kind that meet a fault at their commit at any
// time. Kinds that are rare meet it more often.
var baseChance = map[pgproxy.Kind]float64{
	pgproxy.Push: 0.06, pgproxy.Claim: 0.06, pgproxy.Finish: 0.06, pgproxy.Recover: 0.3, pgproxy.Cron: 0.15,
	pgproxy.Renew: 0.1, pgproxy.Beat: 0.03, pgproxy.Elect: 0.2, pgproxy.Promote: 0.1, pgproxy.Expire: 0.2,
	pgproxy.Batch: 0.2,
}

// rareChance stands in for baseChance where a run is to lose as many answers of each kind: for a kind of which not many
// more were lost than of the one with the fewest. For others it is a quarter, and baseChance for kinds that are not
// frequent.
var rareChance = map[pgproxy.Kind]float64{
	pgproxy.Push: 0.15, pgproxy.Claim: 0.15, pgproxy.Finish: 0.15, pgproxy.Recover: 0.7, pgproxy.Cron: 0.9,
	pgproxy.Renew: 0.6, pgproxy.Beat: 0.15,
}

// rareLead is by how many lost answers a kind may be ahead of the one with the fewest, and still be short of them.
const rareLead = 20

// baseFaults are those faults; one of them is drawn.
var baseFaults = append(
	slices.Repeat([]pgproxy.Fault{pgproxy.Swallow}, 10),
	pgproxy.Late, pgproxy.Late, pgproxy.Mute, pgproxy.Unsent, pgproxy.Unsent, pgproxy.CutBefore,
)

// rareFaults stand in for baseFaults there: none that keeps a leader waiting for seconds.
var rareFaults = append(slices.Repeat([]pgproxy.Fault{pgproxy.Swallow}, 10), pgproxy.Unsent, pgproxy.CutBefore)

func newPolicy(seed uint64, rare bool) *policy {
	faults := baseFaults
	if rare {
		faults = rareFaults
	}
	return &policy{
		rare: rare, faults: faults,
		random: rand.New(rand.NewPCG(seed, 2)), happens: map[faultKey]int{}, commits: map[pgproxy.Kind]int{},
		named: func(link string) string { return link }, killer: func(string) {},
		working: map[string]time.Time{},
		tried:   map[string]map[string]int{}, seen: map[string]int{},
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
func (p *policy) Decide(link *pgproxy.Link, group pgproxy.Group) pgproxy.Decision {
	kind, commits := group.Kind, group.Commits
	incarnation := p.named(link.Name)
	p.mu.Lock()
	defer p.mu.Unlock()
	now := time.Now()
	if kind != pgproxy.Other && p.working[incarnation].IsZero() {
		p.working[incarnation] = now
	}
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
		if r.fault == pgproxy.Refuse {
			p.note(group, incarnation, r.code)
		}
		name := link.Name
		return pgproxy.Decision{
			Fault:    r.fault,
			SQLSTATE: r.code,
			Delay:    r.delay,
			Kill:     func() { p.killer(name) },
		}
	}
	since := p.working[incarnation]
	if p.base && group.Site != "" && !since.IsZero() && now.Sub(since) > settled {
		p.seen[group.Site]++
		// A site that is rarely passed meets an error at one pass in twenty. A pass of a leader's duty has a dozen
		// statements: it would seldom come to its commit.
		chance := 0.004
		if p.seen[group.Site] < 300 && !p.rare {
			chance = 0.05
		}
		if p.random.Float64() < chance {
			code := p.leastTried(group.Site)
			p.note(group, incarnation, code)
			return pgproxy.Decision{Fault: pgproxy.Refuse, SQLSTATE: code}
		}
	}
	if p.base && commits && p.random.Float64() < p.chance(kind) {
		delay := time.Duration(p.random.Int64N(int64(2 * time.Second)))
		return pgproxy.Decision{Fault: p.faults[p.random.IntN(len(p.faults))], Delay: delay}
	}
	return pgproxy.Decision{}
}

// chance is the share of the transactions of a kind that meet a fault at their commit. The caller holds mu.
func (p *policy) chance(kind pgproxy.Kind) float64 {
	if !p.rare || !slices.Contains(pgproxy.Frequent, kind) {
		return baseChance[kind]
	}
	fewest := p.lost(kind)
	for _, other := range pgproxy.Frequent {
		fewest = min(fewest, p.lost(other))
	}
	if p.lost(kind) > fewest+rareLead {
		return rareChance[kind] / 4
	}
	return rareChance[kind]
}

// lost is how many answers to commits of a kind were swallowed. The caller holds mu.
func (p *policy) lost(kind pgproxy.Kind) int {
	return p.happens[faultKey{kind, pgproxy.Swallow.String()}]
}

// settled is how long a process must have worked for errors to be injected at any of its statements.
// While it starts it reads and checks the schema, and an error that does not pass ends it, as it should.
const settled = 5 * time.Second

// refusalCost is what an error costs the duty of a leader that puts entries in line: the pass in which it came, and the
// pause after that. Half of the passes meet one in the first minutes, since a site that is rarely passed meets more.
const refusalCost = time.Second

// promoting is how the statements of that pass begin. Those of transactions and terms are of other duties as well.
var promoting = regexp.MustCompile(`(?i)^(begin|commit|SELECT set_config\('statement_timeout'|SELECT id, name,|` +
	`SELECT extract\(epoch FROM least\(|WITH due AS MATERIALIZED)`)

// note counts an SQLSTATE that a process is answered at a call site. The caller holds mu.
func (p *policy) note(group pgproxy.Group, incarnation, code string) {
	if p.tried[group.Site] == nil {
		p.tried[group.Site] = map[string]int{}
	}
	p.tried[group.Site][code]++
	if strings.HasPrefix(incarnation, "l") {
		now := time.Now()
		one := judge.Disturbance{What: "error", From: now, To: now.Add(refusalCost)}
		p.atLeaders = append(p.atLeaders, one)
		if promoting.MatchString(group.Site) {
			p.refused = append(p.refused, one)
		}
	}
	settles := group.Kind == pgproxy.Finish || group.Kind == pgproxy.Other // as the first statement of a settlement
	if settles && slices.Contains(finalStates, code) {
		p.final = append(p.final, judge.Death{Process: incarnation, At: time.Now()})
	}
}

// leastTried returns the SQLSTATE that a call site has met least often. The caller holds mu.
func (p *policy) leastTried(site string) string {
	first := p.random.IntN(len(sqlstates))
	least := sqlstates[first]
	for i := range sqlstates {
		if code := sqlstates[(first+i)%len(sqlstates)]; p.tried[site][code] < p.tried[site][least] {
			least = code
		}
	}
	return least
}

// Happened implements pgproxy.Policy. A fault counts as soon as it takes effect.
func (p *policy) Happened(
	link *pgproxy.Link, group pgproxy.Group, fault pgproxy.Fault, from time.Time,
) (over func(to time.Time)) {
	incarnation := ""
	if link != nil {
		incarnation = p.named(link.Name)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.happens[faultKey{group.Kind, fault.String()}]++
	ends := []func(to time.Time){p.notedHeld(incarnation, group, fault, from)}
	switch group.Kind {
	case pgproxy.Beat:
		i := len(p.unheard)
		p.unheard = append(p.unheard, judge.Death{Process: incarnation, At: from, Until: from})
		ends = append(ends, func(to time.Time) { p.unheard[i].Until = to })
	case pgproxy.Promote, pgproxy.Expire:
		i := len(p.refused)
		p.refused = append(p.refused, judge.Disturbance{What: fault.String(), From: from, To: from.Add(refusalCost)})
		ends = append(ends, func(to time.Time) { p.refused[i].To = to.Add(refusalCost) })
	case pgproxy.Recover, pgproxy.Renew, pgproxy.Elect:
		i := len(p.delayed)
		what := string(group.Kind) + ": " + fault.String()
		p.delayed = append(p.delayed, judge.Disturbance{What: what, From: from})
		ends = append(ends, func(to time.Time) { p.delayed[i].To = to })
	}
	return func(to time.Time) {
		p.mu.Lock()
		defer p.mu.Unlock()
		for _, end := range ends {
			end(to)
		}
	}
}

// heldStatement is a statement for which a process was kept waiting, or whose commit was.
type heldStatement struct {
	process, site string
	kind          pgproxy.Kind
	fault         pgproxy.Fault
	from, to      time.Time // to is zero while it lasts
}

// notedHeld notes a statement that a fault holds, until the function is called with the end of it. The caller holds mu.
func (p *policy) notedHeld(
	incarnation string, group pgproxy.Group, fault pgproxy.Fault, from time.Time,
) (over func(to time.Time)) {
	if fault != pgproxy.Mute && fault != pgproxy.Late && fault != pgproxy.Slow {
		return func(time.Time) {}
	}
	i := len(p.held)
	p.held = append(p.held, heldStatement{incarnation, group.Site, group.Kind, fault, from, time.Time{}})
	return func(to time.Time) { p.held[i].to = to }
}

// refusals are the times that errors at leaders cost these.
func (p *policy) refusals() []judge.Disturbance {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.refused)
}

// errorsAtLeaders are the times that errors at any statement of a leader cost it.
func (p *policy) errorsAtLeaders() []judge.Disturbance {
	p.mu.Lock()
	defer p.mu.Unlock()
	return slices.Clone(p.atLeaders)
}

// heldUp are the times for which leaders were kept waiting for answers; one that still waits does so until now.
func (p *policy) heldUp(now time.Time) []judge.Disturbance {
	p.mu.Lock()
	defer p.mu.Unlock()
	list := slices.Clone(p.delayed)
	for i := range list {
		if list[i].To.IsZero() {
			list[i].To = now
		}
	}
	return list
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
