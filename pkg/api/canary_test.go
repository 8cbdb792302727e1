package api

import (
	"net/http"
	"regexp"
	"strings"
	"testing"

	"github.com/penstock/penstock/pkg/operator"
)

// canary marks the texts of one application, in every name and value that the story has.
var canary = strings.NewReplacer("'work'", "'cnrywork'", `"work"`, `"cnrywork"`, "queue=work", "queue=cnrywork",
	"/queues/work", "/queues/cnrywork",
	`"daily"`, `"cnrydaily"`, "/daily", "/cnrydaily", `"tick"`, `"cnrytick"`, "tick/", "cnrytick/", "queue=tick",
	"queue=cnrytick", `"parts"`, `"cnryparts"`,
	"/parts", "/cnryparts", "queue=parts", "queue=cnryparts", "flux", "cnryflux", "sdxl", "cnrysdxl", "llama",
	"cnryllama", `"k": "a"`, `"k": "cnrykey"`,
	`"name": "n"`, `"name": "cnryname"`, `"value": "n"`, `"value": "cnryname"`, `"f"`, `"cnryflow"`, "'f'",
	"'cnryflow'", "bad input", "cnryerror", "out of memory", "cnrymemory", "value=f", "value=cnryflow", "flow=f",
	"flow=cnryflow",
	"a test", "cnryreason", "reason=test", "reason=cnryreason", "a sunset", "cnryprompt", "card-0", "cnrycard", `"gpu"`,
	`"cnrylimit"`, "/gpu", "/cnrylimit",
	`"name": "b"`, `"name": "cnrybatch"`, "[1, 2, 3]", `["cnryitem", 2, 3]`, "127.0.0.1:9", "cnryhost:9",
	"example.com/hook", "example.com/cnryhook",
	`"ci"`, `"cnrytoken"`, "/ci/", "/cnrytoken/", "sdxl.example.com", "cnrysdxl.example.com", `"zone": "x"`,
	`"zone": "cnryzone"`)

var canaries = regexp.MustCompile(`cnry[a-z]*`)

// TestUnracedNothingOfOneApplicationReachesAnother plays the story in one application. After each step, and with
// each request
// of the story and each list, tokens of another application ask for it: no answer may have a text of the
// first one
// that the request itself does not have.
func TestUnracedNothingOfOneApplicationReachesAnother(t *testing.T) {
	w := newWorld(t)
	w.rename = canary.Replace
	w.api = New(w.pool, Config{Reports: reports{}, Webhooks: receivers{}})
	w.exec(`SELECT penstock.create_queue('own', '{"application": "other"}'), penstock.push('own', '1')`)
	root := newToken(t, w.pool, operator.Grant{Name: "cnryroot", Scopes: []string{"admin"}})
	all := []string{"push", "read", "operate", "admin"}
	outsiders := map[string]string{
		"of another application": newToken(t, w.pool,
			operator.Grant{Name: "other", Scopes: all, Applications: []string{"other"}}),
		"of another queue": newToken(t, w.pool,
			operator.Grant{Name: "own", Scopes: all, Queues: []string{"own"}}),
		"without a scope to read": newToken(t, w.pool,
			operator.Grant{Name: "pusher", Scopes: []string{"push"}, Queues: []string{"own"}}),
		"unknown": operator.NewSecret(),
	}
	var lists []string
	for _, r := range w.api.routes {
		if r.method == http.MethodGet && !strings.Contains(r.path, "{") {
			lists = append(lists, r.path, r.path+"?queue=own")
		}
	}
	check := func(who, secret, method, path, body string, header ...string) {
		t.Helper()
		answered := w.ask(secret, method, path, body, header...)
		text := answered.Body.String()
		for name, values := range answered.Header() {
			text += name + ": " + strings.Join(values, " ")
		}
		for _, found := range canaries.FindAllString(text, -1) {
			if !strings.Contains(path+body, found) {
				t.Errorf("%s %s %s by a token %s: %d has %q: %s", method, path, body, who, answered.Code, found, text)
				return
			}
		}
	}
	for i, s := range story() {
		if s.before != nil {
			s.before(w)
		}
		path, body := w.fill(w.rename(s.path)), w.fill(w.rename(s.body))
		var header []string
		if s.tagOf != "" {
			header = []string{"If-Match", w.tags[w.rename(s.tagOf)]}
		}
		for who, secret := range outsiders {
			if need := needs[w.pattern(s.method, path)]; need != "" {
				check(who, secret, s.method, path, body, header...)
			}
			for _, path := range lists {
				if i%8 == 0 && who != "unknown" {
					check(who, secret, http.MethodGet, path, "")
				}
			}
		}
		answered := w.ask(root, s.method, path, body, header...)
		if answered.Code != s.status {
			t.Fatalf("%s %s %s: %d %s, want %d", s.method, path, body, answered.Code, answered.Body, s.status)
		}
		w.note(s, path, answered)
	}
}
