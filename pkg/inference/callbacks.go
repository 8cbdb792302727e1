package inference

import (
	"context"
	"io"
	"log/slog"
	"net/http"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/penstock/penstock/internal/postgres"
)

// Callbacks takes in what asynchronous Cog workers report. It is an http.Handler for the paths below its base URL, and
// may be served by any process: a report for which nobody listens here is kept for whoever follows the run.
type Callbacks struct {
	base string // URL under which workers reach it, without a slash at the end
	key  []byte
	db   postgres.DB
	log  *slog.Logger

	mu        sync.Mutex
	listeners map[string]chan Outcome
}

// NewCallbacks returns callbacks under base, whose addresses nobody can guess who does not have key. All processes
// of an installation share the key.
func NewCallbacks(base string, key []byte, db postgres.DB, log *slog.Logger) *Callbacks {
	if log == nil {
		log = slog.Default()
	}
	return &Callbacks{base: strings.TrimSuffix(base, "/"), key: key, db: db, log: log, listeners: map[string]chan Outcome{}}
}

// address of the reports on one lock of an entry.
func (c *Callbacks) address(entry string, token int64) string {
	return c.base + "/" + entry + "/" + strconv.FormatInt(token, 10) + "/" + CallbackToken(c.key, entry, token)
}

// ServeHTTP answers a worker. 503 makes it report again, once more is known or the database is back.
func (c *Callbacks) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	parts := strings.Split(strings.Trim(r.URL.Path, "/"), "/")
	if len(parts) < 3 || r.Method != http.MethodPost {
		http.NotFound(w, r)
		return
	}
	parts = parts[len(parts)-3:]
	token, err := strconv.ParseInt(parts[1], 10, 64)
	if err != nil || !CheckCallbackToken(c.key, parts[0], token, parts[2]) {
		http.NotFound(w, r)
		return
	}
	body, err := io.ReadAll(http.MaxBytesReader(w, r.Body, 32<<20))
	if err != nil {
		http.Error(w, "report cannot be read", http.StatusServiceUnavailable)
		return
	}
	o, err := ParseCogCallback(parts[0], body)
	if err != nil {
		http.Error(w, "report is not one about this run", http.StatusBadRequest)
		return
	}
	if c.deliver(parts[0], token, o) {
		return
	}
	entry, err := strconv.ParseInt(parts[0], 10, 64)
	if err != nil {
		http.NotFound(w, r)
		return
	}
	kept, err := saveReport(r.Context(), c.db, entry, token, body)
	switch {
	case err != nil:
		c.log.Warn("keep report of a worker", "entry", entry, "error", err)
		http.Error(w, "report cannot be kept just now", http.StatusServiceUnavailable)
	case !kept && final(o):
		http.Error(w, "nobody knows the run yet, or any more", http.StatusServiceUnavailable)
	}
}

func (c *Callbacks) deliver(entry string, token int64, o Outcome) bool {
	c.mu.Lock()
	listener := c.listeners[entry+"/"+strconv.FormatInt(token, 10)]
	c.mu.Unlock()
	if listener == nil {
		return false
	}
	for {
		select {
		case listener <- o:
			return true
		default:
		}
		select { // the newest report counts
		case <-listener:
		default:
		}
	}
}

// listen takes the reports on one lock of an entry from now on.
func (c *Callbacks) listen(entry string, token int64) (reports chan Outcome, stop func()) {
	key := entry + "/" + strconv.FormatInt(token, 10)
	reports = make(chan Outcome, 1)
	c.mu.Lock()
	c.listeners[key] = reports
	c.mu.Unlock()
	return reports, func() {
		c.mu.Lock()
		delete(c.listeners, key)
		c.mu.Unlock()
	}
}

// listen prepares for reports on a run that was started under token: those that come here, and those that another
// process kept. Protocols that are polled need none.
func (a *attempt) listen(ctx context.Context, token int64) (<-chan Outcome, func()) {
	if a.config.Callbacks == nil || a.model.Protocol != ProtocolCog || a.model.Type != TypeAsync {
		return nil, func() {}
	}
	a.call.Callback = a.config.Callbacks.address(a.call.Entry, token)
	reports, stop := a.config.Callbacks.listen(a.call.Entry, token)
	ctx, cancel := context.WithCancel(ctx)
	go a.watchReports(ctx, token, reports)
	return reports, func() { cancel(); stop() }
}

// watchReports looks for reports that came to another process.
func (a *attempt) watchReports(ctx context.Context, token int64, reports chan<- Outcome) {
	ticks := time.NewTicker(a.model.PollInterval.Duration())
	defer ticks.Stop()
	run := remoteRun{Queue: a.run.Queue.ID, Entry: a.run.Entry.ID, Token: token}
	for {
		select {
		case <-ctx.Done():
			return
		case <-ticks.C:
		}
		body, err := readReport(ctx, a.db, run)
		if err != nil || body == nil {
			continue
		}
		if o, err := ParseCogCallback(a.call.Entry, body); err == nil && final(o) {
			select {
			case reports <- o:
			case <-ctx.Done():
			}
			return
		}
	}
}
