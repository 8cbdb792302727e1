package web

import (
	"bytes"
	"context"
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"net/url"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/operator"
)

// addresses returns one address for each page. Those of single objects are of the full fixture.
func (s *site) addresses() map[string]bool {
	s.Helper()
	found := map[string]bool{} // whether it is of an object
	for _, p := range s.web.pages {
		path := strings.NewReplacer("queues/{name}", "queues/work", "entries/{id}", "entries/1").Replace(p.path)
		if strings.Contains(path, "{") {
			s.Errorf("page %s: the test knows no object for it", p.path)
			continue
		}
		found[path] = path != p.path
	}
	return found
}

var filtered = []string{
	"queues?order=waiting&application=default", "entries?queue=work&state=pending&flow=red", "entries?queue=work&lock_key=user-0",
	"entries?queue=work&after=20&state=initial", "entries?queue=work&name=thumbnail&state=computing", "failures?queue=work",
	"failures?queue=work&class=permanent&fingerprint=worker+answered+%23%3A+image+%23+is+not+a+picture", "entries/100001",
	"queues/work?over=15m", "audit?actor=ann", "audit?verb=pause_queue&object=idle", "entries/8",
}

func TestEveryPageInEachRole(t *testing.T) {
	for _, fixture := range []string{"empty", "full"} {
		t.Run(fixture, func(t *testing.T) {
			s := newSite(t)
			if fixture == "full" {
				s.fill()
			}
			for _, role := range []role{viewer, operatorRole, administrator} {
				b := s.as(role)
				for path, single := range s.addresses() {
					want := http.StatusOK
					if single && fixture == "empty" {
						want = http.StatusNotFound
					}
					checkPage(t, b, role, path, want)
				}
				if fixture == "full" {
					for _, path := range filtered {
						checkPage(t, b, role, path, http.StatusOK)
					}
				}
			}
		})
	}
}

func checkPage(t *testing.T, b *browser, r role, path string, want int) {
	t.Helper()
	got := b.get(path)
	if got.status != want || strings.Contains(got.text, "could not be written") {
		t.Errorf("%s as %s: %d, want %d: %s", path, r, got.status, want, got.text)
	}
	if bad := inline.FindString(got.text); bad != "" {
		t.Errorf("%s as %s has %q", path, r, bad)
	}
	if strings.Contains(got.text, "<no value>") || strings.Contains(got.text, "%!") || strings.Contains(got.text, "ZgotmplZ") {
		t.Errorf("%s as %s has a value that is not written: %s", path, r, got.text)
	}
	if offered := strings.Contains(got.text, "data-dialog"); offered && r == viewer {
		t.Errorf("%s offers verbs to a viewer", path)
	}
}

func TestAViewerIsRefusedEachVerb(t *testing.T) {
	s := newSite(t)
	s.fill()
	b := s.as(viewer)
	names := make([]string, 0, len(s.web.verbs))
	for name, v := range s.web.verbs {
		names = append(names, name)
		if v.role <= viewer {
			t.Errorf("verb %s is open to viewers", name)
		}
	}
	if len(names) < 20 {
		t.Fatalf("the dashboard has the verbs %v alone", names)
	}
	form := url.Values{
		"name": {"work"}, "id": {"1"}, "queue": {"work"}, "limit": {"x"}, "url": {"https://a.example"}, "reason": {"test"},
		"scope": {"flow"}, "value": {"red"}, "model": {"m"}, "server": {"s"},
	}
	before := s.audits()
	for _, name := range names {
		if got := b.get("do/" + name + "?" + form.Encode()); got.status != http.StatusForbidden {
			t.Errorf("GET %s: %d", name, got.status)
		}
		if got := b.post("do/"+name, form); got.status != http.StatusForbidden {
			t.Errorf("POST %s: %d", name, got.status)
		}
	}
	if after := s.audits(); after != before {
		t.Errorf("the audit has %d rows, and had %d", after, before)
	}
	for name, v := range s.web.verbs {
		if v.role == administrator {
			if got := s.as(operatorRole).post("do/"+name, form); got.status != http.StatusForbidden {
				t.Errorf("POST %s as an operator: %d", name, got.status)
			}
		}
	}
}

func (s *site) audits() (n int) {
	s.Helper()
	if err := s.pool.QueryRow(s.Context(), `SELECT count(*) FROM penstock.audit`).Scan(&n); err != nil {
		s.Fatal(err)
	}
	return n
}

// A pause without any script: the form, its preview, its reason, the audit, the way back.
func TestPauseAQueueByForms(t *testing.T) {
	s := newSite(t)
	s.fill()
	b := s.as(operatorRole)
	page := b.get("queues")
	if !strings.Contains(page.text, `href="/ui/do/pause_queue?name=work&amp;next=queues"`) {
		t.Fatalf("no verb in %s", page.text)
	}
	asked := b.get("do/pause_queue?name=work&next=queues")
	if asked.status != http.StatusOK || !strings.Contains(asked.text, "<dt>waiting</dt>") {
		t.Errorf("the form is %d: %s", asked.status, asked.text)
	}
	form := url.Values{"name": {"work"}, "next": {"queues"}}
	if got := b.post("do/pause_queue", form); got.status != http.StatusUnprocessableEntity || !strings.Contains(got.text, "reason is missing") {
		t.Errorf("without a reason: %d: %s", got.status, got.text)
	}
	form.Set("for", "soon")
	form.Set("reason", "the disk is full")
	if got := b.post("do/pause_queue", form); got.status != http.StatusUnprocessableEntity || !strings.Contains(got.text, `the disk is full`) {
		t.Errorf("with a bad end: %d: %s", got.status, got.text)
	}
	form.Set("for", "2h")
	got := b.post("do/pause_queue", form)
	if got.path != "/ui/queues" || !strings.Contains(got.text, "Queue work is paused.") || !strings.Contains(got.text, "resume_queue?name=work") {
		t.Errorf("after the pause at %s: %s", got.path, got.text)
	}
	found, err := s.change.Audits(t.Context(), operator.AuditFilter{Verb: "pause_queue", Object: "work", Limit: 1})
	if err != nil || len(found) != 1 || found[0].Actor != "operator" || found[0].Reason != "the disk is full" {
		t.Errorf("the audit has %+v, %v", found, err)
	}
	form.Set("reason", "a migration")
	if got = b.post("do/pause_queue", form); !strings.Contains(got.text, "Queue work is paused. This replaced the pause by operator (the disk is full) until ") {
		t.Errorf("after another pause: %s", got.text)
	}
	if again := b.post("do/resume_queue", url.Values{"name": {"nothing"}, "reason": {"x"}}); again.status != http.StatusNotFound {
		t.Errorf("a queue that does not exist: %d: %s", again.status, again.text)
	}
}

func TestBulkChangesAreOperationsOfTheFilter(t *testing.T) {
	s := newSite(t)
	s.fill()
	b := s.as(operatorRole)
	asked := b.get("do/bulk_cancel?queue=work&flow=red")
	if !strings.Contains(asked.text, "<strong>20 entries</strong>") {
		t.Errorf("the preview is %s", asked.text)
	}
	b.post("do/bulk_cancel", url.Values{"queue": {"work"}, "flow": {"red"}, "reason": {"test"}, "per_second": {"10"}})
	b.post("do/bulk_retry_failures", url.Values{"queue": {"work"}, "class": {"permanent"}, "reason": {"mended"}})
	found, err := s.change.Operations(t.Context(), operator.OperationFilter{Limit: 10})
	if err != nil || len(found) != 2 {
		t.Fatalf("got %+v, %v", found, err)
	}
	if o := found[1]; o.Verb != "cancel" || o.Filter["flow"] != "red" || o.Matched != 20 || o.PerSecond != 10 || o.Actor != "operator" {
		t.Errorf("cancel is %+v", o)
	}
	if o := found[0]; o.Verb != "retry_failures" || o.Filter["class"] != "permanent" || o.Matched != 20 {
		t.Errorf("retry is %+v", o)
	}
}

// A filter that was lost on its way does not become a change of the whole queue.
func TestABulkChangeOfTheWholeQueueNeedsItsOwnChoice(t *testing.T) {
	s := newSite(t)
	s.fill()
	b := s.as(operatorRole)
	for _, verb := range []string{"bulk_cancel", "bulk_delete", "bulk_disable", "bulk_enable", "bulk_retry_failures", "bulk_discard_failures"} {
		if asked := b.get("do/" + verb + "?queue=work"); !strings.Contains(asked.text, `name="all"`) || !strings.Contains(asked.text, "about the whole queue") {
			t.Errorf("%s offers no choice of everything: %s", verb, asked.text)
		}
		form := url.Values{"queue": {"work"}, "reason": {"test"}}
		if got := b.post("do/"+verb, form); got.status != http.StatusUnprocessableEntity || !strings.Contains(got.text, "Choose all") {
			t.Errorf("%s without a filter: %d: %s", verb, got.status, got.text)
		}
		form.Set("all", "on")
		form.Set("flow", "red")
		form.Set("class", "permanent")
		if got := b.post("do/"+verb, form); got.status != http.StatusUnprocessableEntity || !strings.Contains(got.text, "not both") {
			t.Errorf("%s of all beside a filter: %d: %s", verb, got.status, got.text)
		}
	}
	found, err := s.change.Operations(t.Context(), operator.OperationFilter{Limit: 10})
	if err != nil || len(found) != 0 {
		t.Fatalf("operations have begun: %+v, %v", found, err)
	}
	b.post("do/bulk_discard_failures", url.Values{"queue": {"work"}, "all": {"on"}, "reason": {"test"}})
	found, err = s.change.Operations(t.Context(), operator.OperationFilter{Limit: 10})
	if err != nil || len(found) != 1 || found[0].Filter["all"] != true {
		t.Errorf("a change of the whole queue: %+v, %v", found, err)
	}
}

func TestASecretIsDisplayedOnceAndNotKept(t *testing.T) {
	s := newSite(t)
	b := s.as(administrator)
	got := b.post("do/create_token", url.Values{"name": {"ann"}, "scopes": {"read"}, "days": {"30"}, "reason": {"new here"}})
	start := strings.Index(got.text, "<pre tabindex=\"0\">pst_")
	if got.status != http.StatusOK || start < 0 || got.header.Get("Cache-Control") != "no-store" {
		t.Fatalf("got %d: %s", got.status, got.text)
	}
	secret := strings.TrimPrefix(got.text[start:], `<pre tabindex="0">`)
	secret = secret[:strings.Index(secret, "<")]
	if !operator.WellFormed(secret) {
		t.Errorf("%q is no secret", secret)
	}
	if cookie := got.header.Get("Set-Cookie"); strings.Contains(cookie, "pst_") {
		t.Errorf("the secret is in the cookie %q", cookie)
	}
	if page := b.get("tokens"); !strings.Contains(page.text, "ann") || strings.Contains(page.text, secret) {
		t.Errorf("the list is %s", page.text)
	}
}

func TestAnEntryExplainsWhyItWaits(t *testing.T) {
	s := newSite(t)
	s.fill()
	s.exec(`UPDATE penstock.queue SET paused_at = now(), paused_by = 'ann', paused_reason = 'a <b>test</b>' WHERE name = 'work'`)
	s.web.reads.expire()
	b := s.as(viewer)
	page := b.get("entries/2")
	for _, want := range []string{"Why is it waiting?", "the queue is in service and not paused", "paused by ann", `href="/ui/queues/work"`} {
		if !strings.Contains(page.text, want) {
			t.Errorf("the page lacks %q: %s", want, page.text)
		}
	}
	if strings.Contains(page.text, "<b>test</b>") {
		t.Error("a reason is not escaped")
	}
	if list := b.get("entries?queue=work&state=pending"); !strings.Contains(list.text, "queue is paused") {
		t.Errorf("the list has no reason: %s", list.text)
	}
	if list := b.get("entries?queue=work&state=initial"); !strings.Contains(list.text, "not due") {
		t.Errorf("the list has no reason: %s", list.text)
	}
}

func TestBodiesAreRedactedByRole(t *testing.T) {
	text := json.RawMessage(`{"name": "Ann", "n": 9007199254740993, "tokens": 5, "auth": {"api_key": "k", "x": ["y"]}}`)
	for r, want := range map[role][2][]string{
		viewer:        {{"9007199254740993", "text of 3 characters"}, {"Ann", `"k"`, `"y"`}},
		operatorRole:  {{"9007199254740993", "Ann", `"y"`, redacted, `"tokens": 5`}, {`"k"`}},
		administrator: {{"9007199254740993", "Ann", `"k"`, `"y"`}, {redacted}},
	} {
		got := bodyFor(text, r)
		for _, has := range want[0] {
			if !strings.Contains(got.Text, has) {
				t.Errorf("as %s it lacks %q: %s", r, has, got.Text)
			}
		}
		for _, hidden := range want[1] {
			if strings.Contains(got.Text, hidden) {
				t.Errorf("as %s it has %q: %s", r, hidden, got.Text)
			}
		}
		if got.Redacted != (r != administrator) {
			t.Errorf("as %s redacted is %t", r, got.Redacted)
		}
	}
	long := bodyFor(json.RawMessage(`"`+strings.Repeat("é", bodyMax)+`"`), administrator)
	if !long.Cut || len(long.Text) > bodyMax {
		t.Errorf("a long body has %d bytes, cut: %t", len(long.Text), long.Cut)
	}
}

// Whatever lies below a name that says that it is secret is left out; counts of tokens are not secret.
func TestSecretsOfAnyShapeAreLeftOut(t *testing.T) {
	text := json.RawMessage(`{"api_keys": ["hush1", {"x": "hush2"}], "credentials": {"user": "hush3", "ids": [["hush4"]]},
		"password": 7471, "pin_secret": {"n": 7472}, "secret_on": true, "flow": ["seen"],
		"tokens": 81, "max_tokens": 82, "token_count": 83, "completion_tokens_details": {"cached_tokens": 84}}`)
	got := bodyFor(text, operatorRole)
	for _, hidden := range []string{"hush", "747"} {
		if strings.Contains(got.Text, hidden) {
			t.Errorf("an operator sees %q: %s", hidden, got.Text)
		}
	}
	for _, seen := range []string{"81", "82", "83", "84", "seen", "true", "credentials"} {
		if !strings.Contains(got.Text, seen) {
			t.Errorf("an operator does not see %q: %s", seen, got.Text)
		}
	}
	if all := bodyFor(text, administrator).Text; !strings.Contains(all, "hush4") || !strings.Contains(all, "7471") {
		t.Errorf("an administrator sees %s", all)
	}
}

// asked is a database that answers nothing and keeps the arguments of what it is asked.
type asked struct {
	postgres.DB
	args *[]any
}

func (a asked) Query(_ context.Context, _ string, args ...any) (pgx.Rows, error) {
	*a.args = append(*a.args, args...)
	return nil, errNoDatabase
}

func (a asked) QueryRow(ctx context.Context, sql string, args ...any) pgx.Row {
	_, _ = a.Query(ctx, sql, args...)
	return noRow{}
}

type noRow struct{}

func (noRow) Scan(...any) error { return errNoDatabase }

// Names are any text: a blank at the end of one is part of it.
func TestNamesAreTakenAsTheyAre(t *testing.T) {
	for _, flow := range []string{"acme ", " ", " acme", "acme\t"} {
		var changed []any
		d, err := New(operator.New(noDatabase{}), operator.New(asked{args: &changed}), Config{Open: true, Timetable: hourly})
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(d.Drain)
		named := url.Values{"queue": {"work"}, "flow": {flow}}
		if got := (query{values: named, path: func(string) string { return "" }}).Get("flow"); got != flow {
			t.Errorf("the page of flow %q reads %q", flow, got)
		}
		named.Set("per_second", " 1000 ")
		named.Set("reason", " a test ")
		r := httptest.NewRequestWithContext(t.Context(), http.MethodPost, "/ui/do/bulk_cancel", strings.NewReader(named.Encode()))
		r.Header.Set("Content-Type", "application/x-www-form-urlencoded")
		d.ServeHTTP(httptest.NewRecorder(), r)
		if !mentions(changed, flow) || !mentions(changed, "a test") {
			t.Errorf("the operation of flow %q is %q", flow, changed)
		}
	}
	text := form{url.Values{"fingerprint": {"at line _\r\nin f\r\n"}, "reason": {" why "}}, []string{"queue", "fingerprint"}}
	if got := text.Get("fingerprint"); got != "at line _\nin f\n" {
		t.Errorf("a fingerprint of two lines is read as %q", got)
	}
	if got := text.Get("reason"); got != "why" {
		t.Errorf("a reason is read as %q", got)
	}
}

// mentions reports whether a text is an argument, or a value of one that is written as JSON.
func mentions(args []any, text string) bool {
	quoted, _ := json.Marshal(text) // a text
	for _, arg := range args {
		written, _ := json.Marshal(arg) // of the kinds that statements take
		if arg == text || bytes.Contains(written, quoted) {
			return true
		}
	}
	return false
}

// Pages of a list lead through all entries, each once.
func TestEntriesPageByKey(t *testing.T) {
	s := newSite(t)
	s.fill()
	b := s.as(viewer)
	path, seen := "entries?queue=work", []string(nil)
	for range 5 {
		page := b.get(path)
		for _, part := range strings.Split(page.text, `<tr id="e-`)[1:] {
			id, _, _ := strings.Cut(part, `"`)
			if slices.Contains(seen, id) {
				t.Errorf("entry %s is on two pages", id)
			}
			seen = append(seen, id)
		}
		_, next, found := strings.Cut(page.text, `rel="next" href="/ui/`)
		if !found {
			break
		}
		path, _, _ = strings.Cut(next, `"`)
		path = strings.ReplaceAll(path, "&amp;", "&")
	}
	if len(seen) != 60 {
		t.Errorf("the pages have %d entries, want 60", len(seen))
	}
	if first, err := strconv.Atoi(seen[0]); err != nil || first < 1 {
		t.Errorf("the first is %q", seen[0])
	}
}
