package web

import (
	"bufio"
	"context"
	"fmt"
	"net/http"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/operator"
)

// counting is a database that counts statements.
type counting struct {
	postgres.DB
	n atomic.Int64
}

func (c *counting) Exec(ctx context.Context, sql string, args ...any) (pgconn.CommandTag, error) {
	c.n.Add(1)
	return c.DB.Exec(ctx, sql, args...)
}

func (c *counting) Query(ctx context.Context, sql string, args ...any) (pgx.Rows, error) {
	c.n.Add(1)
	return c.DB.Query(ctx, sql, args...)
}

func (c *counting) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	c.n.Add(1)
	return c.DB.QueryRow(ctx, sql, args...)
}

// count makes the site's pages read through a database that counts statements.
func (s *site) count() *counting {
	s.Helper()
	read := &counting{DB: openPool(s.T, postgres.Config{
		DSN: s.pool.Config().ConnString(), MaxConns: 4, StatementTimeout: 2 * time.Second, ReadOnly: true,
	})}
	s.web.db = operator.New(read)
	return read
}

// watch holds streams of a page open for a time, as tabs do, and reads what they send: the page at least.
func (s *site) watch(b *browser, path string, tabs int, over time.Duration) {
	s.Helper()
	ctx, leave := context.WithCancel(s.Context())
	defer leave()
	var all, shown sync.WaitGroup
	shown.Add(tabs)
	for range tabs {
		all.Go(func() {
			show := sync.OnceFunc(shown.Done)
			defer show()
			r, err := http.NewRequestWithContext(ctx, http.MethodGet, s.server.URL+"/ui/"+path+"?live=stream", nil)
			if err != nil {
				s.Error(err)
				return
			}
			w, err := b.client.Do(r)
			if err != nil {
				s.Errorf("open a stream: %v", err)
				return
			}
			defer w.Body.Close()
			for lines := bufio.NewScanner(w.Body); lines.Scan(); {
				if lines.Text() == "event: part" {
					show()
				}
			}
			if ctx.Err() == nil {
				s.Error("a stream ended by itself")
			}
		})
	}
	time.Sleep(over)
	shown.Wait()
	leave()
	all.Wait()
}

// Readers of one page share its statements: fifty tabs cost the database what one costs.
func TestLongFiftyTabsCostWhatOneCosts(t *testing.T) {
	s := newSite(t)
	s.fillFleet()
	read := s.count()
	b := s.as(viewer)
	b.get("")
	page := read.n.Load()
	began := time.Now()
	s.watch(b, "", 50, 6*time.Second)
	// Each beat may read the page once, however many beats the machine needs.
	beats := int64(time.Since(began)/beat) + 2
	fifty := read.n.Load() - page
	t.Logf("statements of one page %d, of fifty tabs in %d beats %d", page, beats, fifty)
	if page == 0 || fifty == 0 || fifty > beats*page {
		t.Errorf("fifty tabs cost %d statements in %d beats, one page costs %d", fifty, beats, page)
	}
}

// TestPagesOverManyRows is make bench-dashboard.
func TestPagesOverManyRows(t *testing.T) {
	rows, _ := strconv.Atoi(os.Getenv("PENSTOCK_DASHBOARD_ROWS"))
	if rows == 0 {
		t.Skip("it takes minutes: make bench-dashboard")
	}
	s := newSite(t)
	s.fillFleet()
	s.fillPlatform()
	s.manyRows(rows)
	s.sampling()
	read := s.count()
	b := s.as(administrator)
	var pending int64
	if err := s.pool.QueryRow(t.Context(), `SELECT max(id) FROM penstock.entry_work`).Scan(&pending); err != nil {
		t.Fatal(err)
	}
	paths := []string{
		"", "queues", "queues/work", "entries?queue=work", "entries?queue=work&state=computing", "entries?queue=work&flow=flow-7",
		fmt.Sprintf("entries/%d", pending), "entries/50000005", "entries/70000005", "failures", "failures?queue=work",
		"failures?queue=work&class=permanent&fingerprint=cause+7", "locks", "locks?queue=work", "nodes", "models", "fairness", "cron", "operations", "database", "audit", "gateways", "autoscaler",
	}
	scans := s.scans()
	t.Logf("| page | p50 | p95 | statements | KiB |")
	for _, path := range paths {
		const rounds = 40
		var took []time.Duration
		before := read.n.Load()
		size := 0
		for range rounds {
			s.web.reads.expire()
			time.Sleep(time.Second / 50) // so that no reading of the round before counts as fresh
			begun := time.Now()
			got := b.get(path)
			took = append(took, time.Since(begun))
			if got.status != http.StatusOK || strings.Contains(got.text, "longer than 2 s") {
				t.Fatalf("%s: %d: %.500s", path, got.status, got.text)
			}
			size = len(got.text)
		}
		slices.Sort(took)
		p50, p95 := took[rounds/2], took[rounds*95/100]
		t.Logf("| /ui/%s | %d ms | %d ms | %d | %d |", path, p50.Milliseconds(), p95.Milliseconds(), (read.n.Load()-before)/rounds, size>>10)
		if p95 > 100*time.Millisecond {
			t.Errorf("/ui/%s takes %s at p95, want 100 ms at most", path, p95)
		}
	}
	if now := s.scans(); now != scans {
		t.Errorf("pages scanned entries, results or failures: %s before, %s after", scans, now)
	}
}

// sampling writes a sample of each queue every five seconds, as the elected leader does, until the test ends.
func (s *site) sampling() {
	s.Helper()
	const sampleSQL = `INSERT INTO penstock.sample SELECT m.* FROM penstock.queue q CROSS JOIN LATERAL penstock.measure(q) m`
	s.exec(sampleSQL)
	ctx, cancel := context.WithCancel(s.Context())
	var leader sync.WaitGroup
	s.Cleanup(func() { cancel(); leader.Wait() })
	leader.Go(func() {
		tick := time.NewTicker(5 * time.Second)
		defer tick.Stop()
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			if _, err := s.pool.Exec(ctx, sampleSQL); err != nil && ctx.Err() == nil {
				s.Errorf("sample the queues: %v", err)
			}
		}
	})
}

// scans lists the sequential scans of entries, results and failures so far.
func (s *site) scans() string {
	s.Helper()
	time.Sleep(1500 * time.Millisecond) // sessions report to the statistics at most once a second
	var text string
	err := s.pool.QueryRow(s.Context(), `
		SELECT coalesce(string_agg(relname || ' ' || seq_scan, ', ' ORDER BY relname), '') FROM pg_stat_user_tables
		 WHERE schemaname = 'penstock' AND relname ~ '^(entry_|result|failure)'`).Scan(&text)
	if err != nil {
		s.Fatal(err)
	}
	return text
}

// manyRows adds entries, results and failures in the proportion of 6 to 3 to 1, and analyzes them as autovacuum would.
func (s *site) manyRows(rows int) {
	s.Helper()
	begun := time.Now()
	var queue int32
	if err := s.pool.QueryRow(s.Context(), `SELECT id FROM penstock.queue WHERE name = 'work'`).Scan(&queue); err != nil {
		s.Fatal(err)
	}
	const step = 500_000
	for from := 0; from < rows*6/10; from += step {
		s.exec(`INSERT INTO penstock.entry_work (id, queue_id, status, priority, flow, payload)
		        SELECT 10000000 + n, $1, 'pending', 1, 'flow-' || n % 50, '{"document": 1}' FROM generate_series($2::int + 1, $3::int) n`,
			queue, from, min(from+step, rows*6/10))
		s.exec(`INSERT INTO penstock.ready (queue_id, priority, flow, pos, entry_id)
		        SELECT $1, 1, 'flow-' || n % 50, 10000000 + n, 10000000 + n FROM generate_series($2::int + 1, $3::int) n`,
			queue, from, min(from+step, rows*6/10))
	}
	s.exec(`INSERT INTO penstock.result (entry_id, created_at, finished_at, queue_id, node_id, token, run_ms, attempt, outcome, meta)
	        SELECT 50000000 + n, now() - n * interval '5 ms', now() - n * interval '4 ms', $1, 7001, n, n % 5000, 1, 'done',
	               '{"instance": "gpu-1"}' FROM generate_series(1, $2::int) n`, queue, rows*3/10)
	s.exec(`INSERT INTO penstock.failure (entry_id, created_at, queue_id, priority, attempt, crashes, flow, class, error, fingerprint, payload, failed_at)
	        SELECT 70000000 + n, now(), $1, 1, 3, 0, 'flow-' || n % 50, 'permanent', 'cause ' || n % 30, 'cause ' || n % 30, '{}',
	               now() - n * interval '50 ms' FROM generate_series(1, $2::int) n`, queue, rows/10)
	// VACUUM summarises the ranges of the BRIN indexes as well: autovacuum would do it later, and each range counts as
	// a sequential scan.
	for _, table := range []string{"entry_work", "ready", "result", "failure"} {
		s.exec(`VACUUM (ANALYZE) penstock.` + table)
	}
	s.Logf("%d rows in %s", rows, time.Since(begun).Round(time.Second))
}
