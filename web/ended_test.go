package web

import (
	"html"
	"net/http"
	"net/url"
	"regexp"
	"strings"
	"testing"
)

// A token is revoked, or its login has lasted long enough, while a form is open: the way over the login leads back to
// the form with what was typed.
func TestAFormOfAnEndedSessionKeepsItsInputs(t *testing.T) {
	s := newSite(t)
	s.fill()
	b := s.as(operatorRole)
	b.client.Jar = nil // the cookie has expired
	form := url.Values{"name": {"work"}, "next": {"queues?order=oldest"}, "for": {"2h"}, "reason": {"disk & <full>"}}
	refused := b.post("do/pause_queue", form)
	if refused.status != http.StatusUnauthorized || !strings.Contains(refused.text, "nothing was changed") {
		t.Fatalf("without a session: %d: %s", refused.status, refused.text)
	}
	login := regexp.MustCompile(`href="/ui/(login[^"]*)"`).FindStringSubmatch(refused.text)
	if login == nil {
		t.Fatalf("no way to the login in %s", refused.text)
	}
	page := b.get(html.UnescapeString(login[1]))
	back := regexp.MustCompile(`name="next" value="([^"]*)"`).FindStringSubmatch(page.text)
	if back == nil {
		t.Fatalf("the login is %s", page.text)
	}
	again := s.as(operatorRole).get(html.UnescapeString(back[1]))
	for _, want := range []string{
		`action="/ui/do/pause_queue"`, `name="name" value="work"`, `name="for" value="2h"`,
		`name="reason" value="disk &amp; &lt;full&gt;"`, `name="next" value="queues?order=oldest"`,
	} {
		if !strings.Contains(again.text, want) {
			t.Errorf("the form after the login lacks %s: %s", want, again.text)
		}
	}
	form.Set("reason", strings.Repeat("disk ", 2000)) // more than an address may hold
	if refused = b.post("do/pause_queue", form); refused.status != http.StatusUnauthorized ||
		!strings.Contains(refused.text, `href="/ui/login?next=queues%3Forder%3Doldest"`) || !strings.Contains(refused.text, "Go back") {
		t.Errorf("a long form without a session: %d: %.2000s", refused.status, refused.text)
	}
}

// What confirms a change is typed by the visitor who makes it, and an input that was cleared has no default again.
func TestAFormOfAnEndedSessionKeepsNoConfirmation(t *testing.T) {
	s := newSite(t)
	s.fill()
	b := s.as(administrator)
	b.client.Jar = nil
	refused := b.post("do/force_unlock", url.Values{
		"queue": {"work"}, "lock_key": {"k"}, "token": {"7"}, "confirm": {"7"}, "reason": {"stuck"},
	})
	if refused.status != http.StatusUnauthorized || !strings.Contains(refused.text, "token%3D7") ||
		strings.Contains(refused.text, "confirm") {
		t.Errorf("without a session: %d: %s", refused.status, refused.text)
	}
	bulk := "do/bulk_retry_failures?queue=work&reason=disk&per_second="
	if page := s.as(administrator).get(bulk); page.status != http.StatusOK || strings.Contains(page.text, `value="1000"`) {
		t.Errorf("a cleared input after the login: %d: %s", page.status, page.text)
	}
	if page := s.as(administrator).get("do/bulk_retry_failures?queue=work"); !strings.Contains(page.text, `value="1000"`) {
		t.Errorf("without a default: %d: %s", page.status, page.text)
	}
}
