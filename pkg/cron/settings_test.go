package cron

import (
	"testing"

	"github.com/penstock/penstock/internal/postgres"
)

func TestSettingsByWhichAJobCannotFireAreRefused(t *testing.T) {
	for want, settings := range map[string][]map[string]any{
		"": {
			{"spec": "30 2 * * *"},
			{"spec": "@every 90m", "zone": "Europe/Berlin", "starts_at": nil, "overlap": "queue"},
			{"spec": "@daily", "starts_at": "2026-06-01T00:00:00+00:00", "ends_at": "2026-06-02T00:00:00Z"},
		},
		"spec":      {{}, {"spec": "61 * * * *"}, {"spec": "@at 2026-06-01T00:00:00Z"}, {"spec": "0 0 30 2 *"}, {"spec": 5.0}},
		"zone":      {{"spec": "@daily", "zone": "Europe/Berln"}, {"spec": "@daily", "zone": "local"}, {"spec": "@daily", "zone": 5.0}},
		"starts_at": {{"spec": "@daily", "starts_at": "2026-06-01"}},
		"ends_at": {
			{"spec": "@daily", "starts_at": "2026-06-01T00:00:00Z", "ends_at": "2026-06-01T00:00:00Z"},
			{"spec": "@daily", "starts_at": "2026-06-01T00:00:00Z", "ends_at": "2026-05-01"},
		},
	} {
		for _, s := range settings {
			if setting, err := CheckSettings(s); setting != want || (err == nil) != (want == "") {
				t.Errorf("%v: setting %q (%v), want %q", s, setting, err, want)
			}
		}
	}
}

// Times of before that are refused now keep no other setting from being changed.
func TestStoredTimesThatAreRefusedNowStay(t *testing.T) {
	b := newBed(t)
	b.job(Job{Name: "nightly", Queue: "reports", Schedule: Schedule{Spec: "0 3 * * *"}})
	b.exec(`UPDATE penstock.cron_job SET ends_at = '9999-12-31 23:59:59 UTC', grace = '11 years'`)
	b.exec(`SELECT penstock.alter_cron_job('nightly', '{"spec": "0 4 * * *"}')`)
	for _, options := range []string{`{"ends_at": "9999-12-31 23:59:59 UTC"}`, `{"grace": "11 years"}`} {
		if _, err := b.pool.Exec(b.ctx, `SELECT penstock.alter_cron_job('nightly', $1::text::jsonb)`, options); postgres.Code(err) != "PS002" {
			t.Errorf("%s: %v", options, err)
		}
	}
}
