package judge

import (
	"slices"
	"testing"
)

// An error is recorded by the node whose lock covers the entry, and after a call under the token of that lock.
func TestAnErrorIsRecordedByTheHolderOfTheLock(t *testing.T) {
	const promise = "an end is recorded under the newest token only"
	for name, c := range map[string]struct {
		change func(h *History)
		broken bool
	}{
		"by its holder":                          {func(*History) {}, false},
		"beside another holder":                  {func(h *History) { h.Setbacks[0].Holder = 2 }, true},
		"beside another holder, for good":        {func(h *History) { h.Setbacks[2].Holder = 2 }, true},
		"when no lock covers the entry":          {func(h *History) { h.Setbacks[0].Token = 0 }, true},
		"under a token without a call":           {func(h *History) { h.Setbacks[0].Token = 105 }, true},
		"under a token without a call, as oom":   {func(h *History) { h.Setbacks[0].Token, h.Setbacks[0].Class = 105, "oom" }, true},
		"of a statement, which no worker runs":   {func(h *History) { h.Setbacks[1].Token = 105 }, false},
		"no error, but that it is to come later": {func(h *History) { h.Setbacks[0] = Setback{Entry: 13, Queue: "solo"} }, false},
		"as poison, by recovery":                 {func(h *History) { h.Setbacks[0].Token, h.Setbacks[0].Class = 105, classPoison }, false},
		"as unknown, of an entry that may run twice": {func(h *History) {
			h.Setbacks[0].Token, h.Setbacks[0].Class = 105, classUnknown
		}, true},
		"as unknown, of an entry that may not": {func(h *History) {
			h.Setbacks[0].Token, h.Setbacks[0].Class, pushOf(h, 13).Once = 105, classUnknown, true
		}, false},
	} {
		h := good()
		c.change(h)
		if found := broken(h)[promise] > 0; found != c.broken {
			t.Errorf("%s: reported %v, want %v", name, found, c.broken)
		}
	}
}

// What an entry of a key spent is told by what was recorded under the tokens of its calls.
func TestAttemptsOfAKeyAreErrorsThatWereRecorded(t *testing.T) {
	const promise = "attempts are errors"
	for name, c := range map[string]struct {
		change func(h *History)
		broken bool
	}{
		"two errors":                   {func(*History) {}, false},
		"one of them spent no attempt": {func(h *History) { endOf(h, 53).Attempt = 1 }, true},
		"one of them was handed back": {func(h *History) {
			endOf(h, 53).Attempt = 1
			h.Setbacks = slices.Delete(h.Setbacks, 1, 2)
		}, false},
	} {
		h := good()
		pushOf(h, 53).Key, endOf(h, 53).Key, grantOf(h, 121).Key, grantOf(h, 122).Key = "f", "f", "f", "f"
		c.change(h)
		if found := broken(h)[promise] > 0; found != c.broken {
			t.Errorf("%s: reported %v, want %v", name, found, c.broken)
		}
	}
}
