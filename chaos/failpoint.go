package main

import (
	"bytes"
	"encoding/json"
	"os"
	"strings"
	"time"

	"github.com/penstock/penstock/chaos/judge"
	"github.com/penstock/penstock/chaos/pgproxy"
)

// pointChance is the chance of each transaction of a kind to meet the end of its program before its commit, and
// again after it. Heartbeats come six times a lease from each node.
var pointChance = map[pgproxy.Kind]float64{
	pgproxy.Push: 0.002, pgproxy.Claim: 0.002, pgproxy.Finish: 0.002, pgproxy.Recover: 0.1, pgproxy.Cron: 0.03,
	pgproxy.Renew: 0.03, pgproxy.Beat: 0.003, pgproxy.Elect: 0.1, pgproxy.Promote: 0.01, pgproxy.Expire: 0.03,
	pgproxy.Batch: 0.03,
}

// beginFailpoints lets the programs end themselves around commits. A program reads its plan at its start, so
// those that run are started again.
func (s *site) beginFailpoints() {
	if !s.cfg.failpoints {
		return
	}
	type point struct {
		Name   string  `json:"name"`
		Text   string  `json:"text"`
		Before float64 `json:"before"`
		After  float64 `json:"after"`
	}
	plan := struct {
		Seed   uint64  `json:"seed"`
		Points []point `json:"points"`
	}{Seed: s.cfg.seed}
	for _, sign := range pgproxy.Signs() {
		chance := pointChance[sign.Kind]
		plan.Points = append(plan.Points, point{string(sign.Kind), sign.Text, chance, chance})
	}
	text, err := json.Marshal(plan)
	if err != nil {
		s.fail(err)
		return
	}
	s.setFailpoints(string(text))
}

// endFailpoints ends them, for all programs.
func (s *site) endFailpoints() {
	if s.cfg.failpoints {
		s.setFailpoints("")
	}
}

func (s *site) setFailpoints(plan string) {
	s.mu.Lock()
	s.plan = plan
	s.mu.Unlock()
	for _, p := range s.all() {
		p.drain()
		s.startLater(p, 0)
	}
}

func (s *site) failpoints() string {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.plan
}

// endedAt returns the failpoint at which an incarnation ended itself, by its log, and notes its death; empty if
// it ended otherwise.
func (p *process) endedAt(incarnation, log string) string {
	if p.failpoints == nil {
		return ""
	}
	text, err := os.ReadFile(log)
	if err != nil {
		return ""
	}
	i := bytes.LastIndex(text, []byte("failpoint: "))
	if i < 0 {
		return ""
	}
	at, _, _ := strings.Cut(string(text[i+len("failpoint: "):]), "\n")
	p.mu.Lock()
	defer p.mu.Unlock()
	p.deaths = append(p.deaths, judge.Death{Process: incarnation, At: time.Now(), Killed: true})
	return at
}
