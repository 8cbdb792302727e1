package api

import (
	"errors"
	"fmt"
	"net/http"
	"strings"
	"testing"
)

// A job whose schedule cannot be read never fires, which its maker would not see.
func TestAScheduleThatCannotBeReadIsRefused(t *testing.T) {
	w := newWorld(t)
	w.api = New(w.pool, Config{Open: true, CheckSchedule: func(settings map[string]any) (string, error) {
		switch {
		case settings["spec"] == nil, settings["spec"] == "61 * * * *":
			return "spec", errors.New("it cannot be read")
		case settings["zone"] == "Europe/Berln":
			return "zone", errors.New("it is unknown")
		}
		return "", nil
	}})
	w.exec(`SELECT penstock.create_queue('reports', '{"kind": "cron"}')`)
	const jobs, job = "/v1/queues/reports/cron", "/v1/cron/nightly"
	send := func(method, path, body string, want int, location string) {
		t.Helper()
		w.send("GET", job, "")
		status, answer := w.send(method, path, body, "If-Match", w.tags[job])
		if flaws := fmt.Sprint(answer["errors"]); status != want || location != "" && !strings.Contains(flaws, "location:"+location) {
			t.Errorf("%s %s: %d %v, want %d for %q", method, body, status, answer, want, location)
		}
	}
	const refused = http.StatusUnprocessableEntity
	send("POST", jobs, `{"name": "nightly", "spec": "61 * * * *", `+reason+`}`, refused, "body.spec")
	send("POST", jobs, `{"name": "nightly", "spec": "@daily", "settings": {"zone": "Europe/Berln"}, `+reason+`}`, refused, "body.settings.zone")
	send("POST", jobs, `{"name": "nightly", "spec": "@daily", `+reason+`}`, http.StatusCreated, "")
	send("PATCH", job, `{"settings": {"zone": "Europe/Berln"}, `+reason+`}`, refused, "body.settings.zone")
	send("PATCH", job, `{"settings": {"spec": "61 * * * *"}, `+reason+`}`, refused, "body.settings.spec")
	send("PATCH", job, `{"settings": {"zone": "Europe/Berlin"}, `+reason+`}`, http.StatusNoContent, "")
}
