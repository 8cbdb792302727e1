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

var (
	markdownLink    = regexp.MustCompile(`\]\(([^)\s]+)\)`)
	markdownHeading = regexp.MustCompile(`(?m)^#+ (.+)$`)
	fencedBlock     = regexp.MustCompile("(?s)```.*?```")
	notInAnchors    = regexp.MustCompile(`[^\p{L}\p{N} _-]`)
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

func TestAnchorsAreThoseOfRenderedHeadings(t *testing.T) {
	got := anchors("# What `X.Y` costs\n```\n# not one\n```\n## A 2nd, too\n")
	if want := []string{"what-xy-costs", "a-2nd-too"}; !slices.Equal(got, want) {
		t.Errorf("got %q, want %q", got, want)
	}
}

// anchors are the names by which links reach the headings of a document, as GitHub makes them.
func anchors(text string) []string {
	var names []string
	for _, match := range markdownHeading.FindAllStringSubmatch(fencedBlock.ReplaceAllString(text, ""), -1) {
		name := notInAnchors.ReplaceAllString(strings.ToLower(match[1]), "")
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
