package main

import (
	"context"
	"fmt"
	"math/rand/v2"
	"slices"
	"time"

	"github.com/penstock/penstock/chaos/pgproxy"
	"github.com/penstock/penstock/internal/devpostgres"
)

// step is one fault of the plan: its share among the others and what it does. It returns the name
// it is counted under.
type step struct {
	share int
	do    func(p *plan) string
}

// plan brings about one fault after another. Which ones, when and how long follows from the seed
// alone; what they meet in the programs depends on the machine as well.
type plan struct {
	site   *site
	random *rand.Rand
	done   map[string]int
	skip   map[string]bool
	ctx    context.Context
}

func newPlan(s *site, seed uint64) *plan {
	return &plan{
		site:   s,
		random: rand.New(rand.NewPCG(seed, 3)),
		done:   map[string]int{},
		skip:   map[string]bool{},
	}
}

var steps = []step{
	{10, (*plan).killNode},
	{4, (*plan).killLeader},
	{5, (*plan).freeze},
	{4, (*plan).pause},
	{4, (*plan).deafen},
	{4, (*plan).drainNode},
	{1, (*plan).rollingRestart},
	{14, (*plan).loseAnswers},
	{6, (*plan).slowCommits},
	{8, (*plan).killAtCommit},
	{10, (*plan).injectError},
	{6, (*plan).cutLink},
	{5, (*plan).slowLink},
	{5, (*plan).blackhole},
	{4, (*plan).killBackends},
	{2, (*plan).restartDatabase},
	{2, (*plan).lockTables},
	{8, (*plan).holdRows},
	{1, (*plan).useUpConnections},
	{1, (*plan).holdSnapshot},
	{8, (*plan).spoilWorkers},
	{1, (*plan).jumpClock},
	{2, (*plan).fillDisk},
}

// restartsBetweenBuilds is the share of rolling restarts where these change builds, and are what the run is for.
const restartsBetweenBuilds = 10

// rareSteps stand in for steps where many recoveries and elections are wanted: nodes die, and leaders are left
// alone but for the answers that they lose.
var rareSteps = []step{
	{40, (*plan).killNode},
	{1, (*plan).killLeader},
	{1, (*plan).freeze},
	{4, (*plan).pause},
	{2, (*plan).deafen},
	{2, (*plan).drainNode},
	{4, (*plan).killAtCommit},
	{2, (*plan).injectError},
	{1, (*plan).cutLink},
	{1, (*plan).slowLink},
	{1, (*plan).killBackends},
	{1, (*plan).restartDatabase},
	{2, (*plan).holdRows},
	{4, (*plan).spoilWorkers},
}

// holdSteps stand in for them where endings shall meet locked rows, and their nodes live on afterwards.
var holdSteps = []step{
	{60, (*plan).holdRows},
	{4, (*plan).killNode},
	{4, (*plan).pause},
	{4, (*plan).loseAnswers},
	{4, (*plan).injectError},
	{4, (*plan).spoilWorkers},
	{2, (*plan).drainNode},
	{2, (*plan).killLeader},
}

// stopSteps stand in for them where nodes shall go on with runs that others have by then.
var stopSteps = []step{
	{40, (*plan).freezeNode},
	{4, (*plan).killNode},
	{4, (*plan).loseAnswers},
	{4, (*plan).slowLink},
	{4, (*plan).spoilWorkers},
}

// refuseSteps stand in for them where entries of a key shall be handed back while others of it wait behind them: a
// worker that refuses calls keeps its nodes and their connections as they are.
var refuseSteps = []step{
	{40, (*plan).refuse},
	{4, (*plan).spoilWorkers},
	{2, (*plan).killNode},
	{2, (*plan).loseAnswers},
}

// killSteps stand in for them where nothing but the death of task nodes is measured. A node is dead and recovered
// before the next one dies, nearly always: a fleet that falls silent together is given a second lease.
var killSteps = []step{{1, func(p *plan) string {
	p.rest(p.site.cfg.lease+time.Second, 2*p.site.cfg.lease+time.Second)
	return p.killNode()
}}}

// run does steps until ctx ends. What happens once in a run has its time in it.
func (p *plan) run(ctx context.Context) {
	p.ctx = ctx
	steps, total := steps, 0
	switch {
	case p.site.cfg.kills:
		steps = killSteps
	case p.site.cfg.rare:
		steps = rareSteps
	case p.site.cfg.holds:
		steps = holdSteps
	case p.site.cfg.stops:
		steps = stopSteps
	case p.site.cfg.refuses:
		steps = refuseSteps
	case p.site.cfg.before != "":
		steps = append(slices.Clone(steps), step{restartsBetweenBuilds, (*plan).rollingRestart})
	}
	if len(p.site.gateways) > 0 {
		steps = slices.Concat(steps, gatewaySteps)
	}
	if p.site.cfg.partitions {
		steps = slices.Concat(steps, partitionSteps)
	}
	for _, s := range steps {
		total += s.share
	}
	began := time.Now()
	appointments := []struct {
		after time.Duration
		do    func(*plan) string
	}{{p.site.cfg.run / 3, (*plan).fillDisk}, {p.site.cfg.run / 2, (*plan).promote}}
	for ctx.Err() == nil {
		if len(appointments) > 0 && time.Since(began) > appointments[0].after {
			if name := appointments[0].do(p); name != "" {
				p.done[name]++
			}
			appointments = appointments[1:]
		}
		roll := p.random.IntN(total)
		for _, s := range steps {
			if roll -= s.share; roll < 0 {
				if name := s.do(p); name != "" {
					p.done[name]++
				}
				break
			}
		}
		p.rest(200*time.Millisecond, 900*time.Millisecond)
	}
}

// rest waits for a time between two bounds; the time is drawn even if the run ends meanwhile.
func (p *plan) rest(from, to time.Duration) {
	select {
	case <-time.After(p.between(from, to)):
	case <-p.ctx.Done():
	}
}

func (p *plan) between(from, to time.Duration) time.Duration {
	return from + time.Duration(p.random.Int64N(int64(to-from)))
}

func (p *plan) leases(from, to float64) time.Duration {
	return time.Duration((from + (to-from)*p.random.Float64()) * float64(p.site.cfg.lease))
}

func pick[T any](p *plan, list []T) T { return list[p.random.IntN(len(list))] }

func (p *plan) killNode() string {
	n, back := pick(p, p.site.nodes), p.between(0, 4*time.Second)
	if n.kill() {
		p.site.startLater(n, back)
		return "kill -9 of a task node"
	}
	return ""
}

func (p *plan) killLeader() string {
	l, back := pick(p, p.site.leaders), p.between(0, 3*time.Second)
	if l.kill() {
		p.disturbedBy(l, "kill -9", back)
		p.site.startLater(l, back)
		return "kill -9 of a leader"
	}
	return ""
}

func (p *plan) freeze() string { return p.freezeOne(slices.Concat(p.site.nodes, p.site.leaders)) }

func (p *plan) freezeNode() string { return p.freezeOne(p.site.nodes) }

func (p *plan) freezeOne(of []*process) string {
	one, d := pick(p, of), p.leases(1.2, 3)
	if one.freeze(d, p.site.cfg.lease) {
		p.disturbedBy(one, "SIGSTOP", d)
		return "SIGSTOP for 1.2 to 3 leases of a " + one.kind
	}
	return ""
}

// pause stops a task node for less than its lease: nobody may be given its locks.
func (p *plan) pause() string {
	one, d := pick(p, p.site.nodes), p.leases(0.3, 0.7)
	if one.freeze(d, p.site.cfg.lease) {
		return "SIGSTOP for 0.3 to 0.7 leases of a tasknode"
	}
	return ""
}

// deafen drops the hints that a process is sent: it has to find its work by itself.
func (p *plan) deafen() string {
	one := p.someLink()
	one.link.Deaf(true)
	time.AfterFunc(p.between(time.Second, 8*time.Second), func() { one.link.Deaf(false) })
	return "notifications dropped for a while"
}

// disturbedBy notes what keeps a leader from its work.
func (p *plan) disturbedBy(one *process, what string, lasts time.Duration) {
	if one.kind == "leader" {
		p.site.disturbed(what+" of a leader", time.Now(), lasts)
	}
}

func (p *plan) drainNode() string {
	n := pick(p, p.site.nodes)
	go func() {
		n.drain()
		p.site.startLater(n, 0)
	}()
	return "SIGTERM of a task node"
}

func (p *plan) rollingRestart() string {
	for _, one := range append(append([]*process{}, p.site.leaders...), p.site.nodes...) {
		if p.ctx.Err() != nil {
			break
		}
		one.change()
		p.disturbedBy(one, "rolling restart", 2*time.Second)
		one.drain()
		p.site.startLater(one, 0)
		p.rest(500*time.Millisecond, time.Second)
	}
	if p.site.cfg.before != "" {
		return "rolling restart of all programs to the other build"
	}
	return "rolling restart of all programs"
}

// loseAnswers arms faults after, and between, the rows and the commit.
func (p *plan) loseAnswers() string {
	kind := pick(p, pgproxy.Kinds)
	fault := pick(
		p,
		[]pgproxy.Fault{
			pgproxy.Swallow,
			pgproxy.Swallow,
			pgproxy.Swallow,
			pgproxy.Mute,
			pgproxy.Late,
			pgproxy.Unsent,
			pgproxy.CutBefore,
		},
	)
	p.site.policy.arm(rule{
		kind: kind, fault: fault, chance: 0.5, left: 1 + p.random.IntN(6), delay: p.leases(0.1, 1.5), onlyEnd: true,
		until: time.Now().Add(p.between(time.Second, 4*time.Second)),
	})
	return ""
}

// slowCommits holds up the commits of one kind for a while, after their statements have been run: it is common then
// that one transaction changes rows that another one has read. Half of the times it is claims, which share limits.
func (p *plan) slowCommits() string {
	kind := pick(p, append([]pgproxy.Kind{
		pgproxy.Claim, pgproxy.Claim, pgproxy.Claim, pgproxy.Claim, pgproxy.Claim,
	}, pgproxy.Kinds...))
	lasts := p.between(time.Second, 4*time.Second)
	p.site.policy.arm(rule{
		kind: kind, fault: pgproxy.Slow, chance: 0.8, left: 200, onlyEnd: true,
		delay: p.between(50*time.Millisecond, slowMax), until: time.Now().Add(lasts),
	})
	return ""
}

func (p *plan) killAtCommit() string {
	p.site.policy.arm(rule{
		kind: pick(
			p,
			pgproxy.Kinds,
		), fault: pick(p, []pgproxy.Fault{pgproxy.KillBefore, pgproxy.KillAfter}), chance: 0.5, left: 1,
		onlyEnd: true, until: time.Now().Add(3 * time.Second),
	})
	return ""
}

func (p *plan) injectError() string {
	p.site.policy.arm(rule{
		kind: pick(
			p,
			append([]pgproxy.Kind{""}, pgproxy.Kinds...),
		), fault: pgproxy.Refuse, code: pick(p, sqlstates), chance: 0.5,
		left: 1 + p.random.IntN(4), until: time.Now().Add(3 * time.Second),
	})
	return ""
}

func (p *plan) someLink() *process {
	return pick(p, append(append([]*process{}, p.site.nodes...), p.site.leaders...))
}

func (p *plan) cutLink() string {
	one, refuse := p.someLink(), p.between(0, 3*time.Second)
	p.disturbedBy(one, "refused connections", refuse)
	one.kept(refuse)
	one.link.Refuse(true)
	one.link.Cut()
	time.AfterFunc(refuse, func() { one.link.Refuse(false) })
	return "connections cut and refused for a while"
}

func (p *plan) slowLink() string {
	one := p.someLink()
	one.link.Delay(p.between(20*time.Millisecond, 700*time.Millisecond))
	lasts := p.between(time.Second, 5*time.Second)
	p.disturbedBy(one, "slow connections", lasts)
	one.kept(lasts)
	time.AfterFunc(lasts, func() { one.link.Delay(0) })
	return "connections slow for a while"
}

func (p *plan) blackhole() string {
	one, way, d := p.someLink(), p.random.IntN(3), p.leases(0.3, 2.5)
	if d > p.site.cfg.lease/2 {
		one.cutOff()
	}
	p.disturbedBy(one, "black hole", d)
	one.kept(d)
	one.link.Blackhole(way != 1, way != 0)
	time.AfterFunc(d, func() {
		one.link.Blackhole(false, false)
		one.link.Cut() // what was swallowed leaves the two sides without a common state
	})
	return "connections black-holed " + []string{"to the server", "from the server", "both ways"}[way]
}

func (p *plan) killBackends() string {
	ctx, cancel := context.WithTimeout(p.ctx, 5*time.Second)
	defer cancel()
	p.site.disturbed("backends terminated", time.Now(), 0)
	if n, err := p.site.db.killBackends(ctx, 0.1+0.5*p.random.Float64()); err != nil || n == 0 {
		return ""
	}
	return "backends of Postgres terminated"
}

func (p *plan) restartDatabase() string {
	if p.site.standby != nil && p.site.standby.promoted {
		return ""
	}
	how := pick(p, []devpostgres.Signal{devpostgres.Immediate, devpostgres.Crash, devpostgres.Fast})
	down := p.between(0, 3*time.Second)
	began := time.Now()
	defer func() { p.site.disturbed("restart of Postgres", began, time.Since(began)) }()
	if err := p.site.db.restart(context.WithoutCancel(p.ctx), how, down); err != nil {
		p.site.fail(fmt.Errorf("restart Postgres: %w", err))
		return ""
	}
	p.site.restarted()
	return "restart of Postgres: " + map[devpostgres.Signal]string{
		devpostgres.Immediate: "immediate", devpostgres.Crash: "kill -9", devpostgres.Fast: "fast",
	}[how]
}

func (p *plan) lockTables() string {
	ctx, cancel := context.WithTimeout(p.ctx, 15*time.Second)
	defer cancel()
	table := pick(p, []string{"ready", "lock", "node", "queue", "slot"})
	began := time.Now()
	defer func() { p.site.disturbed("table "+table+" locked", began, time.Since(began)) }()
	if p.site.db.lockTable(ctx, table, p.between(time.Second, 5*time.Second)) != nil {
		return ""
	}
	return "a hot table locked for up to 5 s"
}

// holdRows keeps some of the entries that run, or their lock records, locked by another transaction: their endings
// have to wait, and no other ones.
func (p *plan) holdRows() string {
	rows, n, hold := pick(p, []string{"entries", "lock records"}), 1+p.random.IntN(4), p.leases(0.2, 2)
	p.site.disturbed("rows held", time.Now(), hold)
	go func() { _ = p.site.db.holdRows(p.ctx, rows == "entries", n, hold) }()
	return "some " + rows + " of what runs held for up to 2 leases"
}

func (p *plan) useUpConnections() string {
	began := time.Now()
	defer func() { p.site.disturbed("max_connections used up", began, time.Since(began)) }()
	if p.site.db.useUpConnections(p.ctx, p.between(time.Second, 3*time.Second)) == 0 {
		return ""
	}
	return "max_connections used up"
}

func (p *plan) holdSnapshot() string {
	hold := p.between(10*time.Second, 40*time.Second)
	go func() { _ = p.site.db.holdSnapshot(p.ctx, hold) }()
	return "a snapshot held for 10 to 40 s"
}

func (p *plan) spoilWorkers() string { return p.spoil(pick(p, modes)) }

// refuse lets workers refuse calls while they are idle.
func (p *plan) refuse() string { return p.spoil(busy) }

func (p *plan) spoil(m mode) string {
	p.site.recorder.behave(m, 20+p.random.Int64N(60))
	time.AfterFunc(p.between(time.Second, 4*time.Second), func() { p.site.recorder.behave(honest, 0) })
	return "worker: " + string(m)
}

// fillDisk leaves the server no space for a while. Once it has space again it must serve again.
func (p *plan) fillDisk() string {
	if p.site.disk == nil {
		return ""
	}
	began := time.Now()
	defer func() { p.site.disturbed("disk full", began, time.Since(began)) }()
	if err := p.site.disk.fill(); err != nil {
		p.site.fail(fmt.Errorf("fill the disk: %w", err))
	}
	p.rest(time.Second, 5*time.Second)
	p.site.disk.free()
	if err := p.site.db.revive(context.WithoutCancel(p.ctx)); err != nil {
		p.site.fail(fmt.Errorf("after the disk was full: %w", err))
	}
	return "disk full for up to 5 s"
}

// promote makes the standby the primary while the old one is up and keeps the connections that it
// has for a while. It happens once in a run.
func (p *plan) promote() string {
	if p.site.standby == nil || p.site.standby.promoted {
		return ""
	}
	began := time.Now()
	defer func() { p.site.disturbed("promotion of the standby", began, time.Since(began)) }()
	if err := p.site.promote(context.WithoutCancel(p.ctx), p.between(time.Second, 4*time.Second)); err != nil {
		p.site.fail(fmt.Errorf("promote the standby: %w", err))
	}
	return "standby promoted, the old primary still up"
}

func (p *plan) jumpClock() string {
	if p.site.db.clock == nil || !p.site.cfg.clock {
		return ""
	}
	ahead := time.Duration(p.random.IntN(121)-60) * time.Minute
	p.site.furthest = max(p.site.furthest, ahead)
	if err := p.site.db.clock.jump(ahead); err != nil {
		p.site.fail(err)
	}
	p.site.disturbed("jump of the clock", time.Now(), 0)
	return "the server's clock jumped by up to an hour"
}
