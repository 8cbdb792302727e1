package web

import (
	"bufio"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"regexp"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/jackc/pgx/v5/pgconn"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
)

// The bound of the contract, in the units in which a network counts.
const scriptAndStyleMax = 45_000

func TestScriptAndStyleStaySmall(t *testing.T) {
	a, err := loadAssets("/ui/")
	if err != nil {
		t.Fatal(err)
	}
	total := 0
	for name, f := range a.files {
		t.Logf("%-10s %6d bytes, %6d compressed", name, len(f.text), len(f.zipped))
		if name != "icon.svg" {
			total += len(f.zipped)
		}
	}
	t.Logf("script and style: %d bytes compressed", total)
	if total >= scriptAndStyleMax {
		t.Errorf("script and style take %d bytes compressed, want less than %d", total, scriptAndStyleMax)
	}
}

var vendored = regexp.MustCompile(`(?m)^\| (\S+) \| (\S+) \| (\S+) \| (\S+) \| \S+ \| ([0-9a-f]{64}) \|$`)

func TestVendoredFilesAreUnchanged(t *testing.T) {
	list, err := files.ReadFile("static/VENDOR.md")
	if err != nil {
		t.Fatal(err)
	}
	rows := vendored.FindAllStringSubmatch(string(list), -1)
	if len(rows) != 3 {
		t.Fatalf("VENDOR.md has %d rows, want 3", len(rows))
	}
	for _, row := range rows {
		text, err := files.ReadFile("static/" + row[1])
		if err != nil {
			t.Error(err)
			continue
		}
		if got := fmt.Sprintf("%x", sha256.Sum256(text)); got != row[5] {
			t.Errorf("%s has the hash %s, and VENDOR.md says %s", row[1], got, row[5])
		}
		if os.Getenv("PENSTOCK_NPM") != "" {
			if got := fromNPM(t, row[2], row[3], row[4]); got != row[5] {
				t.Errorf("%s of %s %s has the hash %s in the registry, and VENDOR.md says %s", row[4], row[2], row[3], got, row[5])
			}
		}
	}
}

func TestOthersAreSentToTheLogin(t *testing.T) {
	s := newSite(t)
	b := s.as(nobody)
	got := b.get("?state=pending")
	if got.path != "/ui/login" || !strings.Contains(got.text, `name="token"`) || !strings.Contains(got.text, `value="?state=pending"`) {
		t.Errorf("got %s: %s", got.path, got.text)
	}
	for _, path := range []string{"?live=part", "?live=stream", "?live=points"} {
		if got := b.get(path); got.status != http.StatusUnauthorized {
			t.Errorf("GET %s without a session: %d", path, got.status)
		}
	}
	if got := b.post("login", url.Values{"token": {operator.NewSecret()}}); got.status != http.StatusUnauthorized {
		t.Errorf("an invented token: %d", got.status)
	}
	limited, err := s.change.CreateToken(t.Context(),
		operator.Grant{Name: "limited", Scopes: []string{"admin"}, Queues: []string{"work"}}, tester)
	if err != nil {
		t.Fatal(err)
	}
	confined, err := s.change.CreateToken(t.Context(),
		operator.Grant{Name: "confined", Scopes: []string{"admin"}, Applications: []string{"default"}}, tester)
	if err != nil {
		t.Fatal(err)
	}
	pusher, err := s.change.CreateToken(t.Context(), operator.Grant{Name: "pusher", Scopes: []string{"push"}}, tester)
	if err != nil {
		t.Fatal(err)
	}
	for _, secret := range []string{limited, confined, pusher} {
		if got := b.post("login", url.Values{"token": {secret}}); got.status != http.StatusForbidden {
			t.Errorf("a token that pages are not for: %d", got.status)
		}
	}
}

func TestASessionEndsWithItsToken(t *testing.T) {
	s := newSite(t)
	b := s.as(viewer)
	if got := b.get(""); got.path != "/ui/" || got.status != http.StatusOK {
		t.Fatalf("got %s: %d", got.path, got.status)
	}
	if err := s.change.RevokeToken(t.Context(), viewer.String(), tester); err != nil {
		t.Fatal(err)
	}
	if got := b.get(""); got.path != "/ui/login" {
		t.Errorf("with a revoked token: %s", got.path)
	}
}

// net/http ends the context of a request whose client has closed its sending half, and still delivers the answer.
func TestARevokedTokenIsRefusedThoughItsClientEndsTheRequest(t *testing.T) {
	secret, revoked := operator.NewSecret(), atomic.Bool{}
	d, err := New(operator.New(noDatabase{}), operator.New(noDatabase{}), Config{
		Timetable: hourly, readTimeout: time.Minute,
		Token: func(ctx context.Context, _ string) (operator.APIToken, error) {
			if !revoked.Load() {
				return operator.APIToken{Name: "ada", Scopes: []string{"admin"}, Live: true}, nil
			}
			select { // a lookup takes some time
			case <-ctx.Done():
				return operator.APIToken{}, ctx.Err()
			case <-time.After(100 * time.Millisecond):
				return operator.APIToken{}, invalidation.ErrNotFound
			}
		},
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(d.Drain)
	server := httptest.NewServer(d)
	t.Cleanup(server.Close)
	if _, err := d.sessions.visitor(t.Context(), secret); err != nil {
		t.Fatal(err)
	}
	revoked.Store(true)
	for range 5 {
		dialer := net.Dialer{}
		c, err := dialer.DialContext(t.Context(), "tcp", strings.TrimPrefix(server.URL, "http://"))
		if err != nil {
			t.Fatal(err)
		}
		fmt.Fprintf(c, "GET %squeues HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nCookie: penstock_session=%s\r\n\r\n",
			d.Path(), secret)
		if half, is := c.(*net.TCPConn); !is || half.CloseWrite() != nil {
			t.Fatal("the sending half was not closed")
		}
		answer, err := http.ReadResponse(bufio.NewReader(c), nil)
		if err != nil {
			t.Fatal(err)
		}
		answer.Body.Close()
		c.Close()
		if answer.StatusCode != http.StatusSeeOther {
			t.Fatalf("with a revoked token: %d, want the way to the login", answer.StatusCode)
		}
	}
}

// A visitor who was found before is let in while the database is away, and not because a lookup was refused or given up.
func TestOnlyAnOutageLetsVisitorsInWithoutALookup(t *testing.T) {
	for name, c := range map[string]struct {
		err  error
		want error
	}{
		"no connection": {fmt.Errorf("find token: %w", &net.OpError{Op: "dial", Err: errors.New("refused")}), nil},
		"no answer":     {fmt.Errorf("find token: %w", context.DeadlineExceeded), nil},
		"shutting down": {&pgconn.PgError{Code: "57P01"}, nil},
		"given up":      {fmt.Errorf("find token: %w", context.Canceled), context.Canceled},
		"crowded":       {errCrowdedLookup, errCrowdedLookup},
		"revoked":       {invalidation.ErrNotFound, invalidation.ErrNotFound},
	} {
		s := &sessions{timeout: time.Minute, find: func(context.Context, string) (operator.APIToken, error) {
			return operator.APIToken{Name: "ada", Scopes: []string{"admin"}, Live: true}, nil
		}}
		if _, err := s.visitor(t.Context(), "secret"); err != nil {
			t.Fatal(err)
		}
		s.find = func(context.Context, string) (operator.APIToken, error) { return operator.APIToken{}, c.err }
		if who, err := s.visitor(t.Context(), "secret"); !errors.Is(err, c.want) || (c.want == nil) != (who.Name == "ada") {
			t.Errorf("%s: visitor %q, %v", name, who.Name, err)
		}
	}
}

var errCrowdedLookup = errors.New("as many tokens as may be are looked up at once")

func TestTheSessionCookieIsForThisSiteAlone(t *testing.T) {
	s := newSite(t)
	b := s.as(nobody)
	b.client.CheckRedirect = func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }
	login := url.Values{"token": {s.secrets[viewer]}, "next": {"//evil.example/"}}
	got := b.post("login", login)
	cookie := got.header.Get("Set-Cookie")
	for _, want := range []string{"HttpOnly", "SameSite=Strict", "Path=/ui/", "Max-Age=43200"} {
		if !strings.Contains(cookie, want) {
			t.Errorf("the cookie %q lacks %s", cookie, want)
		}
	}
	if to := got.header.Get("Location"); to != "/ui/" {
		t.Errorf("the login leads to %q", to)
	}
	proxied := b.post("login", login, "X-Forwarded-Proto", "https").header.Get("Set-Cookie")
	if !strings.Contains(proxied, "Secure") || strings.Contains(cookie, "Secure") {
		t.Errorf("the cookie is %q by https and %q by http, want Secure by https", proxied, cookie)
	}
}

func TestChangesFromOtherSitesAreRefused(t *testing.T) {
	s := newSite(t)
	b := s.as(administrator)
	for _, header := range [][]string{{"Sec-Fetch-Site", "cross-site"}, {"Origin", "https://evil.example"}} {
		for _, path := range []string{"theme", "logout", "do/pause_queue"} {
			if got := b.post(path, url.Values{"theme": {"dark"}}, header...); got.status != http.StatusForbidden {
				t.Errorf("POST %s with %v: %d", path, header, got.status)
			}
		}
	}
	if got := b.get("", "Sec-Fetch-Site", "cross-site"); got.status != http.StatusOK {
		t.Errorf("a link from another site: %d", got.status)
	}
}

func TestEveryAnswerHasThePolicy(t *testing.T) {
	s := newSite(t)
	want := "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'"
	b := s.as(viewer)
	for _, path := range []string{"", "login", "nowhere", "do/nothing", "?live=part"} {
		if got := b.get(path); !strings.HasPrefix(got.header.Get("Content-Security-Policy"), want) {
			t.Errorf("GET %q has the policy %q", path, got.header.Get("Content-Security-Policy"))
		}
	}
}

// inline are texts that the policy would refuse.
var inline = regexp.MustCompile(`(?i)<script(?: [^>]*)?>[^<]|<script>|<style|\sstyle=|\son[a-z]+=|hx-on|javascript:`)

func TestTemplatesHaveNoInlineScriptOrStyle(t *testing.T) {
	found, err := files.ReadDir("templates")
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range found {
		text, err := files.ReadFile("templates/" + f.Name())
		if err != nil {
			t.Fatal(err)
		}
		for _, bad := range inline.FindAllString(string(text), -1) {
			t.Errorf("%s has %q", f.Name(), bad)
		}
	}
	for _, bad := range []string{`<p style="a">`, `<a onclick="b()">`, `<script>x</script>`} {
		if !inline.MatchString(bad) {
			t.Errorf("the check does not see %s", bad)
		}
	}
}

func TestAPartIsSentOnceUntilItChanges(t *testing.T) {
	s := newSite(t)
	text := "first"
	s.web.page(page{path: "fixed", template: "trouble", read: func(context.Context, query) (any, error) {
		return trouble{Head: "Test", Text: text}, nil
	}})
	b := s.as(viewer)
	first := b.get("fixed?live=part")
	tag := first.header.Get("ETag")
	if first.status != http.StatusOK || tag == "" || strings.Contains(first.text, "<html") {
		t.Fatalf("got %d, tag %q", first.status, tag)
	}
	s.web.reads.expire()
	if again := b.get("fixed?live=part", "If-None-Match", tag); again.status != http.StatusNotModified {
		t.Errorf("unchanged, and got %d", again.status)
	}
	text = "second"
	s.web.reads.expire()
	again := b.get("fixed?live=part", "If-None-Match", tag)
	if again.status != http.StatusOK || again.header.Get("ETag") == tag || !strings.Contains(again.text, "second") {
		t.Errorf("changed, and got %d, tag %q", again.status, again.header.Get("ETag"))
	}
}

func TestAStreamSendsAChange(t *testing.T) {
	s := newSite(t)
	s.fill()
	b := s.as(viewer)
	ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, s.server.URL+"/ui/?live=stream", nil)
	if err != nil {
		t.Fatal(err)
	}
	w, err := b.client.Do(r)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Body.Close()
	lines := bufio.NewScanner(w.Body)
	lines.Buffer(nil, 1<<20)
	until := func(want string) {
		t.Helper()
		for lines.Scan() {
			if strings.Contains(lines.Text(), want) {
				return
			}
		}
		t.Fatalf("the stream ended before %q: %v", want, lines.Err())
	}
	until("event: points")
	until("event: part")
	s.exec(`UPDATE penstock.queue SET disabled_at = now() WHERE name = 'work'`)
	until("work is out of service")
	s.web.Drain()
	for lines.Scan() {
		continue
	}
	if lines.Err() != nil {
		t.Errorf("the stream ended with %v after a drain", lines.Err())
	}
}

// Without a database the pages keep what they displayed, and go on by themselves.
func TestAnOutageKeepsTheLastPage(t *testing.T) {
	s := newSite(t)
	s.fill()
	b := s.as(viewer)
	if got := b.get(""); strings.Contains(got.text, downText) || !strings.Contains(got.text, "a migration") {
		t.Fatalf("before the outage: %s", got.text)
	}
	healthy := s.web.db
	gone, err := postgres.Open(t.Context(), postgres.Config{DSN: "postgres://nobody@127.0.0.1:1/none?connect_timeout=1"})
	if err != nil {
		t.Fatal(err)
	}
	defer gone.Close()
	s.web.db = operator.New(gone)
	find := s.web.sessions.find
	s.web.sessions.find = living(operator.New(gone))
	s.web.reads.expire()
	if got := b.get(""); !strings.Contains(got.text, downText) || !strings.Contains(got.text, "a migration") {
		t.Errorf("in the outage: %d, %s", got.status, got.text)
	}
	s.web.db, s.web.sessions.find = healthy, find
	s.web.reads.down.Store(nil)
	s.web.reads.expire()
	if got := b.get(""); strings.Contains(got.text, downText) {
		t.Errorf("after the outage: %s", got.text)
	}
}

func TestAFirstVisitInAnOutageSaysSo(t *testing.T) {
	gone, err := postgres.Open(t.Context(), postgres.Config{DSN: "postgres://nobody@127.0.0.1:1/none?connect_timeout=1"})
	if err != nil {
		t.Fatal(err)
	}
	defer gone.Close()
	s := newSite(t)
	b := s.as(viewer)
	s.web.db, s.web.reads = operator.New(gone), newReadings(time.Minute)
	// The second page is asked for while it is known that the database does not answer.
	for _, path := range []string{"", "fairness"} {
		if got := b.get(path); got.status != http.StatusServiceUnavailable || !strings.Contains(got.text, downText) {
			t.Errorf("%q: got %d: %s", path, got.status, got.text)
		}
		// Nothing is known of these.
		if got := b.get(path); strings.Contains(got.text, "no leader yet") || strings.Contains(got.text, "nodes live") {
			t.Errorf("%q: %s", path, got.text)
		}
	}
}

// A page whose statement takes longer than it may says how to narrow it, at a first visit and later, keeps what it had, and
// goes on when the statement is fast again.
func TestASlowPageSaysHowToNarrowIt(t *testing.T) {
	s := newSite(t)
	s.fill()
	b := s.as(viewer)
	if got := b.get("failures?queue=work"); got.status != http.StatusOK || strings.Contains(got.text, slowText) {
		t.Fatalf("got %d: %s", got.status, got.text)
	}
	tx, err := s.pool.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	defer tx.Rollback(t.Context())
	if _, err := tx.Exec(t.Context(), `LOCK TABLE penstock.failure IN ACCESS EXCLUSIVE MODE`); err != nil {
		t.Fatal(err)
	}
	patient := s.web.db
	s.web.db = operator.New(openPool(t, postgres.Config{
		DSN: s.pool.Config().ConnString(), MaxConns: 4, StatementTimeout: 500 * time.Millisecond, ReadOnly: true,
	}))
	s.web.reads.expire()
	if got := b.get("failures?queue=work"); got.status != http.StatusOK || !strings.Contains(got.text, slowText) ||
		!strings.Contains(got.text, slowAdvice) || !strings.Contains(got.text, "is not a picture") {
		t.Errorf("the page that was displayed before: %d: %s", got.status, got.text)
	}
	if got := b.get("failures?queue=work&class=permanent&fingerprint=a"); got.status != http.StatusServiceUnavailable ||
		!strings.Contains(got.text, slowText) || !strings.Contains(got.text, slowAdvice) {
		t.Errorf("a first visit: %d: %s", got.status, got.text)
	}
	s.web.db = patient
	if got := b.get("pauses"); got.status != http.StatusOK || strings.Contains(got.text, slowText) {
		t.Errorf("a page that does not read the table: %d: %s", got.status, got.text)
	}
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	s.web.reads.expire()
	if got := b.get("failures?queue=work"); strings.Contains(got.text, slowText) {
		t.Errorf("after the wait: %s", got.text)
	}
}

func TestPathsOfDashboards(t *testing.T) {
	for path, valid := range map[string]bool{
		"/ui/": true, "/ops/penstock/": true, "/": false, "": false, "/ui": false, "ui/": false, "/v1/": false, "/queue/x/": false,
		"//": false, "/a//b/": false, "/a b/": false, "/{x}/": false,
	} {
		if err := CheckPath(path, "v1", "queue"); (err == nil) != valid {
			t.Errorf("path %q: %v", path, err)
		}
	}
}
