package penstock_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// namesIdentifier matches the first word of a comment where it is written as unexported identifiers are.
var namesIdentifier = regexp.MustCompile(`^([a-z]\w*|[A-Za-z]+[a-z][A-Z]\w*)\b`)

// A comment that keeps the former name of what it describes misleads everyone who searches for either.
func TestCommentsNameTheDeclarationThatTheyDescribe(t *testing.T) {
	for path, text := range productionGo(t) {
		if isGenerated(text) {
			continue
		}
		wrong, err := misnamed(path, text)
		if err != nil {
			t.Fatal(err)
		}
		for _, w := range wrong {
			t.Errorf("%s: %s", path, w)
		}
	}
}

func TestACommentUnderAnotherNameIsFound(t *testing.T) {
	const text = `package a

// old does it.
func fresh() {}

// some is one of two.
type some int

// Both of them are constants.
const a, b = 1, 2

// add and drop change the set.
func add() {}

type (
	// former is a number.
	present int
)
`
	wrong, err := misnamed("a.go", []byte(text))
	want := []string{"the comment of fresh speaks of old", "the comment of present speaks of former"}
	if err != nil || !slices.Equal(wrong, want) {
		t.Errorf("found %q, %v, want %q", wrong, err, want)
	}
}

// misnamed lists the functions and types of a file whose comment begins with the name of something else.
func misnamed(path string, text []byte) (wrong []string, err error) {
	file, err := parser.ParseFile(token.NewFileSet(), path, text, parser.ParseComments|parser.SkipObjectResolution)
	if err != nil {
		return nil, err
	}
	judge := func(name string, doc *ast.CommentGroup) {
		first := namesIdentifier.FindString(strings.TrimSpace(doc.Text()))
		if first != "" && first != name {
			wrong = append(wrong, "the comment of "+name+" speaks of "+first)
		}
	}
	for _, declared := range file.Decls {
		switch d := declared.(type) {
		case *ast.FuncDecl:
			judge(d.Name.Name, d.Doc)
		case *ast.GenDecl:
			if d.Tok != token.TYPE {
				continue
			}
			for _, spec := range d.Specs {
				s, _ := spec.(*ast.TypeSpec)
				doc := s.Doc
				if !d.Lparen.IsValid() {
					doc = d.Doc
				}
				judge(s.Name.Name, doc)
			}
		}
	}
	return wrong, nil
}
