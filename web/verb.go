package web

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
)

const (
	formBytesMax = 64 << 10
	reasonMax    = 500 // characters
)

// verb is a change that a visitor can make.
type verb struct {
	name  string // below do/ in its address
	title string // Pause queue
	role  role   // the least one
	// objects are the parameters of the address that name the object. All but those in optional
	// must be given.
	objects, optional []string
	// fields are inputs beside the reason. None may be a secret: the address of a login may have them.
	fields []field
	// effect says in a sentence or two what the change does and what it does not.
	effect string
	// destroys marks a change that cannot be taken back.
	destroys bool
	// reveals is the noun for a secret that do returns: it is displayed once, and not kept. Empty:
	// do returns none.
	reveals string
	// preview returns what the change would touch now. Nil: the object alone.
	preview func(ctx context.Context, in form) (preview, error)
	// do makes the change and returns the text that the next page displays.
	do func(ctx context.Context, in form, by invalidation.By) (string, error)
	// next is the address that is displayed afterwards, if not the one that the visitor came from.
	next func(in form) string
}

// field is an input of a verb's form.
type field struct {
	Name, Label, Hint string
	Kind              string // of the input element: text, number, checkbox, select, textarea
	Value             string // at first
	Choices           []string
	Required          bool
}

// preview is what a change would touch.
type preview struct {
	Count   string // with its noun: at least 10,000 entries
	Facts   []fact
	Warning string
}

// fact is a label with its value.
type fact struct{ Label, Value string }

// verbView is what the template of a verb's form gets.
type verbView struct {
	Root, Theme string
	Who         visitor
	Assets      assets
	Verb        string
	Title       string
	Effect      string
	Destroys    bool
	Objects     []fact
	Hidden      []fact
	Fields      []field
	Preview     preview
	Problem     string
	Reason      string
	ReasonMax   int
	Next        string
	Part        bool // without the document around it
}

// verb registers a change.
func (d *Dashboard) verb(v verb) { d.verbs[v.name] = v }

func (d *Dashboard) verbRoutes() {
	d.mux.HandleFunc("GET "+d.cfg.Path+"do/{verb}", func(w http.ResponseWriter, r *http.Request) {
		if who, v, ok := d.chosen(w, r); ok {
			d.ask(w, r, v, who, form{r.URL.Query(), v.objects}, http.StatusOK, nil)
		}
	})
	d.mux.HandleFunc("POST "+d.cfg.Path+"do/{verb}", func(w http.ResponseWriter, r *http.Request) {
		r.Body = http.MaxBytesReader(w, r.Body, formBytesMax)
		if who, v, ok := d.chosen(w, r); ok {
			d.carryOut(w, r, v, who)
		}
	})
}

// chosen returns the verb of an address for a visitor who may use it, and answers other requests
// itself.
func (d *Dashboard) chosen(w http.ResponseWriter, r *http.Request) (visitor, verb, bool) {
	who, known := d.admitted(w, r)
	if !known {
		return who, verb{}, false
	}
	v, found := d.verbs[r.PathValue("verb")]
	switch {
	case !found:
		d.problem(w, r, who, http.StatusNotFound, "There is no such change.")
	case who.role < v.role:
		d.problem(w, r, who, http.StatusForbidden,
			fmt.Sprintf("%s needs the role %s, and your token gives you the role %s.",
				v.title, v.role, who.role))
	default:
		return who, v, true
	}
	return who, verb{}, false
}

// ask displays the form of a verb.
func (d *Dashboard) ask(w http.ResponseWriter, r *http.Request, v verb, who visitor, in form, status int,
	problem error,
) {
	w.Header().Set("Cache-Control", "no-store")
	w.Header().Set("Vary", "Cookie, X-Dialog")
	view := verbView{
		Root: d.cfg.Path, Theme: themeOf(r), Who: who, Assets: d.assets,
		Verb: v.name, Title: v.title, Effect: v.effect, Destroys: v.destroys, Fields: slices.Clone(v.fields),
		Reason: in.Get("reason"), ReasonMax: reasonMax, Next: local(in.Get("next")),
		Part: r.Header.Get("X-Dialog") != "",
	}
	for _, name := range v.objects {
		if value := in.Get(name); value != "" {
			view.Objects = append(view.Objects, fact{strings.ReplaceAll(name, "_", " "), value})
			view.Hidden = append(view.Hidden, fact{name, value})
		} else if !slices.Contains(v.optional, name) {
			d.problem(w, r, who, http.StatusUnprocessableEntity,
				fmt.Sprintf("The address needs the parameter %s.", name))
			return
		}
	}
	for i, f := range view.Fields {
		// A form that was sent has a reason, and an input that was cleared stays so. Links may leave fields out.
		if value := in.Get(f.Name); value != "" || in.values.Has("reason") {
			view.Fields[i].Value = value
		}
	}
	if problem != nil {
		view.Problem = d.tell(problem, v)
	} else if v.preview != nil {
		ctx, cancel := context.WithTimeout(r.Context(), d.cfg.readTimeout)
		defer cancel()
		found, err := v.preview(ctx, in)
		view.Preview = found
		switch {
		case err != nil && slow(err):
			view.Preview.Count = "not known: it could not be counted in 2 s"
		case err != nil:
			d.problem(w, r, who, statusOf(err), d.tell(err, v))
			return
		}
	}
	d.write(w, status, "verb", view)
}

// carryOut makes the change of a form, and goes back to the page that it came from.
func (d *Dashboard) carryOut(w http.ResponseWriter, r *http.Request, v verb, who visitor) {
	if err := r.ParseForm(); err != nil {
		d.problem(w, r, who, http.StatusBadRequest, "The form could not be read.")
		return
	}
	if !areTexts(r.PostForm) {
		d.problem(w, r, who, http.StatusBadRequest, "Nothing was changed by this form. "+unstorable)
		return
	}
	in := form{r.PostForm, v.objects}
	reason := in.Get("reason")
	if err := v.check(in, reason); err != nil {
		d.ask(w, r, v, who, in, http.StatusUnprocessableEntity, err)
		return
	}
	done, err := v.do(r.Context(), in, who.by(reason))
	d.reads.expire()
	if err != nil {
		status := statusOf(err)
		if status == http.StatusInternalServerError {
			d.cfg.Log.Error("change by the dashboard", "verb", v.name, "actor", who.Name, "error", err)
		}
		d.ask(w, r, v, who, in, status, err)
		return
	}
	next := local(in.Get("next"))
	if v.next != nil {
		next = v.next(in)
	}
	if v.reveals != "" {
		w.Header().Set("Cache-Control", "no-store")
		d.write(w, http.StatusOK, "revealed", struct {
			Theme, Title, Kind, Secret, Next string
			Part                             bool
		}{themeOf(r), v.title, v.reveals, done, d.cfg.Path + next, false})
		return
	}
	d.notice(w, r, done)
	http.Redirect(w, r, d.cfg.Path+next, http.StatusSeeOther)
}

// check returns an error for a form that lacks what the verb needs.
func (v verb) check(in form, reason string) error {
	for _, name := range v.objects {
		if in.Get(name) == "" && !slices.Contains(v.optional, name) {
			return fmt.Errorf("%s is missing: %w", name, invalidation.ErrInvalid)
		}
	}
	for _, f := range v.fields {
		if f.Required && in.Get(f.Name) == "" {
			return fmt.Errorf("%s is missing: %w", strings.ToLower(f.Label), invalidation.ErrInvalid)
		}
	}
	switch {
	case reason == "":
		return fmt.Errorf("a reason is missing; it is kept in the audit: %w", invalidation.ErrInvalid)
	case len([]rune(reason)) > reasonMax:
		return fmt.Errorf("the reason has more than %d characters: %w", reasonMax, invalidation.ErrInvalid)
	}
	return nil
}

// tell returns the text of an error for the visitor: that of an error about the object, and none of
// the database's.
func (d *Dashboard) tell(err error, v verb) string {
	switch {
	case known(err):
		return textOf(err)
	case slow(err), unanswered(err):
		return "The database did not answer, so it is not known whether the change was made. Look at the " +
			"audit before you repeat it."
	}
	return v.title + " failed; the log of the leader has the reason."
}

// textOf returns the text of an error about an object as a sentence, without the kind of the error at its end.
func textOf(err error) string {
	text := err.Error()
	for _, sentinel := range []error{invalidation.ErrInvalid, invalidation.ErrState} {
		if errors.Is(err, sentinel) {
			text = strings.TrimSuffix(text, ": "+sentinel.Error())
		}
	}
	return sentence(text)
}

const (
	noticeCookie = "penstock_notice"
	noticeLasts  = 30 * time.Second
)

// notice keeps a text for the next page in a cookie.
func (d *Dashboard) notice(w http.ResponseWriter, r *http.Request, text string) {
	runes := []rune(text)
	d.setCookie(w, r, noticeCookie, url.QueryEscape(string(runes[:min(len(runes), 300)])), noticeLasts)
}

// takeNotice returns the text that the last change left, and removes it.
func (d *Dashboard) takeNotice(w http.ResponseWriter, r *http.Request) string {
	cookie, err := r.Cookie(noticeCookie)
	if err != nil || cookie.Value == "" {
		return ""
	}
	d.setCookie(w, r, noticeCookie, "", -1)
	text, err := url.QueryUnescape(cookie.Value)
	if err != nil {
		return ""
	}
	return text
}

// problemView is what the template of a page without content gets.
type problemView struct {
	Root, Theme, Title, Text string
	Login                    string // address of the login, where that is the way on
	Who                      visitor
	Assets                   assets
	Part                     bool // without the document around it
}

// problem writes a page that says why there is no other.
func (d *Dashboard) problem(w http.ResponseWriter, r *http.Request, who visitor, status int, text string) {
	d.writeProblem(w, r, status, problemView{Who: who, Text: text})
}

func (d *Dashboard) writeProblem(w http.ResponseWriter, r *http.Request, status int, v problemView) {
	w.Header().Set("Cache-Control", "no-store")
	v.Root, v.Theme, v.Assets = d.cfg.Path, themeOf(r), d.assets
	v.Title, v.Part = http.StatusText(status), r.Header.Get("X-Dialog") != ""
	d.write(w, status, "problem", v)
}
