package api

import (
	"bytes"
	"flag"
	"fmt"
	"maps"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"
)

var (
	update = flag.Bool("update", false, "write docs/openapi.yaml")
	rebase = flag.Bool("baseline", false, "accept what docs/openapi.yaml says as the contract that later changes must keep")
)

const (
	document = "../../docs/openapi.yaml"
	contract = "testdata/openapi-baseline.yaml"
)

func TestCommittedDescriptionIsThatOfTheCode(t *testing.T) {
	text, err := New(nil, Config{}).OpenAPI()
	if err != nil {
		t.Fatal(err)
	}
	if *update {
		if err := os.WriteFile(document, text, 0o644); err != nil { //nolint:gosec // a document for everybody
			t.Fatal(err)
		}
	}
	committed, err := os.ReadFile(document)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Equal(text, committed) {
		t.Errorf("%s is not what the code says; run: go test ./pkg/api -run Description -update", document)
	}
}

// A client that was written against the baseline must go on working: addresses stay, what it may leave out does not
// become required, and what it reads does not go away. Additions are no break.
func TestUnracedDescriptionBreaksNoPromiseOfItsBaseline(t *testing.T) {
	text, err := New(nil, Config{}).OpenAPI()
	if err != nil {
		t.Fatal(err)
	}
	if *rebase {
		if err := os.WriteFile(contract, text, 0o644); err != nil { //nolint:gosec // a document for everybody
			t.Fatal(err)
		}
	}
	baseline, err := os.ReadFile(contract)
	if err != nil {
		t.Fatal(err)
	}
	for _, broken := range compare(t, baseline, text) {
		t.Errorf("%s; if it is meant, say so in CHANGELOG.md and run: go test ./pkg/api -run Baseline -baseline", broken)
	}
}

func TestComparisonFindsWhatBreaksClients(t *testing.T) {
	const before = `
paths:
  /a/{id}:
    get:
      parameters: [{name: id, in: path, required: true, schema: {type: integer}}, {name: q, in: query, schema: {type: string, enum: [x, y]}}]
      responses: {"200": {content: {application/json: {schema: {$ref: "#/components/schemas/Out"}}}}}
    post:
      requestBody: {content: {application/json: {schema: {$ref: "#/components/schemas/In"}}}}
      responses: {"204": {}}
components:
  schemas:
    Out: {type: object, required: [id], properties: {id: {type: integer}, items: {type: array, items: {$ref: "#/components/schemas/Out"}}}}
    In: {type: object, required: [reason], properties: {reason: {type: string}, force: {type: boolean}}}
`
	for _, c := range []struct{ name, old, new, want string }{
		{"nothing", "", "", ""},
		{"address gone", "/a/{id}", "/b/{id}", "GET /a/{id} is gone"},
		{"method gone", "    post:", "    put:", "POST /a/{id} is gone"},
		{"status gone", `"204"`, `"200"`, "204 is gone"},
		{"parameter gone", "name: q", "name: p", "parameter q is gone"},
		{"parameter becomes required", "in: query, schema", "in: query, required: true, schema", "parameter q is required now"},
		{"value gone", "enum: [x, y]", "enum: [x]", "takes y no more"},
		{"field of an answer gone", "items: {type: array", "rows: {type: array", "items is gone"},
		{"field of an answer optional", "required: [id]", "required: []", "id can be missing now"},
		{"type changed", "id: {type: integer}", "id: {type: string}", "was integer and is string"},
		{"field of a body gone", "force: {type: boolean}", "strong: {type: boolean}", "force is gone"},
		{"field of a body becomes required", "required: [reason]", "required: [reason, force]", "force is required now"},
		{"additions", "force: {type: boolean}", "force: {type: boolean}, more: {type: string}", ""},
	} {
		after := before
		if c.old != "" {
			after = strings.ReplaceAll(before, c.old, c.new)
		}
		found := compare(t, []byte(before), []byte(after))
		if c.want == "" && len(found) > 0 || c.want != "" && !strings.Contains(strings.Join(found, "\n"), c.want) {
			t.Errorf("%s: found %q, want %q", c.name, found, c.want)
		}
	}
}

type node = map[string]any

func compare(t *testing.T, before, after []byte) []string {
	t.Helper()
	c := &comparison{}
	if err := yaml.Unmarshal(before, &c.before); err != nil {
		t.Fatal(err)
	}
	if err := yaml.Unmarshal(after, &c.after); err != nil {
		t.Fatal(err)
	}
	for path, item := range at(c.before, "paths") {
		for method, was := range asNode(item) {
			name := strings.ToUpper(method) + " " + path
			is := at(c.after, "paths", path, method)
			if is == nil {
				c.broken("%s is gone", name)
				continue
			}
			c.parameters(name, asNode(was), is)
			c.schema(name+" body", body(asNode(was)), body(is), true, 0)
			for status, answer := range at(asNode(was), "responses") {
				if at(is, "responses", status) == nil {
					c.broken("%s: status %s is gone", name, status)
					continue
				}
				c.schema(name+" answer", content(asNode(answer)), content(at(is, "responses", status)), false, 0)
			}
		}
	}
	slices.Sort(c.found)
	return c.found
}

type comparison struct {
	before, after node
	found         []string
}

func (c *comparison) broken(format string, args ...any) {
	c.found = append(c.found, fmt.Sprintf(format, args...))
}

func (c *comparison) parameters(name string, was, is node) {
	known := parametersOf(was)
	now := parametersOf(is)
	for p, before := range known {
		after, there := now[p]
		if !there {
			c.broken("%s: parameter %s is gone", name, p)
			continue
		}
		if after["required"] == true && before["required"] != true {
			c.broken("%s: parameter %s is required now", name, p)
		}
		c.schema(name+" "+p, at(before, "schema"), at(after, "schema"), true, 0)
	}
	for p, after := range now {
		if known[p] == nil && after["required"] == true && after["in"] != "path" { // the address needed it all along
			c.broken("%s: parameter %s is required now", name, p)
		}
	}
}

// schema compares what a client sends (request) or reads.
func (c *comparison) schema(name string, was, is node, request bool, depth int) {
	was, is = resolve(c.before, was), resolve(c.after, is)
	if was == nil || depth > 6 {
		return
	}
	if fmt.Sprint(was["type"]) != fmt.Sprint(is["type"]) {
		c.broken("%s was %v and is %v", name, was["type"], is["type"])
		return
	}
	if taken := words(is["enum"]); request && len(taken) > 0 {
		for _, word := range words(was["enum"]) {
			if !slices.Contains(taken, word) {
				c.broken("%s takes %s no more", name, word)
			}
		}
	}
	for field, before := range at(was, "properties") {
		after := at(is, "properties", field)
		if after == nil {
			c.broken("%s: %s is gone", name, field)
			continue
		}
		c.schema(name+"."+field, asNode(before), after, request, depth+1)
	}
	needed, needs := words(was["required"]), words(is["required"])
	for _, field := range needs {
		if request && !slices.Contains(needed, field) {
			c.broken("%s: %s is required now", name, field)
		}
	}
	for _, field := range needed {
		if !request && !slices.Contains(needs, field) && at(is, "properties", field) != nil {
			c.broken("%s: %s can be missing now", name, field)
		}
	}
	if items := at(was, "items"); items != nil {
		c.schema(name+"[]", items, at(is, "items"), request, depth+1)
	}
}

func parametersOf(operation node) map[string]node {
	found := map[string]node{}
	list, _ := operation["parameters"].([]any)
	for _, p := range list {
		found[fmt.Sprint(asNode(p)["name"])] = asNode(p)
	}
	return found
}

func body(operation node) node { return content(at(operation, "requestBody")) }

// content is the schema of a body as JSON, or as the first media type by name where there is no JSON.
func content(of node) node {
	bodies := at(of, "content")
	if json := at(bodies, "application/json"); json != nil {
		return at(json, "schema")
	}
	for _, media := range slices.Sorted(maps.Keys(bodies)) {
		return at(bodies, media, "schema")
	}
	return nil
}

func resolve(doc, schema node) node {
	if ref, ok := schema["$ref"].(string); ok {
		return at(doc, strings.Split(strings.TrimPrefix(ref, "#/"), "/")...)
	}
	return schema
}

func at(of node, keys ...string) node {
	for _, key := range keys {
		of, _ = of[key].(node)
	}
	return of
}

func asNode(v any) node {
	n, _ := v.(node)
	return n
}

func words(list any) (found []string) {
	values, _ := list.([]any)
	for _, v := range values {
		found = append(found, fmt.Sprint(v))
	}
	return found
}

func TestPageForUsersExplainsEveryCode(t *testing.T) {
	page, err := os.ReadFile("../../docs/api.md")
	if err != nil {
		t.Fatal(err)
	}
	for _, row := range statuses {
		line := regexp.MustCompile("(?m)^\\| [^|]*`" + row.code + "`[^|]*\\| " + fmt.Sprint(row.status) + " \\|")
		if !line.Match(page) {
			t.Errorf("docs/api.md has no line for code %s with status %d", row.code, row.status)
		}
	}
}
