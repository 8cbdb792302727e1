package web

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"html/template"
	"net/http"
	"net/url"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
)

// page is an address of the dashboard.
type page struct {
	// path is the address below the dashboard's own, as a pattern of net/http: queues/{name}.
	path string
	// nav is the label in the navigation, section its group; a page without nav has the section of
	// another page's path, whose label is marked.
	nav, section string
	// title is that of the document; a view with a method Title has its own.
	title string
	// template is the name of the template of the part.
	template string
	// live pages have a stream; the others are read once.
	live bool
	// read returns the view model. It depends on the query and on nothing else, since visitors
	// share what it returns.
	read func(ctx context.Context, q query) (any, error)
}

// query is what an address asks for.
type query struct {
	values url.Values
	path   func(name string) string
	role   role
}

// Get returns a parameter of the address, from its path or else from its query, as it is: a blank may be part of a
// name.
func (q query) Get(name string) string {
	if v := q.path(name); v != "" {
		return v
	}
	return q.values.Get(name)
}

// Typed returns a parameter that is no name, such as a number or a duration, without the blanks around it.
func (q query) Typed(name string) string { return strings.TrimSpace(q.Get(name)) }

// Int returns a parameter that is a number, and 0 where it is none.
func (q query) Int(name string) int64 {
	n, err := strconv.ParseInt(q.Typed(name), 10, 64)
	if err != nil {
		return 0 // and not the largest number, for one that is larger
	}
	return n
}

// view is what every template gets: the model of the page, and what the frame needs.
type view struct {
	Page    any // the view model that the page's read returned
	Title   string
	Root    string // the address of the dashboard, with a slash at its end
	Role    role
	Address string // of the page, without parameters of the frame
	Query   url.Values
	Shell   shell
	verbs   map[string]verb
}

// Offers reports whether the dashboard has a verb.
func (v view) Offers(verb string) bool { return v.verbs[verb].name != "" }

// snapshot is a page at one time for one role.
type snapshot struct {
	title  string
	status int
	part   []byte
	points []byte // JSON; nil: the page has no chart
	tag    string // of part and points
}

// size is how many bytes are kept of it.
func (s *snapshot) size() int64 { return int64(len(s.part) + len(s.points)) }

// page registers a page.
func (d *Dashboard) page(p page) {
	d.pages = append(d.pages, p)
	pattern := d.cfg.Path + p.path
	if p.path == "" {
		pattern += "{$}"
	}
	d.mux.HandleFunc("GET "+pattern, func(w http.ResponseWriter, r *http.Request) {
		if who, known := d.admitted(w, r); known {
			d.serve(w, r, p, who)
		}
	})
}

// serve answers with one of the four forms of a page.
func (d *Dashboard) serve(w http.ResponseWriter, r *http.Request, p page, who visitor) {
	values := r.URL.Query()
	form := values.Get("live")
	values.Del("live")
	values.Del("seen")
	values.Del("done")
	q := query{values: values, path: r.PathValue, role: who.role}
	address := strings.TrimPrefix(r.URL.Path, "/")
	draw := func(ctx context.Context) (*snapshot, error) { return d.snapshot(ctx, p, q, "/"+address) }
	h := w.Header()
	h.Set("Cache-Control", "private, no-cache")
	h.Set("Vary", "Cookie, HX-Request")
	if form == "stream" {
		d.stream(w, r, draw)
		return
	}
	now, err := draw(r.Context())
	if err != nil {
		return // the visitor has gone
	}
	switch {
	case form == "points":
		h.Set("Content-Type", "application/json")
		h.Set("ETag", now.tag)
		if r.Header.Get("If-None-Match") == now.tag {
			w.WriteHeader(http.StatusNotModified)
			return
		}
		_, _ = w.Write(packed(w, r, now.points))
	case form == "part" || r.Header.Get("HX-Request") == "true":
		h.Set("Content-Type", "text/html; charset=utf-8")
		h.Set("ETag", now.tag)
		if r.Header.Get("If-None-Match") == now.tag {
			w.WriteHeader(http.StatusNotModified)
			return
		}
		title := "<title>" + template.HTMLEscapeString(now.title+titleEnd) + "</title>"
		_, _ = w.Write(packed(w, r, slices.Concat([]byte(title), now.part)))
	default:
		d.document(w, r, who, p, now)
	}
}

// snapshot returns a page as it is in this beat. It returns an error only if ctx ends: an error of the page
// is a snapshot too.
func (d *Dashboard) snapshot(ctx context.Context, p page, q query, address string) (*snapshot, error) {
	key := keyOf("snapshot", q.role, address, q.values.Encode())
	return kept(ctx, d, key, beat, func(ctx context.Context) (*snapshot, error) {
		return d.make(context.WithoutCancel(ctx), p, q, address), nil // the visitor that reads for all may leave
	})
}

func (d *Dashboard) make(ctx context.Context, p page, q query, address string) *snapshot {
	ctx, stale := withOutages(ctx)
	v := view{Title: p.title, Root: d.cfg.Path, Role: q.role, Address: address, Query: q.values, verbs: d.verbs}
	model, err := p.read(ctx, q)
	v.Shell = d.shell(ctx)
	if err == nil {
		v.Page = model
		if titled, has := model.(interface{ Title() string }); has {
			v.Title = titled.Title()
		}
	}
	now := &snapshot{title: v.Title, status: http.StatusOK}
	if old, found := stale.oldest(); found {
		v.Shell.Outage = outageOf(old.err, old.at)
	}
	name := p.template
	if err != nil {
		name, now.status = "trouble", statusOf(err)
		v.Page = d.troubleOf(err, now.status)
		if unanswered(err) {
			v.Shell.Outage = nil // the page itself says it
		}
	}
	var part bytes.Buffer
	if err := d.views.ExecuteTemplate(&part, "shell", v); err != nil {
		d.cfg.Log.Error("write a page", "page", p.path, "template", "shell", "error", err)
	}
	if err := d.views.ExecuteTemplate(&part, name, v); err != nil {
		d.cfg.Log.Error("write a page", "page", p.path, "template", name, "error", err)
		now.status = http.StatusInternalServerError
		part.WriteString(
			`<p class="banner bad">This page could not be written; the log of the leader has the reason.</p>`)
	}
	now.part = part.Bytes()
	if charted, has := v.Page.(interface{ Charts() map[string]Chart }); has && err == nil {
		now.points, _ = json.Marshal(charted.Charts()) // numbers and texts alone
	}
	now.tag = tagOf(now.part, now.points)
	return now
}

// passing are the texts of relative times, which the browser keeps current by itself.
var passing = regexp.MustCompile(`(<time [^>]*>)[^<]*</time>`)

// tagOf returns the ETag of a snapshot. It does not change when time alone has passed, nor with the encoding: it is a
// weak one.
func tagOf(part, points []byte) string {
	h := fnv.New128a()
	_, _ = h.Write(passing.ReplaceAll(part, []byte("$1")))
	_, _ = h.Write(points)
	return fmt.Sprintf(`W/"%x"`, h.Sum(nil))
}

const titleEnd = " · Penstock"

// documentView is what the template of the whole document gets.
type documentView struct {
	Title, Heading string
	Root           string
	Address        string
	Theme          string
	Navigation     []navigationGroup
	Who            visitor
	Open           bool
	Live           bool
	Tag            string
	Now            int64 // ms since 1970
	Part           template.HTML
	Points         string
	Notice         string
	Assets         assets
	Version        string
}

// document writes a page as a whole.
func (d *Dashboard) document(w http.ResponseWriter, r *http.Request, who visitor, p page, now *snapshot) {
	v := documentView{
		Title: now.title + titleEnd, Heading: now.title, Root: d.cfg.Path, Address: r.URL.Path,
		Theme: themeOf(r), Navigation: d.navigation(p), Who: who, Open: d.cfg.Open, Live: p.live, Tag: now.tag,
		Now:    time.Now().UnixMilli(),
		Part:   template.HTML(now.part), //nolint:gosec // made by templates of this package
		Points: string(now.points), Notice: d.takeNotice(w, r), Assets: d.assets, Version: d.cfg.Version,
	}
	d.writeAs(w, now.status, "document", v, func(text []byte) []byte { return packed(w, r, text) })
}

// write writes a template as the whole answer.
func (d *Dashboard) write(w http.ResponseWriter, status int, name string, v any) {
	d.writeAs(w, status, name, v, func(text []byte) []byte { return text })
}

func (d *Dashboard) writeAs(w http.ResponseWriter, status int, name string, v any, as func([]byte) []byte) {
	var text bytes.Buffer
	if err := d.views.ExecuteTemplate(&text, name, v); err != nil {
		d.cfg.Log.Error("write a page", "template", name, "error", err)
		http.Error(w, "This page could not be written; the log of the leader has the reason.",
			http.StatusInternalServerError)
		return
	}
	w.Header().Set("Content-Type", "text/html; charset=utf-8")
	sent := as(text.Bytes())
	w.WriteHeader(status)
	_, _ = w.Write(sent) // the visitor may have gone
}

// known reports whether an error is about the object that was asked for, and not about the
// database.
func known(err error) bool {
	for _, sentinel := range []error{
		invalidation.ErrQueueNotFound, invalidation.ErrEntryNotFound, invalidation.ErrNotFound,
		invalidation.ErrInvalid, invalidation.ErrPayloadTooLarge, invalidation.ErrState,
		invalidation.ErrIdempotencyConflict, invalidation.ErrNoInstance, invalidation.ErrQueueFull,
		errForbidden, errNoSession, errLimited, errPushOnly,
	} {
		if errors.Is(err, sentinel) {
			return true
		}
	}
	return false
}

func statusOf(err error) int {
	switch {
	case errors.Is(err, invalidation.ErrQueueNotFound), errors.Is(err, invalidation.ErrEntryNotFound),
		errors.Is(err, invalidation.ErrNotFound):
		return http.StatusNotFound
	case errors.Is(err, invalidation.ErrInvalid), errors.Is(err, invalidation.ErrPayloadTooLarge):
		return http.StatusUnprocessableEntity
	case errors.Is(err, invalidation.ErrState), errors.Is(err, invalidation.ErrIdempotencyConflict),
		errors.Is(err, invalidation.ErrNoInstance), errors.Is(err, invalidation.ErrQueueFull):
		return http.StatusConflict
	case errors.Is(err, errForbidden):
		return http.StatusForbidden
	case unanswered(err):
		return http.StatusServiceUnavailable
	}
	return http.StatusInternalServerError
}
