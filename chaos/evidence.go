package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/chaos/judge"
)

var entryNumber = regexp.MustCompile(`\bentry (\d+)`)

// keepEvidence writes what the recorders know of each entry that a finding names to the directory of
// the logs, when programs were killed, stopped, drained or kept from recording endings, and which statements were held.
func (s *site) keepEvidence(ctx context.Context, h *judge.History, findings []judge.Finding) error {
	if !slices.ContainsFunc(findings, func(f judge.Finding) bool { return f.Broken > 0 }) {
		return nil
	}
	var deaths strings.Builder
	for _, d := range h.Deaths {
		fmt.Fprintf(&deaths, "%s from %v to %v, killed: %v\n", d.Process, d.At.UTC(), d.Until.UTC(), d.Killed)
	}
	for _, d := range h.Hindrances {
		fmt.Fprintf(&deaths, "%s at %v: drained, or an error that leaves endings to recovery\n", d.Process, d.At.UTC())
	}
	if err := os.WriteFile(filepath.Join(s.cfg.logs, "deaths.txt"), []byte(deaths.String()), 0o600); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(s.cfg.logs, "held.txt"), s.policy.heldStatements(), 0o600); err != nil {
		return err
	}
	if err := os.WriteFile(filepath.Join(s.cfg.logs, "doubts.txt"), doubtsAfter(h), 0o600); err != nil {
		return err
	}
	for _, f := range findings {
		for _, example := range f.Examples {
			for _, match := range entryNumber.FindAllStringSubmatch(example, 2) {
				if err := s.keepEvidenceOf(ctx, match[1]); err != nil {
					return err
				}
			}
		}
	}
	return nil
}

// heldStatements are the statements that faults held, a line for each.
func (p *policy) heldStatements() []byte {
	p.mu.Lock()
	defer p.mu.Unlock()
	var text []byte
	for _, h := range p.held {
		text = fmt.Appendf(text, "%s from %v to %v: %s at a %s: %s\n", h.process, h.from.UTC(), h.to.UTC(), h.fault,
			h.kind, h.site)
	}
	return text
}

// keepEvidenceOf writes what is known of an entry, and of that which delivers the report of its end.
func (s *site) keepEvidenceOf(ctx context.Context, entry string) error {
	const sql = `
WITH named AS (
    SELECT $1::bigint AS id UNION SELECT callback_id FROM penstock.callback_sent WHERE entry_id = $1
), mine AS (
    SELECT * FROM judge.event WHERE entry_id IN (SELECT id FROM named)
    UNION
    SELECT * FROM judge.event WHERE what IN ('grant', 'free') AND key IN (
           SELECT coalesce(key, '#' || entry_id) FROM judge.event
            WHERE what = 'entry' AND entry_id IN (SELECT id FROM named))
)
SELECT at::text || ' ' || to_jsonb(jsonb_strip_nulls(to_jsonb(mine) - 'at'))::text FROM mine ORDER BY seq`
	rows, err := s.db.pool.Query(ctx, sql, entry)
	if err != nil {
		return err
	}
	lines, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return fmt.Errorf("read the events of entry %s: %w", entry, err)
	}
	f, err := os.Create(filepath.Join(s.cfg.logs, "entry-"+entry+".txt"))
	if err != nil {
		return err
	}
	defer f.Close()
	for _, line := range lines {
		fmt.Fprintln(f, line)
	}
	s.recorder.mu.Lock()
	defer s.recorder.mu.Unlock()
	for _, c := range s.recorder.calls {
		if fmt.Sprint(c.Entry) == entry {
			fmt.Fprintf(f, "%v to %v: call under token %d, answered %q\n", c.Begin, c.Closed, c.Token, c.Answer)
		}
	}
	s.load.mu.Lock()
	defer s.load.mu.Unlock()
	for _, p := range s.load.pushes {
		if fmt.Sprint(p.Entry) == entry {
			fmt.Fprintf(f, "%v to %v: pushed as operation %d, cancelled: %+v\n", p.Called, p.Returned, p.Op, p.Cancel)
		}
	}
	return nil
}
