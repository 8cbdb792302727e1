package web

import (
	"context"
	"crypto/sha256"
	"errors"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
)

// role is what a visitor may do. A larger one includes the smaller ones.
type role int

// The roles.
const (
	nobody role = iota
	viewer
	operatorRole
	administrator
)

// String is the role as pages name it.
func (r role) String() string { return [...]string{"nobody", "viewer", "operator", "admin"}[r] }

// roleOf returns the role of a token's scopes.
func roleOf(scopes []string) role {
	switch {
	case slices.Contains(scopes, "admin"):
		return administrator
	case slices.Contains(scopes, "operate"):
		return operatorRole
	case slices.Contains(scopes, "read"):
		return viewer
	}
	return nobody
}

// visitor is the sender of a request.
type visitor struct {
	Name string // of the token: the actor in the audit
	role role
}

// Role is that of the visitor.
func (v visitor) Role() string { return v.role.String() }

// by returns actor and reason of a change.
func (v visitor) by(reason string) invalidation.By {
	return invalidation.By{Actor: v.Name, Reason: reason}
}

var (
	errNoSession = errors.New("log in with a token of the API")
	errForbidden = errors.New("your token does not allow this")
	errPushOnly  = errors.New("this token may push only: a token for the dashboard needs scope read, " +
		"operate or admin")
	errLimited = errors.New("this token is limited to some queues or applications, and the pages are " +
		"about all of them: " +
		"use a token without limits")
)

const (
	sessionCookie = "penstock_session"
	themeCookie   = "penstock_theme"
	outageGrace   = 15 * time.Minute // in which a visitor whose token was found before is let in without a lookup
	sessionsMax   = 10_000
)

// sessions finds visitors by the secrets of their tokens, which their cookies hold: a session is
// valid on every leader, and ends when the token does.
type sessions struct {
	find    func(ctx context.Context, secret string) (operator.APIToken, error)
	timeout time.Duration // of a lookup

	mu   sync.Mutex
	seen map[[sha256.Size]byte]seenVisitor
}

type seenVisitor struct {
	visitor
	at time.Time
}

// visitor returns the visitor of a secret. While the database does not answer, a visitor found in
// the last minutes is let in to what the pages still display. The lookup goes on when the visitor leaves: by ending
// the request nobody may keep it from finding that a token was revoked.
func (s *sessions) visitor(ctx context.Context, secret string) (visitor, error) {
	key := sha256.Sum256([]byte(secret))
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), s.timeout)
	defer cancel()
	token, err := s.find(ctx, secret)
	s.mu.Lock()
	defer s.mu.Unlock()
	if err != nil {
		before, found := s.seen[key]
		if found && away(err) && time.Since(before.at) < outageGrace {
			return before.visitor, nil
		}
		if !unanswered(err) {
			delete(s.seen, key)
		}
		return visitor{}, err
	}
	v := visitor{Name: token.Name, role: roleOf(token.Scopes)}
	switch {
	case len(token.Queues)+len(token.Applications) > 0:
		return visitor{}, errLimited
	case v.role == nobody:
		return visitor{}, errPushOnly
	case s.seen == nil || len(s.seen) >= sessionsMax:
		s.seen = map[[sha256.Size]byte]seenVisitor{}
	}
	s.seen[key] = seenVisitor{v, time.Now()}
	return v, nil
}

// away reports whether a lookup failed because the database could not be reached, refused work or took too long. An
// error that tells neither, such as that of a lookup that was given up or not begun, lets nobody in.
func away(err error) bool {
	return unanswered(err) && (postgres.Disconnected(err) || postgres.Code(err) != "")
}

// visitor returns the visitor of a request.
func (d *Dashboard) visitor(r *http.Request) (visitor, error) {
	if d.cfg.Open {
		return visitor{Name: "anybody", role: administrator}, nil
	}
	cookie, err := r.Cookie(sessionCookie)
	if err != nil || cookie.Value == "" {
		return visitor{}, errNoSession
	}
	return d.sessions.visitor(r.Context(), cookie.Value)
}

// admitted returns the visitor of a request, and answers the requests of others itself.
func (d *Dashboard) admitted(w http.ResponseWriter, r *http.Request) (visitor, bool) {
	who, err := d.visitor(r)
	switch {
	case err == nil:
		return who, true
	case unanswered(err):
		d.problem(w, r, visitor{}, http.StatusServiceUnavailable, downText+" You can log in when it does.")
	case r.URL.Query().Has("live") || r.Header.Get("HX-Request") == "true":
		http.Error(w, "the session has ended; "+errNoSession.Error(), http.StatusUnauthorized)
	case r.Method != http.MethodGet:
		d.sessionEnded(w, r)
	default:
		back := url.Values{"next": {strings.TrimPrefix(r.URL.RequestURI(), d.cfg.Path)}}
		http.Redirect(w, r, d.cfg.Path+"login?"+back.Encode(), http.StatusSeeOther)
	}
	return visitor{}, false
}

// addressMax bounds the characters of an address that carries the inputs of a form: servers and proxies before the
// leaders take 8 KiB with the line around it, and the address of the login has it with its signs escaped once more.
const addressMax = 2500

// sessionEnded answers a change of a visitor whose session has ended. The login leads back to the form with what was
// typed, where an address can carry it.
func (d *Dashboard) sessionEnded(w http.ResponseWriter, r *http.Request) {
	view := problemView{Text: "Your session has ended, and nothing was changed. "}
	next := ""
	if err := r.ParseForm(); err == nil {
		// The next visitor of this browser confirms by themselves.
		r.PostForm.Del(confirmField)
		next = strings.TrimPrefix(r.URL.Path, d.cfg.Path) + "?" + r.PostForm.Encode()
	}
	if next != "" && len(next) <= addressMax {
		view.Text += "Log in again: the form has what you typed."
	} else {
		next = local(r.PostForm.Get("next"))
		view.Text += "Go back and copy what you typed, since it is too long to be kept here, and log in again."
	}
	view.Login = d.cfg.Path + "login?" + url.Values{"next": {next}}.Encode()
	d.writeProblem(w, r, http.StatusUnauthorized, view)
}

// loginView is what the template of the login gets.
type loginView struct {
	Root, Theme, Next string
	Problem           string
	Assets            assets
}

func (d *Dashboard) loginRoutes() {
	d.mux.HandleFunc("GET "+d.cfg.Path+"login", func(w http.ResponseWriter, r *http.Request) {
		if _, err := d.visitor(r); err == nil {
			http.Redirect(w, r, d.cfg.Path+local(r.URL.Query().Get("next")), http.StatusSeeOther)
			return
		}
		d.login(w, r, http.StatusOK, "")
	})
	d.mux.HandleFunc("POST "+d.cfg.Path+"login", d.openSession)
	d.mux.HandleFunc("POST "+d.cfg.Path+"logout", func(w http.ResponseWriter, r *http.Request) {
		d.setCookie(w, r, sessionCookie, "", -1)
		http.Redirect(w, r, d.cfg.Path+"login", http.StatusSeeOther)
	})
	d.mux.HandleFunc("POST "+d.cfg.Path+"theme", func(w http.ResponseWriter, r *http.Request) {
		r.Body = http.MaxBytesReader(w, r.Body, formBytesMax)
		d.setCookie(w, r, themeCookie, themeNamed(r.PostFormValue("theme")), 365*24*time.Hour)
		http.Redirect(w, r, d.cfg.Path+local(r.PostFormValue("next")), http.StatusSeeOther)
	})
}

func (d *Dashboard) login(w http.ResponseWriter, r *http.Request, status int, problem string) {
	w.Header().Set("Cache-Control", "no-store")
	d.write(w, status, "login", loginView{
		Root: d.cfg.Path, Theme: themeOf(r), Next: local(r.FormValue("next")), Problem: problem,
		Assets: d.assets,
	})
}

// openSession checks the token of the form and keeps it in a cookie that no script can read.
func (d *Dashboard) openSession(w http.ResponseWriter, r *http.Request) {
	r.Body = http.MaxBytesReader(w, r.Body, formBytesMax)
	secret := strings.TrimSpace(r.PostFormValue("token"))
	if d.cfg.Open {
		http.Redirect(w, r, d.cfg.Path, http.StatusSeeOther)
		return
	}
	_, err := d.sessions.visitor(r.Context(), secret)
	switch {
	case err == nil:
		d.setCookie(w, r, sessionCookie, secret, d.cfg.SessionMax)
		http.Redirect(w, r, d.cfg.Path+local(r.PostFormValue("next")), http.StatusSeeOther)
	case errors.Is(err, errLimited), errors.Is(err, errPushOnly):
		d.login(w, r, http.StatusForbidden, sentence(err.Error()))
	case unanswered(err) && operator.WellFormed(secret):
		d.login(w, r, http.StatusServiceUnavailable, downText)
	default:
		d.login(w, r, http.StatusUnauthorized,
			"This token is not known, has expired or was revoked. penstock token create makes one.")
	}
}

// setCookie sets a cookie for the addresses of the dashboard; a negative time removes it.
func (d *Dashboard) setCookie(w http.ResponseWriter, r *http.Request, name, value string, lasts time.Duration) {
	http.SetCookie(w, &http.Cookie{
		Name: name, Value: value, Path: d.cfg.Path, MaxAge: int(lasts.Seconds()),
		HttpOnly: name == sessionCookie,
		Secure:   r.TLS != nil || strings.EqualFold(r.Header.Get("X-Forwarded-Proto"), "https"),
		SameSite: http.SameSiteStrictMode,
	})
}

// local returns an address below the dashboard as it may follow the dashboard's own; others become
// empty.
func local(next string) string {
	u, err := url.Parse(next)
	if err != nil || u.IsAbs() || u.Host != "" || strings.HasPrefix(next, "/") || strings.ContainsAny(next,
		"\\\r\n") ||
		slices.Contains(strings.Split(u.Path, "/"), "..") {
		return ""
	}
	return next
}

// themeOf returns the theme that the visitor chose: light, dark, or empty for that of the system.
func themeOf(r *http.Request) string {
	cookie, err := r.Cookie(themeCookie)
	if err != nil {
		return ""
	}
	return themeNamed(cookie.Value)
}

func themeNamed(name string) string {
	if name == "light" || name == "dark" {
		return name
	}
	return ""
}
