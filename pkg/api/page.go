package api

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
)

// paging is what every list takes.
type paging struct {
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

// pageOf makes a page of up to limit+1 rows: one more than wanted says that there is a next page. Key is what the next
// page begins behind.
func pageOf[T any](rows []T, p paging, key func(T) any) *answer[list[T]] {
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
func (p paging) after(key any) error {
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

// reasoned is the body of what changes behaviour and needs nothing but a reason.
type reasoned struct {
	Reason string `json:"reason" minLength:"1" maxLength:"1000" doc:"Why; it goes into the audit."`
}
