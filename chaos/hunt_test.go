package main

import (
	"bytes"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/penstock/penstock/chaos/mutants"
)

// A hunt that was interrupted goes on where it ended, and its table has all results.
func TestAHuntGoesOnWhereItEnded(t *testing.T) {
	results := filepath.Join(t.TempDir(), "results")
	for _, h := range []hunted{{Of: "hint-only", By: []string{"a"}, Runs: 1}, {Of: "newest-first", Runs: 9}} {
		if err := addResult(results, h); err != nil {
			t.Fatal(err)
		}
	}
	table, err := readResults(results)
	if err != nil {
		t.Fatal(err)
	}
	left, err := toHunt("", table)
	if err != nil {
		t.Fatal(err)
	}
	all, err := mutants.All()
	if err != nil {
		t.Fatal(err)
	}
	if len(left) != len(all)-2 || slices.ContainsFunc(left, func(m mutants.Mutant) bool { return m.Name == "hint-only" }) {
		t.Errorf("%d of %d are left to hunt, without two", len(left), len(all))
	}
	if n := len(left); !slices.Contains(left[n-1].Breaks, "an accepted entry has an outcome") {
		t.Errorf("%s is last, which waits for no lost entry", left[n-1].Name)
	}
	var out bytes.Buffer
	missed, err := printHunted(&out, table)
	if err != nil || missed != 1 {
		t.Errorf("%d missed (%v), want 1", missed, err)
	}
	for _, want := range []string{"hint-only", "nodes look for work only when", "1 of 2 mutants were caught"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("the table lacks %q:\n%s", want, &out)
		}
	}
}
