package operator

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// An end that JSON cannot have is refused where it is set, and one of before that breaks no list.
func TestEndsBeyondWhatJSONCanHaveBreakNoList(t *testing.T) {
	b := newBed(t)
	b.exec(`SELECT penstock.create_queue('jobs', '{"kind": "cron"}')`)
	b.exec(`SELECT penstock.create_cron_job('j', 'jobs', '@daily', '1')`)
	b.exec(`SELECT penstock.create_batch('b', 'work', '{"items": [1, 2]}')`)
	b.exec(`SELECT penstock.register_model('m', '{"protocol": "openai"}'), penstock.set_deployment('own', 'm')`)
	for _, call := range []string{
		`penstock.pause_queue('work', 'test', 'ann', %s)`, `penstock.pause('flow', 'f', NULL, 'test', 'ann', %s)`,
		`penstock.pause_cron_job('j', 'test', 'ann', %s)`, `penstock.pause_batch((SELECT id FROM penstock.batch), 'test', 'ann', %s)`,
		`penstock.set_scale_override('own', 3, %s)`,
	} {
		for _, end := range []string{"'infinity'", "'10000-01-01'", "'9999-12-31 UTC'", "now() - interval '1 minute'"} {
			_, err := b.pool.Exec(t.Context(), "SELECT "+fmt.Sprintf(call, end))
			if postgres.Code(err) != "PS002" || !strings.Contains(err.Error(), "until is not a time to come before 9999-12-31") {
				t.Errorf("%s until %s: %v, want it refused", call, end, err)
			}
		}
		b.exec("SELECT " + fmt.Sprintf(call, "'9999-12-30 23:59 UTC'"))
	}
	late := time.Date(9999, 12, 31, 0, 0, 0, 0, time.UTC)
	if _, err := b.d.CreateToken(t.Context(), Grant{Name: "ci", Scopes: []string{"push"}, ExpiresAt: late}, by); !errors.Is(err, invalidation.ErrInvalid) {
		t.Errorf("a token until %s: %v, want it refused", late, err)
	}
	if _, err := b.d.CreateToken(t.Context(), Grant{Name: "ci", Scopes: []string{"push"}, ExpiresAt: late.Add(-time.Hour)}, by); err != nil {
		t.Fatal(err)
	}

	for _, end := range []string{"10000-01-01", "infinity", "9999-12-31 23:00 UTC", "-infinity"} {
		if end != "-infinity" { // pauses that are over are in no list
			b.exec(`UPDATE penstock.queue SET paused_until = '` + end + `' WHERE name = 'work'`)
			b.exec(`UPDATE penstock.pause SET until = '` + end + `'`)
		}
		b.exec(`UPDATE penstock.cron_job SET paused_until = '` + end + `'`)
		b.exec(`UPDATE penstock.batch SET paused_until = '` + end + `'`)
		b.exec(`UPDATE penstock.deployment SET override_until = '` + end + `'`)
		b.exec(`UPDATE penstock.api_token SET expires_at = '` + end + `'`)
		for name, list := range map[string]func() (any, error){
			"queues":      func() (any, error) { return b.d.Queues(t.Context()) },
			"pauses":      func() (any, error) { return b.d.Pauses(t.Context(), PauseFilter{}) },
			"cron jobs":   func() (any, error) { return b.d.CronJobs(t.Context(), CronFilter{}) },
			"batches":     func() (any, error) { return b.d.Batches(t.Context(), BatchFilter{}) },
			"deployments": func() (any, error) { return b.d.Deployments(t.Context(), "", 9) },
			"tokens":      func() (any, error) { return b.d.Tokens(t.Context(), TokenKey{}, 9) },
		} {
			rows, err := list()
			if err != nil {
				t.Errorf("%s until %s: %v", name, end, err)
				continue
			}
			if _, err := json.Marshal(rows); err != nil {
				t.Errorf("%s until %s: %v", name, end, err)
			}
		}
	}
}
