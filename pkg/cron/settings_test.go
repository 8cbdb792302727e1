package cron

import "testing"

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
