package penstock_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// walkRow matches a row of the walk in docs/architecture.md: a file, and functions in it.
var (
	walkRow     = regexp.MustCompile("(?m)^\\|[^|\n]*\\|[^|\n]*\\| `([^`]+)` \\| (`[^|\n]+`) \\|$")
	backquoted  = regexp.MustCompile("`([^`]+)`")
	sqlFunction = regexp.MustCompile(`(?m)^CREATE OR REPLACE FUNCTION penstock\.(\w+)\(`)
)

func TestTheWalkOfAnEntryNamesFunctionsThatExist(t *testing.T) {
	text, err := os.ReadFile("docs/architecture.md")
	if err != nil {
		t.Fatal(err)
	}
	_, walk, found := strings.Cut(string(text), "\n## An entry from push to finish\n")
	walk, _, _ = strings.Cut(walk, "\n## ")
	rows := walkRow.FindAllStringSubmatch(walk, -1)
	// Each line of the table but its head and the line below it is a row with a file.
	if lines := strings.Count(walk, "\n|") - 2; !found || len(rows) == 0 || len(rows) != lines {
		t.Fatalf("the walk has %d lines, of which %d name a file and functions", lines, len(rows))
	}
	for _, row := range rows {
		declared, err := functionsOf(row[1])
		if err != nil {
			t.Error(err)
			continue
		}
		for _, name := range backquoted.FindAllStringSubmatch(row[2], -1) {
			if !slices.Contains(declared, name[1]) {
				t.Errorf("docs/architecture.md has %s in %s, which declares %v", name[1], row[1], declared)
			}
		}
	}
}

// functionsOf are the functions that a file of Go or SQL declares: methods as Type.Name, those of SQL without schema.
func functionsOf(path string) (names []string, err error) {
	text, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	if strings.HasSuffix(path, ".sql") {
		for _, match := range sqlFunction.FindAllStringSubmatch(string(text), -1) {
			names = append(names, match[1])
		}
		return names, nil
	}
	file, err := parser.ParseFile(token.NewFileSet(), path, text, parser.SkipObjectResolution)
	if err != nil {
		return nil, err
	}
	for _, declared := range file.Decls {
		f, ok := declared.(*ast.FuncDecl)
		if !ok {
			continue
		}
		name := f.Name.Name
		if f.Recv != nil {
			receiver := f.Recv.List[0].Type
			if pointer, ok := receiver.(*ast.StarExpr); ok {
				receiver = pointer.X
			}
			if typ, ok := receiver.(*ast.Ident); ok {
				name = typ.Name + "." + name
			}
		}
		names = append(names, name)
	}
	return names, nil
}
