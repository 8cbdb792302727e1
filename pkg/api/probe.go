package api

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"sync"
	"time"

	"github.com/penstock/penstock/pkg/operator"
)

// Check is one thing that must hold for the process to be ready.
type Check struct {
	Name string
	Run  func(ctx context.Context) error
	// Local is for a check that asks no other process. It runs with each request.
	Local bool
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

// livez answers as long as the process can answer. It needs no database: one that is away is no reason to restart.
func (a *API) livez(w http.ResponseWriter, _ *http.Request) error {
	writeJSON(w, "application/json", http.StatusOK, map[string]string{"status": "live"})
	return nil
}

// readyKept is how long results are answered from memory, so that requests, which need no token, cost the database
// one query a second however many there are.
const readyKept = time.Second

// readiness keeps the results of the checks that ask other processes.
type readiness struct {
	mu      sync.Mutex
	at      time.Time
	failed  map[string]error // by the name of the check
	running chan struct{}    // closed when the checks that run now have ended; nil if none run
}

// results returns what failed, at most readyKept ago. The checks run apart from the request that needs them:
// one that is aborted ends no query, which would cost the connection.
func (r *readiness) results(ctx context.Context, run func() map[string]error) map[string]error {
	for {
		r.mu.Lock()
		if r.failed != nil && time.Since(r.at) < readyKept {
			defer r.mu.Unlock()
			return r.failed
		}
		if r.running == nil {
			ended := make(chan struct{})
			r.running = ended
			go func() {
				failed := run()
				r.mu.Lock()
				defer r.mu.Unlock()
				r.failed, r.at, r.running = failed, time.Now(), nil
				close(ended)
			}()
		}
		running := r.running
		r.mu.Unlock()
		select {
		case <-running:
		case <-ctx.Done():
			return map[string]error{"request": context.Cause(ctx)}
		}
	}
}

// forget makes the next request run the checks again.
func (r *readiness) forget() {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.at = time.Time{}
}

// readyz answers for each check whether it holds, and no more: it is open to everybody, and errors of a
// database name its address and user. The log has them.
func (a *API) readyz(w http.ResponseWriter, r *http.Request) error {
	failed := a.ready.results(r.Context(), a.runChecks)
	status, word := http.StatusOK, "ready"
	checks := map[string]string{}
	for _, check := range a.cfg.Checks {
		err := failed[check.Name]
		if check.Local {
			err = check.Run(r.Context())
		}
		checks[check.Name] = "ok"
		if err != nil {
			checks[check.Name] = "failed"
			status, word = http.StatusServiceUnavailable, "not ready"
		}
	}
	body := map[string]any{"status": word, "checks": checks}
	if counts := a.degraded.counts(a.countDegradations); counts != nil {
		body["degraded"] = counts
	}
	writeJSON(w, "application/json", status, body)
	return nil
}

// degradedKept is how old the counts of degradations become before they are read again.
const degradedKept = 10 * time.Second

// degraded keeps how many conditions there are that stop or slow work although every process runs, by their code
// (operator.Degradation). They are no reason to take a leader out of service: the others would say the same.
type degraded struct {
	mu      sync.Mutex
	at      time.Time
	by      map[string]int
	running bool
}

// counts returns the counts that are known, nil if none are yet, and never waits: what is older than degradedKept is
// read again meanwhile.
func (d *degraded) counts(read func() (map[string]int, error)) map[string]int {
	d.mu.Lock()
	defer d.mu.Unlock()
	if !d.running && time.Since(d.at) >= degradedKept {
		d.running = true
		go func() {
			by, err := read()
			d.mu.Lock()
			defer d.mu.Unlock()
			d.running, d.at = false, time.Now()
			if err != nil {
				by = nil
			}
			d.by = by
		}()
	}
	return d.by
}

// countDegradations counts by code. Names of models, queues and nodes are not told: the probe is open to everybody.
func (a *API) countDegradations() (map[string]int, error) {
	if a.operator == nil {
		return nil, nil //nolint:nilnil // a node's probe knows of none
	}
	ctx, cancel := context.WithTimeout(context.Background(), a.cfg.Timeout)
	defer cancel()
	found, err := a.operator.Degradations(ctx, operator.PageMax)
	a.probing.Note(ctx, a.cfg.Log, slog.LevelWarn, "read degradations", "", err)
	if err != nil {
		return nil, err
	}
	by := map[string]int{}
	for _, d := range found {
		by[d.Code]++
	}
	return by, nil
}

// runChecks runs the checks that are not local side by side, and logs what failed.
func (a *API) runChecks() map[string]error {
	ctx, cancel := context.WithTimeout(context.Background(), a.cfg.checkTimeout)
	defer cancel()
	errs := map[string]chan error{}
	for _, check := range a.cfg.Checks {
		if check.Local {
			continue
		}
		result := make(chan error, 1)
		errs[check.Name] = result
		go func() { result <- check.Run(ctx) }()
	}
	failed := map[string]error{}
	for name, result := range errs {
		err := answerOf(ctx, result, a.cfg.checkTimeout)
		a.probing.Note(context.Background(), a.cfg.Log, slog.LevelWarn, "readiness check", name, err, "check", name)
		if err != nil {
			failed[name] = err
		}
	}
	return failed
}

// answerOf waits for the answer of a check. One that has come counts even after ctx ended, while another
// check was waited for.
func answerOf(ctx context.Context, answer <-chan error, within time.Duration) error {
	select {
	case err := <-answer:
		return err
	case <-ctx.Done():
	}
	select {
	case err := <-answer:
		return err
	default:
		return errors.New("did not answer within " + within.String())
	}
}

// writable is the check whether the database takes writes.
func (a *API) writable(ctx context.Context) error {
	writable, err := a.operator.Writable(ctx)
	if err != nil {
		return err
	}
	if !writable {
		return errors.New("the database is a standby or read-only")
	}
	return nil
}
