package maintenance

import (
	"bytes"
	"log/slog"
	"slices"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/penstock/penstock/internal/pgtest"
	"github.com/penstock/penstock/pkg/invalidation"
)

// A right that is missing gave a line in each pass of each duty, for each queue.
func TestAStepThatIsRefusedInEachPassHasOneLine(t *testing.T) {
	t.Parallel()
	var text bytes.Buffer
	denied := &pgconn.PgError{Code: "42501", Message: "permission denied"}
	c := Config{Log: slog.New(slog.NewTextHandler(&text, nil))}.withDefaults()
	step := func(queue string, err error) {
		if err := c.tolerate(t.Context(), err, readDue, "queue", queue); err != nil {
			t.Errorf("%v ends the pass", err)
		}
	}
	for range 100 {
		step("mails", denied)
		step("bills", denied)
		step("chats", nil)
	}
	step("bills", nil)
	lines := strings.Split(strings.TrimSpace(text.String()), "\n")
	if len(lines) != 3 || !strings.Contains(lines[2], `msg="a step works again" queue=bills step="read due entries"`) {
		t.Errorf("the log is %s, want a line for each of two queues, and one that bills are read again", text.String())
	}
}

// A look for misdated entries that was refused had no line when it worked again, and one that was late a line each time.
func TestALookForMisdatedEntriesThatFailsHasALineAtBothEnds(t *testing.T) {
	t.Parallel()
	pool := pgtest.New(t)
	exec := func(sql string) {
		t.Helper()
		if _, err := pool.Exec(t.Context(), sql); err != nil {
			t.Fatal(err)
		}
	}
	exec(`SELECT penstock.create_queue('mails'), penstock.push('mails', '{}', due_at => now() + interval '1 hour')`)
	q, err := invalidation.Open(t.Context(), pool, "mails")
	if err != nil {
		t.Fatal(err)
	}
	var text bytes.Buffer
	d := NewDeadlines(pool, nil, Config{Log: slog.New(slog.NewTextHandler(&text, nil))})
	looks := func(n int) {
		t.Helper()
		for range n {
			if err := d.redateNext(t.Context(), q); err != nil {
				t.Fatal(err)
			}
		}
	}
	exec(`UPDATE penstock.entry SET attempt = 1, history = '[{"at": "never"}]'`)
	looks(3)
	exec(`UPDATE penstock.entry SET attempt = 0`)
	looks(3)
	tx, err := pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(t.Context(), `LOCK TABLE penstock.entry`); err != nil {
		t.Fatal(err)
	}
	exec(`DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET statement_timeout = 100', current_database()); END $$`)
	pool.Reset()
	looks(2)
	if _, err := tx.Exec(t.Context(), `DO $$ BEGIN EXECUTE format('ALTER DATABASE %I RESET statement_timeout', current_database()); END $$`); err != nil {
		t.Fatal(err)
	}
	if err := tx.Commit(t.Context()); err != nil {
		t.Fatal(err)
	}
	pool.Reset()
	looks(1)
	want := []string{"invalid input syntax", "works again", "in time", "works again"}
	lines := strings.Split(strings.TrimSpace(text.String()), "\n")
	if !slices.EqualFunc(lines, want, strings.Contains) {
		t.Errorf("the log is %s, want lines with %q", text.String(), want)
	}
}
