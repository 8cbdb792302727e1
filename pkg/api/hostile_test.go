package api

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/http/httptest"
	"net/url"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode"

	"github.com/danielgtaylor/huma/v2"
)

// hostileTexts are JSON strings as they are sent: characters that end headers, lines and texts, steer
// terminals, or
// are none, and one that is too long for every field.
var hostileTexts = []string{
	`"\r\nX-Injected: 1"`, `"a\nb"`, `"a\u0000b"`, `"\u001b[2J"`, `"\u009b31m"`, `"\ud800"`, `"\udc00\ud800"`,
	`"\uffff\u202e"`, `"'; DROP TABLE x --"`,
	`"$1 %s {{.}} ${x}"`, `""`, `"` + strings.Repeat("x", 1<<20) + `"`,
}

// edgeNumbers are numbers at the ends of the types that could hold them, and beyond.
var edgeNumbers = []string{
	"-1", "0", "-0.0", "0.5", "1e-400", "32768", "2147483648", "4294967296", "9223372036854775807",
	"9223372036854775808", "-9223372036854775809",
	"1e10", "1e19", "1.7976931348623157e308", "1e309", "1e131071", "123456789012345678901234567890",
}

// mutations returns bodies in each of which one field of the right kind has another value. Fields are those
// of the
// body and those that the description of the address has beside them.
func mutations(t *testing.T, body string, schema *huma.Schema, registry huma.Registry) []string {
	t.Helper()
	var valid map[string]json.RawMessage
	if json.Unmarshal([]byte(body), &valid) != nil {
		return nil // a list
	}
	var made []string
	each := func(set func(value string) map[string]json.RawMessage, texts, numbers bool) {
		values := []string{"null"}
		if texts {
			values = append(values, hostileTexts...)
		}
		if numbers {
			values = append(values, edgeNumbers...)
		}
		for _, value := range values {
			text, err := json.Marshal(set(value))
			if err != nil {
				t.Fatal(err)
			}
			made = append(made, string(text))
		}
	}
	fields := map[string]json.RawMessage{}
	if schema != nil {
		if schema.Ref != "" {
			schema = registry.SchemaFromRef(schema.Ref)
		}
		for name, property := range schema.Properties {
			fields[name] = json.RawMessage(map[string]string{"integer": "1", "number": "1"}[property.Type])
		}
	}
	maps.Copy(fields, valid)
	for name, value := range fields {
		is := kindOf(value)
		each(func(value string) map[string]json.RawMessage {
			with := maps.Clone(valid)
			with[name] = json.RawMessage(value)
			return with
		}, is != "number", is != "string")
		var inner map[string]json.RawMessage
		if is != "object" || json.Unmarshal(value, &inner) != nil {
			continue
		}
		for field, value := range inner {
			is := kindOf(value)
			each(func(value string) map[string]json.RawMessage {
				with, within := maps.Clone(valid), maps.Clone(inner)
				within[field] = json.RawMessage(value)
				with[name], _ = json.Marshal(within)
				return with
			}, is != "number", is != "string")
		}
	}
	slices.Sort(made)
	return made
}

// kindOf is string, number, object, or empty for what has both texts and numbers tried.
func kindOf(value json.RawMessage) string {
	switch value = bytes.TrimSpace(value); {
	case len(value) == 0:
		return "string"
	case value[0] == '"':
		return "string"
	case value[0] == '{':
		return "object"
	case value[0] == '-' || value[0] >= '0' && value[0] <= '9':
		return "number"
	}
	return ""
}

// leaks are words of Postgres and its driver. Advice of the schema may name one of its functions.
var leaks = regexp.MustCompile(`SQLSTATE|ERROR:|pgx|pgconn|(SELECT|INSERT|UPDATE) [^p]`)

// TestUnracedNoValueOfAnyFieldBreaksAnAddress sends to each address its valid body with hostile values in one
// field after
// another. Whatever becomes of it, the answer is no failure of the server and leaks no words of Postgres.
func TestUnracedNoValueOfAnyFieldBreaksAnAddress(t *testing.T) {
	w := newWorld(t)
	sent, failed := 0, map[string]bool{}
	ask := func(method, path, body string) *httptest.ResponseRecorder {
		answered := w.ask("", method, path, body)
		if answered.Code == http.StatusPreconditionRequired {
			answered = w.ask("", method, path, body, "If-Match", "*")
		}
		return answered
	}
	try := func(name, method, path, body string) {
		sent++
		answered := ask(method, path, body)
		if answered.Code >= 500 && !failed[name] {
			failed[name] = true
			t.Errorf("%s %s %.300s: %d %.500s", method, path, body, answered.Code, answered.Body)
		}
		if leak := leaks.FindString(answered.Body.String()); leak != "" && answered.Code >= 300 && !failed[name] {
			failed[name] = true
			t.Errorf("%s %s %.300s: the answer has %q: %.500s", method, path, body, leak, answered.Body)
		}
		for field, values := range answered.Header() {
			for _, value := range values {
				if strings.ContainsFunc(value, unicode.IsControl) {
					t.Errorf("%s %s %.300s: header %s is %q", method, path, body, field, value)
				}
			}
		}
	}
	operations := w.operations()
	for _, s := range story() {
		if s.before != nil {
			s.before(w)
		}
		path, body := w.fill(s.path), w.fill(s.body)
		name := w.pattern(s.method, path)
		op := operations[name]
		var schema *huma.Schema
		if op != nil && op.RequestBody != nil {
			schema = op.RequestBody.Content["application/json"].Schema
			if len(schema.OneOf) > 0 {
				schema = schema.OneOf[0]
			}
		}
		if s.body != "" {
			for _, body := range mutations(t, body, schema, w.api.huma.OpenAPI().Components.Schemas) {
				try(name+body[:min(len(body), 12)], s.method, path, body)
			}
		}
		for _, at := range hostileAddresses(path, op) {
			try(name+"?", s.method, at, body)
		}
		if answered := ask(s.method, path, body); answered.Code == s.status {
			w.note(s, path, answered) // otherwise a mutation has done before what the step was to do
		}
	}
	t.Logf("%d requests", sent)
	if sent < 5000 {
		t.Errorf("%d requests, want thousands: the description has lost its fields", sent)
	}
}

// operations are the described addresses by method and path.
func (w *world) operations() map[string]*huma.Operation {
	found := map[string]*huma.Operation{}
	for path, item := range w.api.huma.OpenAPI().Paths {
		for method, op := range map[string]*huma.Operation{
			"GET": item.Get, "POST": item.Post, "PUT": item.Put, "PATCH": item.Patch, "DELETE": item.Delete,
		} {
			if op != nil {
				found[method+" "+path] = op
			}
		}
	}
	return found
}

// hostileAddresses are the path with hostile parts and parameters.
func hostileAddresses(path string, op *huma.Operation) []string {
	values := []string{
		"%00", "%0d%0aX:1", "%1b%5b2J", "%c2%9b", "%ff%fe", "%ed%a0%80", "-1", "0", "1e10", "9223372036854775807",
		"9223372036854775808", "99999999999999999999",
		"NaN", "%2e%2e%2f", strings.Repeat("x", 9000),
	}
	plain, query, _ := strings.Cut(path, "?")
	var made []string
	parts := strings.Split(plain, "/")
	for i := range parts {
		if i < 2 || parts[i] == "" {
			continue
		}
		for _, value := range values {
			with := slices.Clone(parts)
			with[i] = value
			made = append(made, strings.Join(with, "/")+"?"+query)
		}
	}
	if op == nil {
		return made
	}
	for _, p := range op.Parameters {
		if p.In != "query" || p.Name == "wait" {
			continue
		}
		given, _ := url.ParseQuery(query)
		given.Del(p.Name)
		for _, value := range values {
			made = append(made, fmt.Sprintf("%s?%s&%s=%s", plain, given.Encode(), p.Name, value))
		}
	}
	return made
}

// TestUnracedADryRunJudgesAsTheRunDoes sends each body of an operation twice: both are accepted or refused alike,
// and a dry
// run counts what the operation then says that it matches.
func TestUnracedADryRunJudgesAsTheRunDoes(t *testing.T) {
	w := newWorld(t)
	w.exec(`SELECT penstock.create_queue('work')`)
	w.exec(`SELECT penstock.push('work', '1', name => 'n', flow => 'f', lock_key => 'k') FROM generate_series(1, 3)`)
	w.exec(`SELECT penstock.push('work', '2') FROM generate_series(1, 2)`)
	const path = "/v1/queues/work/operations"
	schema := w.operations()["POST /v1/queues/{queue}/operations"].RequestBody.Content["application/json"].Schema
	bodies := []string{
		`{"verb": "disable", "filter": {"all": true}, ` + reason + `}`,
		`{"verb": "disable", "filter": {"name": "n"}, ` + reason + `}`,
		`{"verb": "disable", "filter": {"flow": "f", "lock_key": "k"}, ` + reason + `}`,
		`{"verb": "disable", "filter": {}, ` + reason + `}`,
	}
	for _, body := range slices.Clone(bodies) {
		bodies = append(bodies, mutations(t, body, schema, w.api.huma.OpenAPI().Components.Schemas)...)
	}
	accepted := 0
	for _, body := range bodies {
		var sent map[string]json.RawMessage
		if err := json.Unmarshal([]byte(body), &sent); err != nil {
			t.Fatal(err)
		}
		delete(sent, "dry_run")
		wet, _ := json.Marshal(sent)
		sent["dry_run"] = json.RawMessage("true")
		dry, _ := json.Marshal(sent)
		counted, started := w.ask("", "POST", path, string(dry)), w.ask("", "POST", path, string(wet))
		if counted.Code != started.Code {
			t.Errorf("%.300s: dry %d %.300s, run %d %.300s", wet, counted.Code, counted.Body, started.Code,
				started.Body)
			continue
		}
		if started.Code != http.StatusAccepted {
			continue
		}
		accepted++
		var would, is struct {
			Matching int64 `json:"matching"`
			ID       int64 `json:"operation_id"`
		}
		if err := errors.Join(json.Unmarshal(counted.Body.Bytes(), &would),
			json.Unmarshal(started.Body.Bytes(), &is)); err != nil {
			t.Fatal(err)
		}
		var matched int64
		if err := w.pool.QueryRow(t.Context(), `SELECT matched FROM penstock.operation WHERE id = $1`,
			is.ID).Scan(&matched); err != nil {
			t.Fatal(err)
		}
		if matched != would.Matching {
			t.Errorf("%.300s: a dry run counts %d, the operation %d", wet, would.Matching, matched)
		}
	}
	if accepted < 10 {
		t.Errorf("%d bodies were accepted, want those with harmless texts", accepted)
	}
}
