package api

import (
	"context"
	"errors"
	"net/http"
	"time"
)

// Check is one thing that must hold for the process to be ready.
type Check struct {
	Name string
	Run  func(ctx context.Context) error
}

func (a *API) probes() {
	a.raw(route{method: "GET", path: "/livez"}, nil, a.livez)
	a.raw(route{method: "GET", path: "/readyz"}, nil, a.readyz)
	if a.cfg.Metrics != nil {
		a.raw(route{method: "GET", path: "/metrics"}, nil, func(w http.ResponseWriter, r *http.Request) error {
			a.cfg.Metrics.ServeHTTP(w, r)
			return nil
		})
	}
}

// livez answers as long as the process can answer. It asks nobody: a database that is away is no reason to restart.
func (a *API) livez(w http.ResponseWriter, _ *http.Request) error {
	writeJSON(w, "application/json", http.StatusOK, map[string]string{"status": "live"})
	return nil
}

// checkTimeout bounds each check; probes usually wait for a second or more.
const checkTimeout = 900 * time.Millisecond

// readyz runs the checks side by side and says of each one whether it holds, and if not, why.
func (a *API) readyz(w http.ResponseWriter, r *http.Request) error {
	ctx, cancel := context.WithTimeout(r.Context(), checkTimeout)
	defer cancel()
	errs := make([]chan error, len(a.cfg.Checks))
	for i, check := range a.cfg.Checks {
		errs[i] = make(chan error, 1)
		go func() { errs[i] <- check.Run(ctx) }()
	}
	status, word := http.StatusOK, "ready"
	checks := map[string]string{}
	for i, check := range a.cfg.Checks {
		checks[check.Name] = "ok"
		if err := answerOf(ctx, errs[i]); err != nil {
			checks[check.Name] = err.Error()
			status, word = http.StatusServiceUnavailable, "not ready"
		}
	}
	writeJSON(w, "application/json", status, map[string]any{"status": word, "checks": checks})
	return nil
}

// answerOf waits for the answer of a check. One that has come counts even after ctx ended, while another check was waited for.
func answerOf(ctx context.Context, answer <-chan error) error {
	select {
	case err := <-answer:
		return err
	case <-ctx.Done():
	}
	select {
	case err := <-answer:
		return err
	default:
		return errors.New("did not answer within " + checkTimeout.String())
	}
}

// writable says whether the database takes writes. A standby answers queries, too, and would look healthy.
func (a *API) writable(ctx context.Context) error {
	const sql = `SELECT NOT pg_is_in_recovery() AND current_setting('default_transaction_read_only') = 'off'`
	var writable bool
	if err := a.db.QueryRow(ctx, sql).Scan(&writable); err != nil {
		return err
	}
	if !writable {
		return errors.New("the database is a standby or read-only")
	}
	return nil
}
