package penstock_test

import (
	"go/ast"
	"go/parser"
	"go/token"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// Packages that translate HTTP into calls of pkg/operator, pkg/invalidation and the like. A statement is in the package
// whose tables it reads, so that a reader of the tables finds all of them there, and psql, CLI and pages have the same.
var withoutStatements = []string{"pkg/api/", "web/"}

// statementText matches a literal that is a statement: it begins with a verb of SQL, and not with a method of HTTP.
var statementText = regexp.MustCompile(`^\s*(SELECT|INSERT INTO|UPDATE|DELETE FROM|WITH|CALL)\s`)

func TestHandlersHaveNoStatements(t *testing.T) {
	for path, text := range productionGo(t) {
		for _, prefix := range withoutStatements {
			if strings.HasPrefix(path, prefix) {
				for _, found := range statements(t, path, text) {
					t.Errorf("%s: move it to the package whose table it reads, such as pkg/operator", found)
				}
			}
		}
	}
}

// statements lists the statements of a file, and its import of a driver of databases.
func statements(t *testing.T, path string, text []byte) (found []string) {
	t.Helper()
	set := token.NewFileSet()
	file, err := parser.ParseFile(set, path, text, parser.SkipObjectResolution)
	if err != nil {
		t.Fatal(err)
	}
	ast.Inspect(file, func(n ast.Node) bool {
		literal, is := n.(*ast.BasicLit)
		if !is || literal.Kind != token.STRING {
			return true
		}
		value, err := strconv.Unquote(literal.Value)
		if err != nil {
			t.Fatal(err)
		}
		switch {
		case statementText.MatchString(value):
			found = append(found, set.Position(literal.Pos()).String()+" has a statement")
		case strings.HasPrefix(value, "github.com/jackc/pgx/"), value == "database/sql":
			found = append(found, set.Position(literal.Pos()).String()+" imports a driver of databases")
		}
		return true
	})
	return found
}

func TestStatementsAreFound(t *testing.T) {
	const text = "package p\n\nimport \"github.com/jackc/pgx/v5\"\n\nconst a = `\nSELECT 1`\n\nvar b = []string{\"DELETE /admin/dlq\", " +
		"\"A SELECT whose rows are the set.\", \"DELETE FROM penstock.ready\"}\n\nvar _ pgx.Tx\n"
	got := strings.Join(statements(t, "p.go", []byte(text)), "\n")
	want := "p.go:3:8 imports a driver of databases\np.go:5:11 has a statement\np.go:8:75 has a statement"
	if got != want {
		t.Errorf("got\n%s\nwant\n%s", got, want)
	}
}
