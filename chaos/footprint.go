package main

import (
	"bytes"
	"context"
	"fmt"
	"io"
	"os"
	"strconv"
	"time"
)

// footprint is what the programs and the hot tables take at a time of the run.
type footprint struct {
	after         time.Duration
	leader, node  int64 // resident memory in bytes, of the largest program of the kind
	tables, ended int64 // bytes of the hot tables with the entries, of results and failures, both with their indexes
	dead          int64 // tuples of the hot tables
}

// footprintStep is how often the footprint is taken.
const footprintStep = time.Minute

// watchFootprint takes the footprint every minute.
func (s *site) watchFootprint(ctx context.Context) {
	const sql = `
SELECT coalesce(sum(pg_total_relation_size(relid)) FILTER (WHERE hot), 0)::bigint,
       coalesce(sum(pg_total_relation_size(relid)) FILTER (WHERE NOT hot), 0)::bigint,
       coalesce(sum(n_dead_tup) FILTER (WHERE hot), 0)::bigint
  FROM (SELECT relid, n_dead_tup, relname !~ '^(result|failure)' AS hot
          FROM pg_stat_user_tables
         WHERE schemaname = 'penstock'
           AND relname ~ '^(ready|lock|node|leader|slot|limit_use|bucket|blocked_key|entry_.*|result.*|failure.*)$') t`
	began, tick := time.Now(), time.NewTicker(footprintStep)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		f := footprint{after: time.Since(began)}
		for _, p := range s.all() {
			if p.kind == "leader" {
				f.leader = max(f.leader, p.resident())
			} else {
				f.node = max(f.node, p.resident())
			}
		}
		one, cancel := context.WithTimeout(ctx, 10*time.Second)
		err := s.db.pool.QueryRow(one, sql).Scan(&f.tables, &f.ended, &f.dead)
		cancel()
		if err != nil {
			continue // the database is away; the next minute has its own
		}
		s.mu.Lock()
		s.sizes = append(s.sizes, f)
		s.mu.Unlock()
	}
}

// resident is the resident memory of the incarnation in bytes; 0 if none runs.
func (p *process) resident() int64 {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.running() {
		return 0
	}
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/statm", p.cmd.Process.Pid))
	if err != nil {
		return 0
	}
	fields := bytes.Fields(text)
	if len(fields) < 2 {
		return 0
	}
	pages, _ := strconv.ParseInt(string(fields[1]), 10, 64)
	return pages * int64(os.Getpagesize())
}

// reportFootprint prints the first, the middle and the last of the footprints.
func (s *site) reportFootprint(w io.Writer) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if len(s.sizes) < 3 {
		return
	}
	const mib = 1 << 20
	fmt.Fprintln(w, "after\tleader MiB\ttask node MiB\thot tables MiB\tdead tuples\tresults and failures MiB")
	for _, f := range []footprint{s.sizes[0], s.sizes[len(s.sizes)/2], s.sizes[len(s.sizes)-1]} {
		fmt.Fprintf(w, "%v\t%.1f\t%.1f\t%.1f\t%d\t%.1f\n", f.after.Round(time.Second), float64(f.leader)/mib,
			float64(f.node)/mib, float64(f.tables)/mib, f.dead, float64(f.ended)/mib)
	}
	fmt.Fprintln(w)
}
