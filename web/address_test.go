package web

import (
	"net/http"
	"net/url"
	"strings"
	"testing"
)

// Postgres holds no text with NUL or with bytes that are not UTF-8: an address that has them is wrong, and the database
// is not.
func TestAnAddressWithCharactersThatNoTextHoldsIsRefused(t *testing.T) {
	s := newSite(t)
	s.fill()
	b := s.as(administrator)
	for _, bad := range []string{"%00", "%ff", "a%ed%a0%80"} {
		for _, path := range []string{
			"entries?queue=work&flow=" + bad, "entries?queue=" + bad, "failures?queue=work&fingerprint=" + bad,
			"locks?queue=" + bad, "cron?after=" + bad, "operations?queue=" + bad, "audit?actor=" + bad,
			"webhooks?after=" + bad, "queues/" + bad, "do/pause_queue?name=" + bad, "do/pause?value=" + bad,
		} {
			if got := b.get(path); got.status != http.StatusBadRequest || !strings.Contains(got.text, "UTF-8") {
				t.Errorf("GET %s: %d: %.300s", path, got.status, got.text)
			}
		}
		text, err := url.QueryUnescape(bad)
		if err != nil {
			t.Fatal(err)
		}
		form := url.Values{"scope": {"flow"}, "value": {text}, "reason": {"test"}}
		if got := b.post("do/pause", form); got.status != http.StatusBadRequest || !strings.Contains(got.text, "UTF-8") {
			t.Errorf("POST with %q: %d: %.300s", bad, got.status, got.text)
		}
	}
}

// The message of an error on a page has no name of an error of the program at its end.
func TestAPageOfAWrongFilterNamesTheFieldAlone(t *testing.T) {
	s := newSite(t)
	s.fill()
	got := s.as(viewer).get("entries?queue=work&state=bogus")
	if got.status != http.StatusUnprocessableEntity || !strings.Contains(got.text, "bogus") ||
		strings.Contains(got.text, "invalid argument") {
		t.Errorf("got %d: %s", got.status, got.text)
	}
}
