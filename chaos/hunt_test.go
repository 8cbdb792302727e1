package main

import (
	"bytes"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/penstock/penstock/chaos/mutants"
)

// A hunt that was interrupted goes on where it ended: what was missed, or found at another commit, is not done.
func TestAHuntGoesOnWhereItEnded(t *testing.T) {
	results := filepath.Join(t.TempDir(), "results")
	for _, h := range []hunted{
		{Of: "hint-only", By: []string{"a"}, Runs: 1, Commit: "now"},
		{Of: "hint-only", Runs: 7, Commit: "now"},
		{Of: "limit-before-lock", By: []string{"a"}, Runs: 1, Commit: "before"},
		{Of: "newest-first", Runs: 9, Commit: "now"},
		{Of: "webhook-outside", By: []string{"a"}, Runs: 1, Commit: "now"},
	} {
		if err := addResult(results, h); err != nil {
			t.Fatal(err)
		}
	}
	table, err := readResults(results)
	if err != nil {
		t.Fatal(err)
	}
	names := func(table []hunted) (names []string) {
		for _, h := range table {
			names = append(names, h.Of)
		}
		return names
	}
	for _, c := range []struct {
		commit, only string
		want         []string
	}{
		{"now", "", []string{"hint-only", "webhook-outside"}},
		{"now", "hint", []string{"hint-only"}},
		{"now", "hint,outside,newest", []string{"hint-only", "webhook-outside"}},
		{"before", "", []string{"limit-before-lock"}},
		{"now-dirty", "", nil},
	} {
		if got := names(foundAt(c.commit, c.only, slices.Clone(table))); !slices.Equal(got, c.want) {
			t.Errorf("at %s, only %q: %q are done, want %q", c.commit, c.only, got, c.want)
		}
	}
	done := foundAt("now", "", slices.Clone(table))
	left, err := toHunt("", done)
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
	missed, err := printHunted(&out, append(done, hunted{Of: "newest-first", Commit: "now"}))
	if err != nil || missed != 1 {
		t.Errorf("%d missed (%v), want 1", missed, err)
	}
	for _, want := range []string{"hint-only", "nodes look for work only when", "2 of 3 mutants were caught"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("the table lacks %q:\n%s", want, &out)
		}
	}
}

// A promise that load alone breaks tells nothing of a bug: a run of the programs without it has to keep the promise.
func TestABugIsFoundOnlyByAPromiseThatIsKeptWithoutIt(t *testing.T) {
	found := []finding{{"a", "entry 1"}, {"a", "entry 2"}, {"b", "late"}, {"c", "entry 3"}}
	for _, c := range []struct {
		without  []string
		by, also []string
	}{
		{nil, []string{"a", "b"}, []string{"c: entry 3"}},
		{[]string{"b"}, []string{"a"}, []string{"c: entry 3", "b: broken without the bug as well"}},
		{[]string{"a", "b", "c"}, nil, []string{"c: entry 3", "a: broken without the bug as well", "b: broken without the bug as well"}},
	} {
		h := hunted{Mutant: mutants.Mutant{Breaks: []string{"a", "b"}}}
		if err := h.judge(found, func() ([]string, error) { return c.without, nil }); err != nil {
			t.Fatal(err)
		}
		if !slices.Equal(h.By, c.by) || !slices.Equal(h.Also, c.also) {
			t.Errorf("without the bug %q are broken: found by %q, beside it %q", c.without, h.By, h.Also)
		}
	}
	h := hunted{Mutant: mutants.Mutant{Breaks: []string{"d"}}}
	err := h.judge(found, func() ([]string, error) { t.Error("a control run for nothing"); return nil, nil })
	if err != nil || len(h.By) > 0 {
		t.Errorf("found by %q (%v)", h.By, err)
	}
}
