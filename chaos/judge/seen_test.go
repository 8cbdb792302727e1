package judge

import "testing"

// seen holds records with one bug each, and the promise whose judge has to report it.
type seen struct {
	bug, promise string
	spoil        func(h *History)
}

func judgeEach(t *testing.T, cases []seen) {
	t.Helper()
	for _, c := range cases {
		h := good()
		c.spoil(h)
		if broken(h)[c.promise] == 0 {
			t.Errorf("%s: %q reports nothing; others: %v", c.bug, c.promise, broken(h))
		}
	}
}

func TestBatchesAreJudgedByWhatTheirClientsMade(t *testing.T) {
	const promise = "parts of a batch are done once"
	judgeEach(t, []seen{
		{"one of the items is not run", promise, func(h *History) { delete(h.Items, Item{7, 2}) }},
		{"a batch is lost", promise, func(h *History) { h.Items = nil }},
		{"a lost batch whose client was not told has one of its items run", promise, func(h *History) {
			h.Batches[1].Items, h.Items[Item{8, 1}] = 2, 1
		}},
		{"an item is run twice", promise, func(h *History) { h.Items[Item{7, 2}] = 2 }},
		{"an item is run that its client did not name", promise, func(h *History) { h.Items[Item{7, 3}] = 1 }},
		{"an item 0 is run", promise, func(h *History) { h.Items[Item{7, 0}] = 1 }},
		{"a batch is run that no client made", promise, func(h *History) { h.Items[Item{9, 1}] = 1 }},
		{"a part has an item that is not run", promise, func(h *History) { h.BatchParts[0].Least = 0 }},
		{"a part has an item that is run twice", promise, func(h *History) { h.BatchParts[0].Most = 2 }},
		{"a part has failed", promise, func(h *History) { h.BatchParts[0].Outcome = "failed" }},
	})
	h := good()
	h.Items[Item{8, 1}] = 1 // made, and its client was not told
	if found := broken(h); len(found) > 0 {
		t.Errorf("a batch of whose commit the client was not told is reported: %v", found)
	}
}
