package migrations_test

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/penstock/penstock/internal/pgtest"
)

// The SQL of the procedure of a restore runs as it is written, in its order, and does what its steps say.
func TestStatementsOfARestoreWork(t *testing.T) {
	page, err := os.ReadFile("../docs/operations.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, _ := strings.Cut(string(page), "\n### Backup and restore\n")
	section, _, _ = strings.Cut(section, "\n### ")
	blocks := regexp.MustCompile("(?s)```sql\n(.*?)```").FindAllStringSubmatch(section, -1)
	if len(blocks) != 4 {
		t.Fatalf("the section has %d blocks of SQL, want those of steps 3, 8 and 9, and that of a copy", len(blocks))
	}
	draw, cancel, read, separate := blocks[0][1], blocks[1][1], blocks[2][1], blocks[3][1]
	c := connect(t, pgtest.DSN(t))
	exec(t, c, `SELECT penstock.create_queue('work'), penstock.create_queue('parts', '{"kind": "batch"}')`)
	const batch = `SELECT penstock.create_batch('b', 'parts', '{"items": [1]}')`
	before := query[int64](t, c, batch)
	exec(t, c, draw)
	if after := query[int64](t, c, batch); after <= before+1_000_000 {
		t.Errorf("batch %d is made behind %d: its id may have been given out since the backup", after, before)
	}

	exec(t, c, `SELECT penstock.push('work', '1', callback => '{"url": "https://example.com"}') FROM generate_series(1, 3);
		UPDATE penstock.entry_work SET start_by = now() - interval '1 s' WHERE id = (SELECT min(id) FROM penstock.entry_work);
		SELECT penstock.expire_entries(id, 10) FROM penstock.queue WHERE name = 'work';
		SELECT penstock.cancel_entry(min(id)) FROM penstock.entry_work;
		SELECT penstock.call_back(e, 'failed', '{"class": "poison"}') FROM penstock.entry e WHERE e.queue_id =
		    (SELECT id FROM penstock.queue WHERE name = 'work')`)
	const reports = `SELECT string_agg(payload->>'type', ' ' ORDER BY id) FROM penstock.entry_webhook`
	if all := query[string](t, c, reports); all != "entry.expired entry.cancelled entry.failed" {
		t.Fatalf("reports are %s", all)
	}
	exec(t, c, strings.ReplaceAll(cancel, "TIME OF STEP 6", "yesterday"))
	if left := query[string](t, c, reports); left != "entry.failed" {
		t.Errorf("reports that are left: %s", left)
	}
	if n := query[int](t, c, `SELECT count(*) FROM (`+
		strings.TrimSuffix(strings.ReplaceAll(read, "TIME OF STEP 6", "yesterday"), ";\n")+`) r`); n != 1 {
		t.Errorf("%d reports of failures are found, want that of the poison", n)
	}

	exec(t, c, separate)
	if open := query[bool](t, c, `SELECT EXISTS (SELECT FROM penstock.queue WHERE disabled_at IS NULL)`); open {
		t.Error("a queue of the copy is in service")
	}
}
