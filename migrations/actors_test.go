package migrations_test

import "testing"

// A function that runs as its owner records the role that called it, and only audit_log adds to the audit.
func TestTheAuditHasTheCallerAndNotTheOwnerOfAFunction(t *testing.T) {
	t.Parallel()
	c, roles := granted(t, "node", "operator")
	exec(t, c, `SELECT penstock.register_model('m', '{"protocol": "cog"}', 'test')`)
	exec(t, c, `SELECT penstock.register_instance('m', 'gpu-1', 'http://gpu-1:8000', 1, reason => 'test')`)
	verbs := map[string][2]string{
		"node": {"drain_instance", `SELECT penstock.recycle_instance((SELECT id FROM penstock.instance))`},
		// An actor that is given as null is none.
		"operator": {"free_dead_slots", `SELECT penstock.free_dead_slots('m', 'gpu-1', 'test', NULL)`},
	}
	for _, role := range roles {
		verb := verbs[role.Duty]
		exec(t, c, `SET ROLE `+role.Name)
		exec(t, c, verb[1])
		exec(t, c, `RESET ROLE`)
		if got := scalar(t, c, `SELECT actor FROM penstock.audit WHERE verb = $1`, verb[0]); got != role.Name {
			t.Errorf("%s by %s: the actor in the audit is %s", verb[0], role.Name, got)
		}
	}
	const insertersSQL = `SELECT string_agg(proname, ' ') FROM pg_proc
	 WHERE pronamespace = 'penstock'::regnamespace AND prosrc ~* 'insert\s+into\s+penstock\.audit\M'`
	if got := scalar(t, c, insertersSQL); got != "audit_log" {
		t.Errorf("functions that add to the audit: %s, want audit_log alone", got)
	}
}
