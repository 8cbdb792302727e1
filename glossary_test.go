package penstock_test

import (
	"flag"
	"os"
	"regexp"
	"strings"
	"testing"
)

var update = flag.Bool("update", false, "write the parts of documents that are made from code: -run 'Glossary|TableOfImports'")

const (
	glossarySource = "pkg/invalidation/doc.go"
	glossaryPage   = "docs/glossary.md"
	wordsBegin     = "<!-- words -->\n"
	wordsEnd       = "<!-- end of words -->\n"
)

// glossaryLine is a word with the first line of its definition, or a further line of it.
var glossaryLine = regexp.MustCompile(`^//\t(?:(\S.*?) {2,}| +)(.+)$`)

func TestTheGlossaryOfTheDocumentsIsThatOfTheCode(t *testing.T) {
	source, err := os.ReadFile(glossarySource)
	if err != nil {
		t.Fatal(err)
	}
	page, err := os.ReadFile(glossaryPage)
	if err != nil {
		t.Fatal(err)
	}
	before, rest, begins := strings.Cut(string(page), wordsBegin)
	_, after, ends := strings.Cut(rest, wordsEnd)
	if !begins || !ends {
		t.Fatalf("%s lacks %q or %q", glossaryPage, wordsBegin, wordsEnd)
	}
	want := before + wordsBegin + "\n" + glossaryTable(string(source)) + "\n" + wordsEnd + after
	if want == string(page) {
		return
	}
	if !*update {
		t.Fatalf("%s differs from %s: go test . -run Glossary -update", glossaryPage, glossarySource)
	}
	if err := os.WriteFile(glossaryPage, []byte(want), 0o644); err != nil { //nolint:gosec // a page for everyone
		t.Fatal(err)
	}
}

func TestAGlossaryTableJoinsTheLinesOfADefinition(t *testing.T) {
	got := glossaryTable("// # Words\n//\n//\tkey     of a | b\n//\t        and c\n//\tlow water  a position\n//\n// # States\n//\tno    word\n")
	if want := "| word | meaning |\n|---|---|\n| key | of a \\| b and c |\n| low water | a position |\n"; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

// glossaryTable writes the section Words of a package comment as a table.
func glossaryTable(source string) string {
	_, words, _ := strings.Cut(source, "// # Words\n")
	words, _, _ = strings.Cut(words, "// # ")
	var rows []string
	for line := range strings.SplitSeq(words, "\n") {
		found := glossaryLine.FindStringSubmatch(line)
		if found == nil {
			continue
		}
		text := strings.ReplaceAll(found[2], "|", `\|`)
		if found[1] == "" && len(rows) > 0 {
			rows[len(rows)-1] += " " + text
		} else {
			rows = append(rows, "| "+found[1]+" | "+text)
		}
	}
	return "| word | meaning |\n|---|---|\n" + strings.Join(rows, " |\n") + " |\n"
}
