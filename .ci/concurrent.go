// Command concurrent divides the tests of `make race` and `make plain` by a rule of the source. It prints the division of
// packages and tests as variables of a shell:
//
//	go run .ci/concurrent.go PACKAGE...
//	raced='PACKAGE...'  packages with tests for the race detector, which
//	alone='NAME|...'    skips these tests of one goroutine
//	plain='PACKAGE...'  packages with tests that run without it, where
//	beside='NAME|...'   the concurrent ones are skipped
//
// A package is concurrent if one of its files is that is not a test. Only such packages are raced: what a package without
// goroutines, locks and channels shares is shared by those that use it. The tests of partly are divided, so that these
// packages are in both lists.
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

// partly has packages with concurrent files in which so many tests are of one goroutine that it pays to link a second
// program for them.
var partly = []string{
	"cmd/penstock", "internal/devpostgres", "pkg/api", "pkg/invalidation", "pkg/scale", "pkg/webhook", "web",
}

func main() {
	var raced, plain, inRace, inPlain, alone, beside []string
	for _, folder := range os.Args[1:] {
		divide := slices.Contains(partly, filepath.Clean(folder))
		s, err := read(folder, divide)
		if err != nil {
			fmt.Fprintln(os.Stderr, "concurrent:", err)
			os.Exit(1)
		}
		switch {
		case len(s.concurrent) == 0:
			plain, inPlain = append(plain, folder), append(inPlain, s.tests...)
		case divide:
			concurrent, others := s.divided()
			raced, plain = append(raced, folder), append(plain, folder)
			beside, inRace = append(beside, concurrent...), append(inRace, concurrent...)
			alone, inPlain = append(alone, others...), append(inPlain, others...)
		default:
			raced, inRace = append(raced, folder), append(inRace, s.tests...)
		}
	}
	fmt.Printf("raced='%s'\nalone='%s'\n", strings.Join(raced, " "), names(alone, inRace))
	fmt.Printf("plain='%s'\nbeside='%s'\n", strings.Join(plain, " "), names(beside, inPlain))
}

// names joins the names of tests that are skipped, without those that other packages of the same run have as well: these
// run twice.
func names(skipped, run []string) string {
	skipped = slices.DeleteFunc(skipped, func(name string) bool { return slices.Contains(run, name) })
	slices.Sort(skipped)
	return strings.Join(slices.Compact(skipped), "|")
}

type source struct {
	concurrent map[string]bool           // files that are not tests, without .go
	declared   map[types.Object]*element // of test files
	tests      []string
}

// element is a function, type or variable of a test file.
type element struct {
	file       string // without _test.go
	test       bool
	concurrent bool
	uses       map[types.Object]bool
}

// read parses a package and, where its tests are divided, finds what uses what in its test files.
func read(folder string, divide bool) (*source, error) {
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
		info := &types.Info{Defs: map[*ast.Ident]types.Object{}, Uses: map[*ast.Ident]types.Object{}}
		if divide {
			// What other packages have is not looked at, so that there are errors, and what is used of this one is known all the same.
			config := types.Config{Importer: empty{}, Error: func(error) {}}
			_, _ = config.Check(name, fset, files, info)
		}
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
	if d, ok := node.(*ast.FuncDecl); ok && d.Recv == nil && strings.HasPrefix(name.Name, "Test") && name.Name != "TestMain" {
		e.test = true
		s.tests = append(s.tests, name.Name)
	}
	s.declared[info.Defs[name]] = e
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

// divided returns the tests that are concurrent, and the others.
func (s *source) divided() (concurrent, others []string) {
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
		switch {
		case !e.test:
		case e.concurrent || s.concurrent[e.file]:
			concurrent = append(concurrent, object.Name())
		default:
			others = append(others, object.Name())
		}
	}
	return concurrent, others
}
