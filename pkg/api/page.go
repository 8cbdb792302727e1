package api

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
)

// Paging has the parameters of every list.
type Paging struct {
	Limit  int    `query:"limit" minimum:"1" maximum:"1000" default:"50" doc:"How many, at most."`
	Cursor string `query:"cursor" maxLength:"2000" doc:"The next_cursor of the page before."`
}

// list is a page of a list.
type list[T any] struct {
	Items []T `json:"items" nullable:"false"`
	// NextCursor is empty on the last page.
	NextCursor string `json:"next_cursor,omitempty" doc:"Asks for the next page; absent on the last one."`
}

// answer is a body and nothing else.
type answer[T any] struct{ Body T }

// answered makes an answer of what a function returns.
func answered[T any](body T, err error) (*answer[T], error) { return &answer[T]{body}, err }

// pageOf makes a page of up to limit+1 rows: one more than wanted says that there is a next page. Key is what the next
// page begins behind.
func pageOf[T any](rows []T, p Paging, key func(T) any) *answer[list[T]] {
	page := list[T]{Items: rows}
	if len(rows) > p.Limit {
		page.Items = rows[:p.Limit]
		text, _ := json.Marshal(key(page.Items[p.Limit-1])) // keys are numbers, texts and lists of them
		page.NextCursor = base64.RawURLEncoding.EncodeToString(text)
	}
	if page.Items == nil {
		page.Items = []T{}
	}
	return &answer[list[T]]{page}
}

// after reads the key of a cursor; without one it leaves key as it is.
func (p Paging) after(key any) error {
	if p.Cursor == "" {
		return nil
	}
	text, err := base64.RawURLEncoding.DecodeString(p.Cursor)
	if err == nil {
		err = json.Unmarshal(text, key)
	}
	if err != nil {
		return fmt.Errorf("%w: cursor was not given out for this list", errInvalid)
	}
	return nil
}

// paged reads a page: read returns rows behind a key, a row more than a page has, and key is that of a row.
func paged[K, T any](p Paging, read func(after K, limit int) ([]T, error), key func(T) K) (*answer[list[T]], error) {
	var after K
	if err := p.after(&after); err != nil {
		return nil, err
	}
	found, err := read(after, p.Limit+1)
	return pageOf(found, p, func(row T) any { return key(row) }), err
}

// limitedAtOnce is how many rows are read at once for a caller that may see some of them alone.
const limitedAtOnce = 1000

// pagedAllowed is paged for a list of which a caller that is limited sees some rows alone: those that are allowed.
func pagedAllowed[K, T any](
	c caller, p Paging, read func(after K, limit int) ([]T, error), key func(T) K, allows func(T) bool,
) (*answer[list[T]], error) {
	return paged(p, func(after K, limit int) (allowed []T, err error) {
		atOnce := limit
		if c.limited() { // it may see few of them
			atOnce = max(limit, limitedAtOnce)
		}
		for len(allowed) < limit {
			found, err := read(after, atOnce)
			if err != nil {
				return nil, err
			}
			for _, row := range found {
				if after = key(row); allows(row) {
					allowed = append(allowed, row)
				}
			}
			if len(found) < atOnce {
				break
			}
		}
		return allowed, nil
	}, key)
}

// pageFrom makes a page of a whole list, if it could be read, in the order of its keys: for what there is little of.
func pageFrom[T any](rows []T, err error, p Paging, key func(T) string) (*answer[list[T]], error) {
	if err != nil {
		return nil, err
	}
	var after string
	if err := p.after(&after); err != nil {
		return nil, err
	}
	slices.SortFunc(rows, func(x, y T) int { return strings.Compare(key(x), key(y)) })
	if p.Cursor != "" {
		rows = slices.DeleteFunc(rows, func(row T) bool { return key(row) <= after })
	}
	return pageOf(rows, p, func(row T) any { return key(row) }), nil
}
