package telemetry_test

import (
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"

	"go.yaml.in/yaml/v3"

	"github.com/penstock/penstock/internal/machine"
	"github.com/penstock/penstock/internal/telemetry"
)

var update = flag.Bool("update", false, "write docs/metrics.md")

const begin, end = "<!-- metrics: go test ./internal/telemetry -update -->\n", "<!-- end of metrics -->\n"

func TestPageOfMetricsIsTheCatalog(t *testing.T) {
	const path = "../../docs/metrics.md"
	text, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	head, rest, found := strings.Cut(string(text), begin)
	_, tail, closed := strings.Cut(rest, end)
	if !found || !closed {
		t.Fatalf("%s has no place for the table", path)
	}
	want := head + begin + table() + end + tail
	if want == string(text) {
		return
	}
	if !*update {
		t.Fatalf("%s is not the catalog; run: go test ./internal/telemetry -update", path)
	}
	if err := os.WriteFile(path, []byte(want), 0o600); err != nil {
		t.Fatal(err)
	}
}

func table() string {
	var b strings.Builder
	b.WriteString("| metric | labels | of | kind | meaning |\n|---|---|---|---|---|\n")
	of := map[int]string{
		telemetry.Leader: "leader", telemetry.TaskNode: "node", telemetry.Leader | telemetry.TaskNode: "both", telemetry.Gateway: "gateway",
		telemetry.Leader | telemetry.TaskNode | telemetry.Gateway: "all",
	}
	for _, m := range telemetry.Catalog() {
		fmt.Fprintf(&b, "| `%s%s` | %s | %s | %s | %s |\n", telemetry.Prefix, m.Name, strings.Join(m.Labels, ", "), of[m.From], m.Kind, m.Help)
	}
	return b.String()
}

// names finds metrics in an expression.
var names = regexp.MustCompile(`\bpenstock_[a-z0-9_]+`)

// checkExpression says what of an expression cannot be right: metrics and labels that the catalog does not have, and
// brackets that do not close. No parser of the language is linked.
func checkExpression(t *testing.T, where, expression string) {
	t.Helper()
	known, labels := map[string]bool{}, map[string]bool{"job": true, "instance": true, "le": true}
	for _, m := range telemetry.Catalog() {
		known[telemetry.Prefix+m.Name] = true
		for _, l := range m.Labels {
			labels[l] = true
		}
		if m.Kind == "histogram" {
			for _, suffix := range []string{"_bucket", "_sum", "_count"} {
				known[telemetry.Prefix+m.Name+suffix] = true
			}
		}
	}
	found := names.FindAllString(expression, -1)
	if len(found) == 0 && !strings.HasPrefix(expression, "up{") { // Prometheus' own metric of targets
		t.Errorf("%s: %q names no metric", where, expression)
	}
	for _, name := range found {
		if !known[name] {
			t.Errorf("%s: there is no metric %s", where, name)
		}
	}
	for _, list := range regexp.MustCompile(`(?:by|without|on)\s*\(([^)]*)\)`).FindAllStringSubmatch(expression, -1) {
		for label := range strings.SplitSeq(list[1], ",") {
			if l := strings.TrimSpace(label); l != "" && !labels[l] {
				t.Errorf("%s: no metric has a label %s", where, l)
			}
		}
	}
	for _, pair := range []string{"()", "{}", "[]"} {
		if strings.Count(expression, pair[:1]) != strings.Count(expression, pair[1:]) {
			t.Errorf("%s: brackets %s do not match in %q", where, pair, expression)
		}
	}
}

type rules struct {
	Groups []struct {
		Name  string `yaml:"name"`
		Rules []struct {
			Alert       string            `yaml:"alert"`
			Expr        string            `yaml:"expr"`
			For         string            `yaml:"for"`
			Labels      map[string]string `yaml:"labels"`
			Annotations map[string]string `yaml:"annotations"`
		} `yaml:"rules"`
	} `yaml:"groups"`
}

// Each alert watches what there is, says how bad it is, and has a section in the page that is read at night.
func TestAlertsWatchWhatThereIs(t *testing.T) {
	text, err := os.ReadFile("../../deploy/prometheus/alerts.yaml")
	if err != nil {
		t.Fatal(err)
	}
	page, err := os.ReadFile("../../docs/operations.md")
	if err != nil {
		t.Fatal(err)
	}
	var all rules
	decoder := yaml.NewDecoder(strings.NewReader(string(text)))
	decoder.KnownFields(true)
	if err := decoder.Decode(&all); err != nil {
		t.Fatal(err)
	}
	seen := map[string]bool{}
	for _, g := range all.Groups {
		for _, r := range g.Rules {
			checkExpression(t, r.Alert, r.Expr)
			if s := r.Labels["severity"]; s != "page" && s != "ticket" {
				t.Errorf("%s has severity %q", r.Alert, s)
			}
			if r.Annotations["summary"] == "" || !strings.HasSuffix(r.Annotations["runbook"], "operations.md#"+strings.ToLower(r.Alert)) {
				t.Errorf("%s: summary %q, runbook %q", r.Alert, r.Annotations["summary"], r.Annotations["runbook"])
			}
			if !strings.Contains(string(page), "\n### "+r.Alert+"\n") {
				t.Errorf("docs/operations.md does not say what to do about %s", r.Alert)
			}
			if regexp.MustCompile(`^\d+[smh]$`).FindString(r.For) == "" {
				t.Errorf("%s waits for %q", r.Alert, r.For)
			}
			if seen[r.Alert] {
				t.Errorf("%s is there twice", r.Alert)
			}
			seen[r.Alert] = true
		}
	}
	for _, m := range regexp.MustCompile(`(?m)^### (Penstock\w+)$`).FindAllStringSubmatch(string(page), -1) {
		if !seen[m[1]] {
			t.Errorf("docs/operations.md describes %s, which does not exist", m[1])
		}
	}
	if len(seen) < 10 {
		t.Errorf("%d alerts", len(seen))
	}
}

func TestTheAlertOnTargetsWatchesAllJobs(t *testing.T) {
	text, err := os.ReadFile("../../deploy/prometheus/scrape.yaml")
	if err != nil {
		t.Fatal(err)
	}
	alerts, err := os.ReadFile("../../deploy/prometheus/alerts.yaml")
	if err != nil {
		t.Fatal(err)
	}
	watched := regexp.MustCompile(`up\{job=~"([^"]+)"\}`).FindStringSubmatch(string(alerts))
	var scrape struct {
		Configs []struct {
			Name string `yaml:"job_name"`
		} `yaml:"scrape_configs"`
	}
	if err := yaml.Unmarshal(text, &scrape); err != nil || len(scrape.Configs) == 0 || watched == nil {
		t.Fatalf("jobs %v (%v), watched %q", scrape.Configs, err, watched)
	}
	for _, job := range scrape.Configs {
		if !regexp.MustCompile("^(?:" + watched[1] + ")$").MatchString(job.Name) {
			t.Errorf("no alert watches the targets of job %s: %s", job.Name, watched[1])
		}
	}
}

// What the expressions do is tested by promtool.
func TestUnracedAlertsFireWhereTheyAreMeantTo(t *testing.T) {
	promtool, err := exec.LookPath("promtool")
	if err != nil {
		machine.Lacks(t, "promtool", "apt-get install prometheus")
	}
	const path = "../../deploy/prometheus/alerts_test.yaml"
	if _, err := os.ReadFile(path); err != nil { // so that no result is cached across a change of it
		t.Fatal(err)
	}
	if out, err := exec.CommandContext(t.Context(), promtool, "test", "rules", path).CombinedOutput(); err != nil {
		t.Errorf("%v: %s", err, out)
	}
}

type panel struct {
	ID      int    `json:"id"`
	Title   string `json:"title"`
	Type    string `json:"type"`
	GridPos struct{ H, W, X, Y int }
	Targets []struct {
		Expr string `json:"expr"`
	} `json:"targets"`
	Description string `json:"description"`
}

func TestBoardShowsWhatThereIs(t *testing.T) {
	text, err := os.ReadFile("../../deploy/grafana/penstock.json")
	if err != nil {
		t.Fatal(err)
	}
	var board struct {
		Title         string  `json:"title"`
		UID           string  `json:"uid"`
		SchemaVersion int     `json:"schemaVersion"`
		Panels        []panel `json:"panels"`
	}
	if err := json.Unmarshal(text, &board); err != nil {
		t.Fatal(err)
	}
	if board.Title == "" || board.UID == "" || board.SchemaVersion == 0 || len(board.Panels) < 10 {
		t.Errorf("board %q (%s) of version %d has %d panels", board.Title, board.UID, board.SchemaVersion, len(board.Panels))
	}
	ids := map[int]bool{}
	for _, p := range board.Panels {
		if ids[p.ID] || p.GridPos.W == 0 || p.GridPos.X+p.GridPos.W > 24 {
			t.Errorf("panel %d %q stands wrong", p.ID, p.Title)
		}
		ids[p.ID] = true
		if p.Type != "row" && len(p.Targets) == 0 {
			t.Errorf("panel %q shows nothing", p.Title)
		}
		for _, target := range p.Targets {
			checkExpression(t, p.Title, strings.NewReplacer("$queue", "x", "$__rate_interval", "1m").Replace(target.Expr))
		}
	}
	if first := board.Panels[0]; !strings.Contains(first.Title, "Head") {
		t.Errorf("the first panel is %q, want the age of the head of the line", first.Title)
	}
}
