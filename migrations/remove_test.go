package migrations_test

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/migrations"
)

// The statements of docs/deployment.md, as an owner who is no superuser, take away all that migrations and grants have
// made. The table of migrations is not in the schema: while it is there, the schema would not be made again.
func TestTheDocumentedRemovalLeavesNothing(t *testing.T) {
	t.Parallel()
	_, c, asOwner := ownedByAnother(t)
	exec(t, c, `ALTER ROLE `+pgx.Identifier{asOwner.RuntimeParams["role"]}.Sanitize()+` CREATEROLE`)
	if _, err := migrations.Up(t.Context(), asOwner); err != nil {
		t.Fatal(err)
	}
	roles := migrations.Roles("test_" + scalar(t, c, `SELECT substr(md5(random()::text), 1, 10)`))
	if _, err := migrations.Grant(t.Context(), asOwner, roles); err != nil {
		t.Fatal(err)
	}
	text, err := os.ReadFile("../docs/deployment.md")
	if err != nil {
		t.Fatal(err)
	}
	_, section, _ := strings.Cut(string(text), "\n## Remove\n")
	section, _, _ = strings.Cut(section, "\n## ")
	blocks := regexp.MustCompile("(?s)```sql\n(.*?)```").FindAllStringSubmatch(section, -1)
	if len(blocks) != 2 {
		t.Fatalf("the section has %d blocks of SQL, want 2", len(blocks))
	}
	owner, err := pgx.ConnectConfig(t.Context(), asOwner)
	if err != nil {
		t.Fatal(err)
	}
	defer owner.Close(t.Context())
	for _, block := range blocks {
		sql := block[1]
		for _, r := range roles {
			sql = strings.ReplaceAll(sql, "penstock_"+r.Duty, r.Name)
		}
		exec(t, owner, sql)
	}
	for _, r := range roles {
		if scalar(t, c, `SELECT (to_regrole($1) IS NULL)::text`, r.Name) == "false" {
			t.Errorf("role %s is left", r.Name)
		}
	}
	if left := scalar(t, c, `SELECT concat(to_regnamespace('penstock'), to_regclass($1))`, migrations.Table); left != "" {
		t.Errorf("left: %s", left)
	}
	if _, err := migrations.Up(t.Context(), asOwner); err != nil {
		t.Errorf("the schema cannot be made again: %v", err)
	}
}
