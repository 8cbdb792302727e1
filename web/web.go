package web

import (
	"context"
	"html/template"
	"net/http"
	"net/url"
	"strings"
	"unicode/utf8"

	"github.com/penstock/penstock/pkg/operator"
)

// Dashboard serves the pages. It is an http.Handler for the addresses below Config.Path.
type Dashboard struct {
	cfg      Config
	db       *operator.Database // read only; called through cached alone
	change   *operator.Database // for verbs
	reads    *readings
	streams  *streams
	sessions *sessions
	examined examination
	claims   claimHistory
	assets   assets
	pages    []page
	verbs    map[string]verb
	views    *template.Template
	mux      *http.ServeMux
	handler  http.Handler
	drained  context.Context
	drain    context.CancelFunc
}

// New returns a dashboard that reads through one pool and changes through another. The first is its
// own, read only, with few connections and a short timeout of statements, so that no page keeps a
// push waiting.
func New(read, change *operator.Database, cfg Config) (*Dashboard, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	d := &Dashboard{
		cfg: cfg, db: read, change: change,
		reads: newReadings(cfg.readTimeout), streams: newStreams(),
		sessions: &sessions{find: cfg.Token, timeout: cfg.readTimeout},
		verbs:    map[string]verb{}, mux: http.NewServeMux(),
	}
	d.drained, d.drain = context.WithCancel(context.Background())
	if d.assets, err = loadAssets(cfg.Path); err != nil {
		return nil, err
	}
	if d.views, err = d.parse(); err != nil {
		return nil, err
	}
	d.overviewPages()
	d.queuePages()
	d.entryPages()
	d.failurePages()
	d.tablePages()
	d.databasePages()
	d.auditPages()
	d.queueVerbs()
	d.entryVerbs()
	d.bulkVerbs()
	d.alterVerb()
	d.pauseVerbs()
	d.limitVerbs()
	d.tokenVerbs()
	d.webhookVerbs()
	d.batchPages()
	d.lockPages()
	d.nodePages()
	d.modelPages()
	d.gatewayPages()
	d.autoscalerPages()
	d.fairnessPages()
	d.cronPages()
	d.loginRoutes()
	d.verbRoutes()
	d.assetRoutes()
	d.mux.HandleFunc("GET "+cfg.Path+"{rest...}", d.nowhere)
	sameOrigin := http.NewCrossOriginProtection()
	sameOrigin.SetDenyHandler(http.HandlerFunc(d.otherOrigin))
	d.handler = secured(sameOrigin.Handler(d.storable(d.mux)))
	return d, nil
}

// Path returns the address below which the dashboard is served, with a slash at both ends.
func (d *Dashboard) Path() string { return d.cfg.Path }

// Drain ends the event streams. Browsers connect again, to another leader or after a restart.
func (d *Dashboard) Drain() { d.drain() }

// ServeHTTP answers a request.
func (d *Dashboard) ServeHTTP(w http.ResponseWriter, r *http.Request) { d.handler.ServeHTTP(w, r) }

// contentPolicy lets a page load and run files of the dashboard alone. There is no inline script
// and no inline style.
const contentPolicy = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; " +
	"connect-src 'self'; " +
	"form-action 'self'; frame-ancestors 'none'; base-uri 'none'"

// secured sets the headers that every answer has.
func secured(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		h := w.Header()
		h.Set("Content-Security-Policy", contentPolicy)
		h.Set("X-Content-Type-Options", "nosniff")
		h.Set("Referrer-Policy", "same-origin")
		h.Set("Cross-Origin-Opener-Policy", "same-origin")
		h.Set("Cross-Origin-Resource-Policy", "same-origin")
		next.ServeHTTP(w, r)
	})
}

// unstorable is the answer for an address or a form with a text that no name or filter can have.
const unstorable = "It has a character that no text of the database can have: NUL, or bytes that are not UTF-8. " +
	"Take it out, and try again."

// storable refuses addresses with texts that the database would not take.
func (d *Dashboard) storable(next http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !isText(r.URL.Path) || !areTexts(r.URL.Query()) {
			d.problem(w, r, visitor{}, http.StatusBadRequest, "This address leads nowhere. "+unstorable)
			return
		}
		next.ServeHTTP(w, r)
	})
}

// isText reports whether Postgres can hold a text.
func isText(s string) bool { return utf8.ValidString(s) && !strings.ContainsRune(s, 0) }

func areTexts(values url.Values) bool {
	for _, of := range values {
		for _, v := range of {
			if !isText(v) {
				return false
			}
		}
	}
	return true
}

func (d *Dashboard) otherOrigin(w http.ResponseWriter, r *http.Request) {
	d.problem(w, r, visitor{}, http.StatusForbidden,
		"This request came from a page of another site, and was refused.")
}

func (d *Dashboard) nowhere(w http.ResponseWriter, r *http.Request) {
	who, known := d.admitted(w, r)
	if !known {
		return
	}
	if r.URL.Path == d.cfg.Path+"overview" {
		http.Redirect(w, r, d.cfg.Path, http.StatusSeeOther)
		return
	}
	d.problem(w, r, who, http.StatusNotFound, "There is no page at this address.")
}
