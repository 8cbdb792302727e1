package migrations_test

import (
	"bytes"
	"slices"
	"strings"
	"testing"

	"github.com/penstock/penstock/migrations"
)

// formsSQL lists the forms of the functions that pause, with their rights and whether they run as the owner.
const formsSQL = `
SELECT p.oid::regprocedure::text, p.prorettype::regtype::text, format('%s %s %s', p.prosecdef, p.proconfig,
       (SELECT array_agg(format('%s %s', a.grantee::regrole, a.privilege_type) ORDER BY a.grantee, a.privilege_type)
          FROM aclexplode(p.proacl) a WHERE a.grantee <> p.proowner))
  FROM pg_proc p
 WHERE p.pronamespace = 'penstock'::regnamespace AND p.proname = ANY (ARRAY['pause', 'pause_batch', 'pause_cron_job', 'pause_queue'])
 ORDER BY 1`

// pausing has the functions that returned nothing before they returned the pause that they replace, with their files.
var pausing = map[string]string{
	"pause": "functions/control.sql", "pause_queue": "functions/control.sql", "pause_batch": "functions/batch.sql", "pause_cron_job": "functions/cron.sql",
}

// Postgres replaces no function by one of another result type, and one that is dropped loses its rights.
func TestFunctionsThatReturnedNothingReturnSomethingAfterAnUpgrade(t *testing.T) {
	c, roles := granted(t)
	want := rows(t, c, formsSQL)
	for _, form := range want {
		operator := slices.IndexFunc(roles, func(r migrations.Role) bool { return r.Duty == "operator" })
		if form[1] != "jsonb" || !strings.Contains(form[2], roles[operator].Name+" EXECUTE") {
			t.Fatalf("before: %q", form)
		}
	}
	old, err := migrations.Functions()
	if err != nil {
		t.Fatal(err)
	}
	for name, file := range pausing {
		text := old[file].Data
		at := bytes.Index(text, []byte("CREATE OR REPLACE FUNCTION penstock."+name+"("))
		old[file].Data = slices.Concat(text[:at], bytes.Replace(text[at:], []byte("RETURNS jsonb"), []byte("RETURNS void"), 1))
	}
	exec(t, c, `DROP FUNCTION penstock.pause, penstock.pause_queue, penstock.pause_batch, penstock.pause_cron_job;
	            DELETE FROM penstock.schema_version`)
	dsn := c.Config().ConnString()
	upWith(t, dsn, old, migrations.Release)
	before := rows(t, c, formsSQL)
	if len(before) != len(want) || slices.ContainsFunc(before, func(form []string) bool { return form[1] != "void" }) {
		t.Fatalf("the functions of before are %q", before)
	}
	done, err := migrations.Up(t.Context(), config(t, dsn))
	if err != nil || done.Applied != 1 {
		t.Fatalf("the upgrade: %+v (%v)", done, err)
	}
	if got := rows(t, c, formsSQL); !slices.EqualFunc(got, want, slices.Equal) {
		t.Errorf("after the upgrade they are %q, want %q", got, want)
	}
	if drift, err := migrations.Drift(t.Context(), c); err != nil || len(drift.Objects)+len(drift.Parameters) > 0 {
		t.Errorf("drift is %q (%v)", drift, err)
	}
	const call = `SELECT penstock.pause('flow', 'ann', NULL, 'r')`
	for _, r := range roles {
		if err := as(t, c, r.Name, call); (err == nil) != slices.Contains([]string{"leader", "operator"}, r.Duty) {
			t.Errorf("a pause by the role of duty %s: %v", r.Duty, err)
		}
	}
}
