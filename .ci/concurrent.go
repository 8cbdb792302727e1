// Command concurrent divides the tests of `make race` and `make plain` by a rule of the source.
//
//	go run .ci/concurrent.go whole PACKAGE...  packages whose tests all run under the race detector
//	go run .ci/concurrent.go rest PACKAGE...   the others: the race detector is for some of their tests
//	go run .ci/concurrent.go tests PACKAGE...  these tests, as a regular expression
//	go run .ci/concurrent.go with PACKAGE...   those of the packages that have a test of such a name
//
// A package is whole if one of its files is concurrent that is not a test, and if it is not in partly.
//
// A file is concurrent if it has a go statement or a channel, imports sync or sync/atomic, or calls a method Go, as that of
// a WaitGroup. A test is concurrent if it, or a function of test files that it names, directly or not, has one of these, if it
// is parallel to others, or if the file that it is the test of, x_test.go of x.go, is concurrent.
package main

import (
	"fmt"
	"go/ast"
	"go/parser"
	"go/token"
	"go/types"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// partly has packages with concurrent files of which most tests are of one goroutine.
var partly = []string{
	"cmd/leader", "cmd/penstock", "examples/greeting", "internal/devpostgres", "internal/pgtest", "internal/telemetry",
	"pkg/api", "pkg/changelog", "pkg/gateway/openaibatch", "pkg/invalidation", "pkg/scale", "pkg/scale/keda", "pkg/webhook",
	"web",
}

func main() {
	if len(os.Args) < 3 {
		fail(fmt.Errorf("needs what to print, and packages"))
	}
	what, folders := os.Args[1], os.Args[2:]
	var tests, whole, rest, with []string
	sources := map[string]*source{}
	for _, folder := range folders {
		s, err := read(folder)
		if err != nil {
			fail(err)
		}
		sources[folder] = s
		tests = append(tests, s.concurrentTests()...)
		if len(s.concurrent) > 0 && !slices.Contains(partly, filepath.Clean(folder)) {
			whole = append(whole, folder)
		} else {
			rest = append(rest, folder)
		}
	}
	for _, folder := range folders {
		if slices.ContainsFunc(sources[folder].tests, func(name string) bool { return slices.Contains(tests, name) }) {
			with = append(with, folder)
		}
	}
	slices.Sort(tests)
	switch what {
	case "whole":
		fmt.Println(strings.Join(whole, " "))
	case "rest":
		fmt.Println(strings.Join(rest, " "))
	case "with":
		fmt.Println(strings.Join(with, " "))
	case "tests":
		fmt.Println(strings.Join(slices.Compact(tests), "|"))
	default:
		fail(fmt.Errorf("%s is nothing that it prints", what))
	}
}

func fail(err error) {
	fmt.Fprintln(os.Stderr, "concurrent:", err)
	os.Exit(1)
}

type source struct {
	concurrent map[string]bool           // files that are not tests, without .go
	declared   map[types.Object]*element // of test files
	tests      []string
}

// element is a function, type or variable of a test file.
type element struct {
	file       string // without _test.go
	concurrent bool
	uses       map[types.Object]bool
}

func read(folder string) (*source, error) {
	s := &source{concurrent: map[string]bool{}, declared: map[types.Object]*element{}}
	paths, err := filepath.Glob(filepath.Join(folder, "*.go"))
	if err != nil {
		return nil, err
	}
	fset, packages := token.NewFileSet(), map[string][]*ast.File{}
	for _, path := range paths {
		file, err := parser.ParseFile(fset, path, nil, parser.SkipObjectResolution)
		if err != nil {
			return nil, err
		}
		packages[file.Name.Name] = append(packages[file.Name.Name], file)
	}
	for name, files := range packages {
		// What other packages have is not looked at, so that there are errors, and what is used of this one is known all the same.
		info := &types.Info{Defs: map[*ast.Ident]types.Object{}, Uses: map[*ast.Ident]types.Object{}}
		config := types.Config{Importer: empty{}, Error: func(error) {}}
		_, _ = config.Check(name, fset, files, info)
		for _, file := range files {
			s.readFile(filepath.Base(fset.Position(file.Pos()).Filename), file, info)
		}
	}
	return s, nil
}

// empty has each package, with nothing in it.
type empty struct{}

func (empty) Import(path string) (*types.Package, error) {
	p := types.NewPackage(path, filepath.Base(path))
	p.MarkComplete()
	return p, nil
}

func (s *source) readFile(name string, file *ast.File, info *types.Info) {
	name, test := strings.CutSuffix(name, "_test.go")
	if !test {
		if isConcurrent(file) {
			s.concurrent[strings.TrimSuffix(name, ".go")] = true
		}
		return
	}
	for _, declaration := range file.Decls {
		switch d := declaration.(type) {
		case *ast.FuncDecl:
			s.add(name, d.Name, d, info)
		case *ast.GenDecl: // a variable can hold a function, and a type a mutex
			for _, spec := range d.Specs {
				switch d := spec.(type) {
				case *ast.TypeSpec:
					s.add(name, d.Name, d, info)
				case *ast.ValueSpec:
					for _, variable := range d.Names {
						s.add(name, variable, d, info)
					}
				}
			}
		}
	}
}

func (s *source) add(file string, name *ast.Ident, node ast.Node, info *types.Info) {
	e := &element{file: file, concurrent: isConcurrent(node), uses: map[types.Object]bool{}}
	s.declared[info.Defs[name]] = e
	if isTest(info.Defs[name]) {
		s.tests = append(s.tests, name.Name)
	}
	ast.Inspect(node, func(n ast.Node) bool {
		if identifier, ok := n.(*ast.Ident); ok {
			used := info.Uses[identifier]
			if method, ok := used.(*types.Func); ok {
				used = method.Origin()
			}
			e.uses[used] = true
		}
		return true
	})
}

func isConcurrent(node ast.Node) (found bool) {
	ast.Inspect(node, func(n ast.Node) bool {
		switch e := n.(type) {
		case *ast.GoStmt, *ast.ChanType:
			found = true
		case *ast.ImportSpec:
			found = found || e.Path.Value == `"sync"` || e.Path.Value == `"sync/atomic"`
		case *ast.SelectorExpr:
			of, ok := e.X.(*ast.Ident)
			found = found || e.Sel.Name == "Go" || e.Sel.Name == "Parallel" || ok && (of.Name == "sync" || of.Name == "atomic")
		}
		return true
	})
	return found
}

func (s *source) concurrentTests() (tests []string) {
	for changed := true; changed; { // until nothing becomes concurrent by what it uses
		changed = false
		for _, e := range s.declared {
			for used := range e.uses {
				if of := s.declared[used]; !e.concurrent && of != nil && of.concurrent {
					e.concurrent, changed = true, true
				}
			}
		}
	}
	for object, e := range s.declared {
		if isTest(object) && (e.concurrent || s.concurrent[e.file]) {
			tests = append(tests, object.Name())
		}
	}
	return tests
}

func isTest(object types.Object) bool {
	f, ok := object.(*types.Func)
	return ok && f.Signature().Recv() == nil && strings.HasPrefix(f.Name(), "Test") && f.Name() != "TestMain"
}
