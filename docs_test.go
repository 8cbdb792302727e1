package penstock_test

import (
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// changelogLinesMax keeps the list of the first release to what can be read in a sitting.
const changelogLinesMax = 150

var (
	markdownLink    = regexp.MustCompile(`\]\(([^)\s]+)\)`)
	markdownHeading = regexp.MustCompile(`(?m)^#+ (.+)$`)
	fencedBlock     = regexp.MustCompile("(?s)```.*?```")
	notInAnchors    = regexp.MustCompile(`[^\p{L}\p{N} _-]`)
	quotation       = regexp.MustCompile(`"([^"]+)"`)
	joinedLiteral   = regexp.MustCompile(`"\s*\+\s*"`)
)

func TestLinksOfDocumentsLeadToFilesAndHeadings(t *testing.T) {
	documents := markdown(t)
	if len(documents) == 0 {
		t.Fatal("found no documents")
	}
	for path, text := range documents {
		for _, match := range markdownLink.FindAllStringSubmatch(fencedBlock.ReplaceAllString(text, ""), -1) {
			link := match[1]
			if strings.Contains(link, "://") || strings.HasPrefix(link, "mailto:") {
				continue
			}
			file, anchor, _ := strings.Cut(link, "#")
			target := path
			if file != "" {
				target = filepath.Join(filepath.Dir(path), file)
			}
			if _, err := os.Stat(target); err != nil {
				t.Errorf("%s links to %s, which does not exist", path, link)
				continue
			}
			if anchor != "" && !slices.Contains(anchors(documents[target]), anchor) {
				t.Errorf("%s links to %s, but %s has no such heading", path, link, target)
			}
		}
	}
}

// A person who searches a log for a text of the runbook finds it: each text in quotation marks is one of the programs, or
// the title of a panel.
func TestTheRunbookQuotesTextsThatExist(t *testing.T) {
	page, err := os.ReadFile("docs/operations.md")
	if err != nil {
		t.Fatal(err)
	}
	board, err := os.ReadFile("deploy/grafana/penstock.json")
	if err != nil {
		t.Fatal(err)
	}
	written := string(board)
	for _, text := range productionGo(t) {
		written += joinedLiteral.ReplaceAllString(string(text), "")
	}
	prose := backquoted.ReplaceAllString(fencedBlock.ReplaceAllString(string(page), ""), "")
	quotations := quotation.FindAllStringSubmatch(prose, -1)
	if len(quotations) < 10 {
		t.Errorf("found %d quotations", len(quotations))
	}
	for _, match := range quotations {
		if text := strings.Join(strings.Fields(match[1]), " "); !strings.Contains(written, text) {
			t.Errorf("docs/operations.md quotes %q, which no program writes", text)
		}
	}
}

func TestAnchorsAreThoseOfRenderedHeadings(t *testing.T) {
	got := anchors("# What `X.Y` costs\n```\n# not one\n```\n## A 2nd, too\n")
	if want := []string{"what-xy-costs", "a-2nd-too"}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

// Before the first release there is nothing that a version changed or mended for its users: the changelog has what
// there is, and what a person who ran a build of main has to do. Lists of mends, which a rebase brings back easily,
// belong to the commits.
func TestTheChangelogBeforeTheFirstReleaseHasTwoSections(t *testing.T) {
	text, err := os.ReadFile("CHANGELOG.md")
	if err != nil {
		t.Fatal(err)
	}
	want := []string{"Changelog", "[Unreleased]", "Added", "For those who ran a build of main"}
	if got := headings(string(text)); !slices.Equal(got, want) {
		t.Errorf("the headings are %q, want %q", got, want)
	}
	if lines := strings.Count(string(text), "\n"); lines > changelogLinesMax {
		t.Errorf("it has %d lines, more than %d: shorten it, each feature is a line", lines, changelogLinesMax)
	}
}

// headings are the texts of the headings of a document.
func headings(text string) (all []string) {
	for _, match := range markdownHeading.FindAllStringSubmatch(fencedBlock.ReplaceAllString(text, ""), -1) {
		all = append(all, match[1])
	}
	return all
}

// anchors are the names by which links reach the headings of a document, as GitHub makes them.
func anchors(text string) []string {
	var names []string
	for _, heading := range headings(text) {
		name := notInAnchors.ReplaceAllString(strings.ToLower(heading), "")
		names = append(names, strings.ReplaceAll(name, " ", "-"))
	}
	return names
}

func markdown(t *testing.T) map[string]string {
	t.Helper()
	documents := map[string]string{}
	err := filepath.WalkDir(".", func(path string, entry fs.DirEntry, err error) error {
		if err != nil {
			return err
		}
		name := entry.Name()
		if entry.IsDir() && path != "." && (strings.HasPrefix(name, ".") || name == "node_modules" || name == "tmp") {
			return fs.SkipDir
		}
		if entry.IsDir() || filepath.Ext(name) != ".md" {
			return nil
		}
		text, err := os.ReadFile(path)
		documents[path] = string(text)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return documents
}
