package prediction

import (
	"log/slog"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/internal/postgres"
)

// A sweep reads the table by pages: what one statement reads does not grow with what is kept.
func TestSweepRemovesPredictionsOfWhichNothingIsKnown(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	exec := func(sql string) {
		t.Helper()
		if _, err := pool.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	exec(`SELECT penstock.create_queue('q'), penstock.push('q', '{}')`)
	exec(`INSERT INTO penstock.prediction (id, owner, entry_id, queue_id, model, version, input, created_at)
	      SELECT 'gone' || n, 'ada', -n, q.id, 'm', 'm', '{}'::jsonb, now() - interval '1 day' FROM penstock.queue q, generate_series(1, 10000) n WHERE q.name = 'q'
	      UNION ALL SELECT 'young', 'ada', -1, q.id, 'm', 'm', '{}'::jsonb, now() FROM penstock.queue q WHERE q.name = 'q'
	      UNION ALL SELECT 'waits', 'ada', e.id, e.queue_id, 'm', 'm', '{}'::jsonb, now() - interval '1 day' FROM penstock.entry e`)
	s := &Predictions{db: pool}
	if err := s.sweep(t.Context()); err != nil || s.swept != (postgres.PageWalk{}) {
		t.Errorf("the sweep ended at %+v: %v", s.swept, err)
	}
	rows, _ := pool.Query(t.Context(), `SELECT id FROM penstock.prediction ORDER BY id`)
	left, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil || strings.Join(left, " ") != "waits young" {
		t.Errorf("%d predictions are left (%v), want the one that waits and the young one", len(left), err)
	}
	rows, _ = pool.Query(t.Context(), `EXPLAIN `+strings.NewReplacer("$1", "'(0,0)'", "$2", "'(64,0)'").Replace(sweepSQL))
	plan, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if text := strings.Join(plan, "\n"); err != nil || !strings.Contains(text, "Tid Range Scan on prediction") || strings.Contains(text, "Join") {
		t.Errorf("the sweep does not look up predictions of a part one by one (%v):\n%s", err, text)
	}
}

// A prediction whose outcome is gone before its end was reported has no webhook; the log says so.
func TestAnEndThatCannotBeReportedAnyMoreIsLogged(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	_, err := pool.Exec(t.Context(), `SELECT penstock.create_queue('q')`)
	if err == nil {
		_, err = pool.Exec(t.Context(), `INSERT INTO penstock.prediction (id, owner, entry_id, queue_id, model, version, input, webhook)
			SELECT 'p', 'ada', -1, q.id, 'm', 'm', '{}', 'https://client.example/' FROM penstock.queue q WHERE q.name = 'q'`)
	}
	if err != nil {
		t.Fatal(err)
	}
	var lines strings.Builder
	s := &Predictions{db: pool, log: slog.New(slog.NewTextHandler(&lines, nil))}
	if _, err := s.notify(t.Context()); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(lines.String(), "prediction=p") {
		t.Errorf("logged: %q", lines.String())
	}
	if owed, err := s.owesNotices(t.Context()); owed || err != nil {
		t.Errorf("it is still to be reported: %v (%v)", owed, err)
	}
}
