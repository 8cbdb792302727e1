package api

import (
	"encoding/json"
	"fmt"
	"net/http/httptest"
	"regexp"
	"strconv"
	"strings"
	"testing"

	"github.com/danielgtaylor/huma/v2"
)

// Generators of clients and validators refuse a description in which an address has a part that no parameter fills
// (OpenAPI 3.1, 4.8.8.2).
func TestEachPartOfAnAddressIsADescribedParameter(t *testing.T) {
	for path, item := range New(nil, Config{}).huma.OpenAPI().Paths {
		for _, op := range []*huma.Operation{item.Get, item.Post, item.Put, item.Patch, item.Delete} {
			if op == nil {
				continue
			}
			var described []string
			for _, p := range op.Parameters {
				if p.In == "path" && p.Required {
					described = append(described, p.Name)
				}
			}
			for _, part := range regexp.MustCompile(`{(\w+)}`).FindAllStringSubmatch(path, -1) {
				if !strings.Contains(" "+strings.Join(described, " ")+" ", " "+part[1]+" ") {
					t.Errorf("%s %s: no parameter describes %s", op.Method, path, part[0])
				}
			}
		}
	}
}

// A program branches on these words: they are in the description, as an enum of what it sends, and as text where it
// reads them, since answers may get more of them.
func TestTheDescriptionNamesTheWordsOfItsFields(t *testing.T) {
	fields := []string{
		"state", "status", "kind", "verdict", "mode", "scope", "severity", "overlap", "catch_up", "gpu_period",
	}
	for name, schema := range New(nil, Config{}).huma.OpenAPI().Components.Schemas.Map() {
		for _, field := range fields {
			p := schema.Properties[field]
			if p != nil && p.Type == huma.TypeString && p.Description == "" && len(p.Enum) == 0 {
				t.Errorf("%s.%s: no word is named", name, field)
			}
		}
	}
}

// described fails the test where an answer is not as the description of its address has it: the status, the media
// type, the fields and their types.
func (w *world) described(pattern string, answered *httptest.ResponseRecorder) {
	w.t.Helper()
	doc := w.api.huma.OpenAPI()
	method, path, _ := strings.Cut(pattern, " ")
	item := doc.Paths[path]
	if item == nil {
		return // probes and the description itself
	}
	op := map[string]*huma.Operation{
		"GET": item.Get, "POST": item.Post, "PUT": item.Put, "PATCH": item.Patch, "DELETE": item.Delete,
	}[method]
	response := op.Responses[strconv.Itoa(answered.Code)]
	if response == nil && answered.Code < 400 {
		w.t.Errorf("%s: status %d is not described", pattern, answered.Code)
	}
	if response == nil {
		response = op.Responses["default"]
	}
	if answered.Body.Len() == 0 {
		if len(response.Content) > 0 {
			w.t.Errorf("%s: the answer %d is empty", pattern, answered.Code)
		}
		return
	}
	media := response.Content[answered.Header().Get("Content-Type")]
	if media == nil {
		w.t.Errorf("%s: an answer %d of type %q is not described", pattern, answered.Code,
			answered.Header().Get("Content-Type"))
		return
	}
	for name := range answered.Header() {
		if name == "Etag" || name == "Location" {
			if response.Headers[name] == nil && response.Headers["ETag"] == nil {
				w.t.Errorf("%s: header %s of the answer %d is not described", pattern, name, answered.Code)
			}
		}
	}
	var value any
	if media.Schema == nil || json.Unmarshal(answered.Body.Bytes(), &value) != nil {
		return // a stream
	}
	problems := &huma.ValidateResult{}
	huma.Validate(doc.Components.Schemas, media.Schema, huma.NewPathBuffer(nil, 0), huma.ModeReadFromServer, value, problems)
	for _, err := range problems.Errors {
		w.t.Errorf("%s: answer %d: %v", pattern, answered.Code, err)
	}
}

// Clients resolve segments of dots, escaped ones too: an object of such a name could be made, and not be addressed.
func TestANameThatNoAddressCanHaveIsRefused(t *testing.T) {
	w := newWorld(t)
	w.exec(`SELECT penstock.create_queue('tick', '{"kind": "cron"}')`)
	for _, name := range []string{".", ".."} {
		for location, request := range map[string]step{
			"body.name":   {path: "/v1/queues/tick/cron", body: `{"name": "` + name + `", "spec": "@daily", ` + reason + `}`},
			"body.model":  {path: "/admin/register", body: `{"model": "` + name + `", "server": "s", "endpoint": "http://h:1", "slots": 1}`},
			"body.server": {path: "/admin/register", body: `{"model": "m", "server": "` + name + `", "endpoint": "http://h:1", "slots": 1}`},
		} {
			status, answer := w.send("POST", request.path, request.body)
			if status != 422 || flawAt(answer) != location {
				t.Errorf("%s %s: %d %v, want 422 at %s", request.path, request.body, status, answer, location)
			}
		}
	}
}

// A PUT makes the object that its address names: the name may come in with its dots escaped.
func TestAPUTMakesNothingOfANameOfDots(t *testing.T) {
	w := newWorld(t)
	settings := `{"settings": {"max_units": 1}, ` + reason + `}`
	for path, request := range map[string]step{
		"path.limit":  {path: "/v1/limits/%2E%2E", body: settings},
		"path.model":  {path: "/v1/models/%2e", body: `{"config": {"protocol": "openai"}, ` + reason + `}`},
		"path.server": {path: "/v1/instances/m/%2E%2E", body: `{"endpoint": "http://h:1", "slots": 1, ` + reason + `}`},
	} {
		status, answer := w.send("PUT", request.path, request.body)
		if status != 422 || flawAt(answer) != path {
			t.Errorf("%s: %d %v, want 422 at %s", request.path, status, answer, path)
		}
	}
}

// A plus in a query is a blank, so that a time with an offset arrives without it.
func TestATimeOfAQueryThatCannotBeReadIsToldItsForm(t *testing.T) {
	w := newWorld(t)
	for _, path := range []string{"/v1/audit?since=2026-01-31T12:00:00+05:30", "/v1/usage/hours?from=yesterday"} {
		status, answer := w.send("GET", path, "")
		text := fmt.Sprint(answer["detail"])
		if status != 422 || !strings.Contains(text, "RFC 3339") || !strings.Contains(text, "%2B") ||
			strings.Contains(text, "2006") {
			t.Errorf("%s: %d %v, want the form of a time", path, status, answer)
		}
	}
}

// Tools that read a description call what it has: the address of the server, whether a token is needed, and when to
// come back.
func TestTheDescriptionHasServersSecurityAndHeadersOfProblems(t *testing.T) {
	doc := New(nil, Config{}).huma.OpenAPI()
	if len(doc.Servers) != 1 || doc.Servers[0].URL != "/" {
		t.Errorf("servers: %v, want that of the description", doc.Servers)
	}
	for path, item := range doc.Paths {
		for _, op := range []*huma.Operation{item.Get, item.Post, item.Put, item.Patch, item.Delete} {
			if op == nil {
				continue
			}
			if op.Security == nil {
				t.Errorf("%s %s: no word on security", op.Method, path)
			}
			for _, name := range []string{"Retry-After", "WWW-Authenticate"} {
				if op.Responses["default"].Headers[name] == nil {
					t.Errorf("%s %s: header %s of problems is not described", op.Method, path, name)
				}
			}
		}
	}
}

// Where a body has several objects, and where a value is no text at all, a program still finds the field.
func TestARefusalNamesTheObjectAndTheFieldThatIsWrong(t *testing.T) {
	w := newWorld(t)
	w.exec(`SELECT penstock.create_queue('work')`)
	for body, location := range map[string]string{
		`[{"payload": 1}, {"payload": 1, "priorty": 1}]`:              "body[1].priorty",
		`[{"payload": 1}, {"payload": 1, "trace": "none"}]`:           "body[1].trace",
		`[{"payload": 1, "due_at": "soon"}]`:                          "body[0].due_at",
		`{"payload": 1, "due_at": 1766600000}`:                        "body.due_at",
		`{"payload": 1, "due_at": {"seconds": 1, "nanos": [1, "2"]}}`: "body.due_at",
	} {
		status, answer := w.send("POST", "/v1/queues/work/entries", body)
		if status != 422 || flawAt(answer) != location {
			t.Errorf("%s: %d %v, want 422 at %s", body, status, answer, location)
		}
	}
	if status, answer := w.send("POST", "/v1/queues/work/entries", `{"payload": 1, "due_at": }`); status != 400 {
		t.Errorf("no JSON: %d %v", status, answer)
	}
}

// Addresses that decode no body do not take an encoded one for broken JSON.
func TestAnEncodedBodyIsRefusedWhereNoneIsDecoded(t *testing.T) {
	w := newWorld(t)
	w.exec(`SELECT penstock.create_queue('work')`)
	for encoding, want := range map[string]int{"gzip": 415, "br": 415, "identity": 204} {
		status, answer := w.send("POST", "/v1/queues/work/pause", `{`+reason+`}`, "Content-Encoding", encoding)
		if status != want || status != 204 && answer["code"] != "encoded" {
			t.Errorf("%s: %d %v, want %d", encoding, status, answer, want)
		}
	}
}
