package postgres

import "fmt"

// pagesOfStep is how many pages of a table a statement reads: some thousand rows.
const pagesOfStep = 64

// PageWalk reads a large table a part at a time, again and again: what one statement reads does not grow with the
// table. The zero value begins at the first page.
type PageWalk struct{ from int64 }

// Range returns the bounds of the next step, as texts of the type tid: rows from first to before end.
func (w *PageWalk) Range() (first, end string) {
	tid := func(page int64) string { return fmt.Sprintf("(%d,0)", page) }
	return tid(w.from), tid(w.from + pagesOfStep)
}

// Next moves behind the pages of the step. It is false if these were the last of the table, which has so many pages:
// the walk is at the first page again.
func (w *PageWalk) Next(pages int64) bool {
	if w.from += pagesOfStep; w.from >= pages {
		w.from = 0
	}
	return w.from > 0
}

// Skip moves behind the pages of a step that was not carried out.
func (w *PageWalk) Skip() { w.from += pagesOfStep }
