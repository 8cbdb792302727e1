package web

import (
	"os"
	"regexp"
	"strings"
	"testing"
)

// routeOf is the operation of the API that a verb is, where the two names differ.
var routeOf = map[string]string{
	"run_cron_job_now": "run-cron-job", "end_override": "end-deployment-override", "set_scaling": "set-scale-settings",
	"unblock_key": "unblock-keys", "bulk_cancel": "start-operation", "bulk_delete": "start-operation",
	"bulk_disable": "start-operation", "bulk_enable": "start-operation",
	"bulk_retry_failures": "start-operation", "bulk_discard_failures": "start-operation",
}

// operations returns the scope of each operation of the API by its name.
func operations(t *testing.T) map[string]string {
	t.Helper()
	text, err := os.ReadFile("../docs/openapi.yaml")
	if err != nil {
		t.Fatal(err)
	}
	scopes := map[string]string{}
	described := regexp.MustCompile("(?m)^      description: (?:\")?Needs scope `([a-z]+)`[^\n]*\n(?:       [^\n]*\n)*      operationId: ([a-z-]+)$")
	for _, found := range described.FindAllStringSubmatch(string(text), -1) {
		scopes[found[2]] = found[1]
	}
	if len(scopes) < 50 {
		t.Fatalf("found the scopes of %d operations only", len(scopes))
	}
	return scopes
}

// A token makes by the dashboard exactly the changes that the API lets it make.
func TestEachVerbNeedsTheScopeOfItsRoute(t *testing.T) {
	scopes := operations(t)
	for name, v := range newSite(t).web.verbs {
		route, named := routeOf[name]
		if !named {
			route = strings.ReplaceAll(name, "_", "-")
		}
		scope, found := scopes[route]
		if !found {
			t.Errorf("%s: the API has no operation %s", name, route)
		} else if want := roleOf([]string{scope}); v.role != want {
			t.Errorf("%s needs the role %s; %s of the API needs scope %s, which is %s", name, v.role, route, scope, want)
		}
	}
}
