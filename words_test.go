package penstock_test

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"path/filepath"
	"slices"
	"strings"
	"testing"
)

// sharedName is an exported type name that several packages of pkg/ declare.
type sharedName struct {
	packages string // without pkg/, sorted, separated by blanks
	reason   string
}

// oneMeaning lists names that mean the same thing in each package that declares them.
var oneMeaning = map[string]sharedName{
	"Config": {
		"api batch client cron doctor election fairness gateway gateway/openaibatch gateway/prediction governor invalidation maintenance recovery scale scale/keda tasknode usage webhook worker",
		"the options of the package, as everywhere in Go",
	},
	"Handler":     {"invalidation webhook", "webhook.Handler implements invalidation.Handler"},
	"Reports":     {"api inference", "inference.Reports implements api.Reports"},
	"Ranker":      {"fairness tasknode", "fairness.Ranker implements tasknode.Ranker"},
	"Fence":       {"election maintenance", "election.Fence implements maintenance.Fence"},
	"Model":       {"operator worker", "operator's is the row that operators see"},
	"Instance":    {"operator worker", "operator's is the row that operators see"},
	"Lock":        {"invalidation operator", "operator's is the row that operators see"},
	"Queue":       {"client invalidation operator", "a handle, and the rows that operators and clients see"},
	"Failure":     {"client invalidation operator", "a failure, and the rows that operators and clients see"},
	"Node":        {"invalidation operator recovery tasknode", "a process: run, registered, observed, and seen"},
	"NodeID":      {"invalidation operator", "operator's is written as text in JSON"},
	"Lane":        {"fairness invalidation operator", "a lane: claimed, ranked, and seen"},
	"Push":        {"changelog client invalidation", "an entry to be"},
	"Pushed":      {"client invalidation", "the answer to a push, over HTTP and in Go"},
	"Degradation": {"maintenance operator", "a state in which work stands still: examined, and as the leader measured it"},
	"Sample":      {"maintenance operator", "the state of a queue at one time: as the leader measured it, and as it is seen"},
	"Moment":      {"api operator", "a time that an operator gives: as a request has it, and as the change takes it"},
	"Request":     {"gateway scale/simulate", "a request whose client waits: served, and simulated"},
}

func TestATypeNameOfPkgHasOneMeaning(t *testing.T) {
	declaredIn := map[string][]string{}
	for path, text := range productionGo(t) {
		pkg, inPkg := strings.CutPrefix(filepath.ToSlash(filepath.Dir(path)), "pkg/")
		if !inPkg {
			continue
		}
		names, err := exportedTypes(path, text)
		if err != nil {
			t.Fatal(err)
		}
		for _, name := range names {
			declaredIn[name] = append(declaredIn[name], pkg)
		}
	}
	if len(declaredIn) == 0 {
		t.Fatal("pkg/ declares no exported type")
	}
	for name, packages := range declaredIn {
		slices.Sort(packages)
		packages = slices.Compact(packages)
		declaredIn[name] = packages
		allowed := strings.Fields(oneMeaning[name].packages)
		if len(packages) > 1 && !slices.Equal(packages, allowed) {
			t.Errorf("%s is an exported type of %v, and the list of words_test.go knows it in %v: give it another name in one of them, or say why it means the same",
				name, packages, allowed)
		}
	}
	for name, row := range oneMeaning {
		if len(declaredIn[name]) < 2 {
			t.Errorf("%s (%s) is not shared any more: take it off the list", name, row.reason)
		}
	}
}

func TestExportedTypesAreFoundWithoutAliases(t *testing.T) {
	names, err := exportedTypes("a.go", []byte("package a\ntype A int\ntype (\n\tB[T any] struct{}\n\tc int\n\tD = A\n)\nfunc f() { type E int }\n"))
	if want := []string{"A", "B"}; err != nil || !slices.Equal(names, want) {
		t.Errorf("got %v, %v; want %v", names, err, want)
	}
}

// exportedTypes names the exported types that a file declares. An alias is the type that it names, not another one.
func exportedTypes(path string, text []byte) ([]string, error) {
	file, err := parser.ParseFile(token.NewFileSet(), path, text, parser.SkipObjectResolution)
	if err != nil {
		return nil, fmt.Errorf("parse %s: %w", path, err)
	}
	var names []string
	for _, decl := range file.Decls {
		types, ok := decl.(*ast.GenDecl)
		if !ok || types.Tok != token.TYPE {
			continue
		}
		for _, spec := range types.Specs {
			if declared, ok := spec.(*ast.TypeSpec); ok && declared.Name.IsExported() && !declared.Assign.IsValid() {
				names = append(names, declared.Name.Name)
			}
		}
	}
	return names, nil
}
