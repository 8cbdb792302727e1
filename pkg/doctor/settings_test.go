package doctor

import (
	"strings"
	"testing"

	"github.com/penstock/penstock/internal/postgres"
)

// setForDatabase sets what sessions of the database begin with.
func setForDatabase(t *testing.T, db postgres.DB, setting string) {
	t.Helper()
	exec(t, db, `DO $do$ BEGIN EXECUTE format($$ALTER DATABASE %I SET `+setting+`$$, current_database()); END $do$`)
}

func TestEverySpellingOfAsynchronousCommitIsNamed(t *testing.T) {
	pool := newPool(t)
	for _, value := range []string{"off", "false", "NO", "0"} {
		setForDatabase(t, pool, "synchronous_commit = '"+value+"'")
		f := find(t, pool, "durability", Config{})
		if !strings.Contains(strings.Join(f.Details, " "), "synchronous_commit="+value+" of every role in database") {
			t.Errorf("%s is not named: %+v", value, f)
		}
	}
	setForDatabase(t, pool, "synchronous_commit = 'remote_apply'")
	if f := find(t, pool, "durability", Config{}); strings.Contains(strings.Join(f.Details, " "), "remote_apply") {
		t.Errorf("remote_apply is named: %+v", f)
	}
}

// Sessions of Penstock override it; those behind a pooler, and those of others, do not.
func TestAnIsolationThatTheDatabaseSetsIsAWarning(t *testing.T) {
	pool := newPool(t)
	setForDatabase(t, pool, "default_transaction_isolation = 'repeatable read'")
	want(t, find(t, pool, "isolation", Config{}), Warning, "default_transaction_isolation=repeatable read of every role in database")
	setForDatabase(t, pool, "default_transaction_isolation = 'READ COMMITTED'")
	want(t, find(t, pool, "isolation", Config{}), Fine)
}
