package main

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"net/http"
	"net/url"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/penstock/penstock/pkg/client"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
)

// conn is the connection to the API, which every command uses: over the network (server.go), or to a handler in this
// process that works on the database (local.go). Commands name the routes they call; the functions below call them.
type conn struct{ api *client.Client }

// refused is a problem document that the API answered. It wraps the error of the queue with that code.
type refused struct{ answer *client.Error }

// Error is the sentence of the answer, with the time after which the server takes the request, where it named one of
// more than the usual second.
func (r refused) Error() string {
	if r.answer.RetryAfter <= time.Second {
		return r.answer.Detail
	}
	return fmt.Sprintf("%s (again in %s)", r.answer.Detail, r.answer.RetryAfter)
}

func (r refused) Unwrap() []error {
	if is := sentinels[r.answer.Code]; is != nil {
		return []error{is, r.answer}
	}
	return []error{r.answer}
}

// sentinels is the table from the API's codes to the errors that exit codes are chosen by.
var sentinels = map[client.Code]error{
	client.QueueNotFound:       invalidation.ErrQueueNotFound,
	client.EntryNotFound:       invalidation.ErrEntryNotFound,
	"not_found":                invalidation.ErrNotFound,
	client.QueueFull:           invalidation.ErrQueueFull,
	client.NoInstance:          invalidation.ErrNoInstance,
	client.PayloadTooLarge:     invalidation.ErrPayloadTooLarge,
	"too_many_entries":         invalidation.ErrPayloadTooLarge,
	client.Invalid:             invalidation.ErrInvalid,
	"malformed":                invalidation.ErrInvalid,
	"not_json":                 invalidation.ErrInvalid,
	"not_gzip":                 invalidation.ErrInvalid,
	"encoded":                  invalidation.ErrInvalid,
	client.IdempotencyConflict: invalidation.ErrIdempotencyConflict,
	"idempotency_key_in_use":   invalidation.ErrState,
	client.StateConflict:       invalidation.ErrState,
	"precondition_failed":      invalidation.ErrState,
	"precondition_required":    invalidation.ErrState,
	"lock_lost":                invalidation.ErrState,
}

// problem matches errors that the API answered with one of these codes.
func problem(codes ...client.Code) func(error) bool {
	return func(err error) bool {
		var answer *client.Error
		return errors.As(err, &answer) && slices.Contains(codes, answer.Code)
	}
}

// do makes a call and reads the answer into a pointer, nil for none. The error of a change that may have been made all
// the same is an undecidedError.
func (c conn) do(ctx context.Context, call client.RawRequest, into any) error {
	err := c.ask(ctx, call, into)
	if call.Method != http.MethodGet && undecided(err) {
		return undecidedError{err}
	}
	return err
}

// ask is do for a call that changes nothing. An answer that is no problem document keeps the method and path in its
// error, since a proxy may have sent it.
func (c conn) ask(ctx context.Context, call client.RawRequest, into any) error {
	err := c.api.Do(ctx, call, into)
	var failed *localError
	if errors.As(err, &failed) {
		return failed.err
	}
	var answer *client.Error
	if errors.As(err, &answer) && answer.Code != "unknown" {
		return refused{answer}
	}
	return err
}

// get reads the answer of a route.
func get[T any](ctx context.Context, c conn, path string) (T, error) {
	var answer T
	err := c.do(ctx, client.RawRequest{Method: "GET", Path: path}, &answer)
	return answer, err
}

func (c conn) post(ctx context.Context, path string, in any) error {
	return c.do(ctx, client.RawRequest{Method: "POST", Path: path, In: in}, nil)
}

// posted is post to a route that has an answer.
func posted[T any](ctx context.Context, c conn, path string, in any) (T, error) {
	var answer T
	err := c.do(ctx, client.RawRequest{Method: "POST", Path: path, In: in}, &answer)
	return answer, err
}

// secretMade is the answer of a route that makes a secret, which cannot be read again; of the root secret of webhooks,
// the public key that comes from it.
type secretMade struct {
	Secret string `json:"secret"`
	Key    string `json:"key"`
}

// remove sends a DELETE, whose reason is a query parameter.
func (c conn) remove(ctx context.Context, path string, by invalidation.By, parameters ...any) error {
	path += query(append(parameters, "reason", by.Reason)...)
	return c.do(ctx, client.RawRequest{Method: "DELETE", Path: path}, nil)
}

// overwrite changes configuration whatever its current version is: If-Match is the star.
func (c conn) overwrite(ctx context.Context, method, path string, in any) error {
	return c.do(ctx, client.RawRequest{Method: method, Path: path, In: in, IfMatch: "*"}, nil)
}

// put creates configuration, or replaces it where it exists.
func (c conn) put(ctx context.Context, path string, in, into any) error {
	call := client.RawRequest{Method: "PUT", Path: path, In: in}
	err := c.do(ctx, call, into)
	if problem("precondition_required")(err) {
		call.IfMatch = "*"
		err = c.do(ctx, call, into)
	}
	return err
}

// listed is a page of a list.
type listed[T any] struct {
	Items []T    `json:"items"`
	Next  string `json:"next_cursor"`
}

// pageMax is how many rows the API returns in one answer.
const pageMax = 1000

// list reads pages until it has limit rows: operator.PageDefault if the limit is 0, operator.PageMax at most. It begins
// behind the key after, a zero value for the beginning. Filters are pairs as in query.
func list[T any](ctx context.Context, c conn, path string, limit int, after any, filters ...any) ([]T, error) {
	if limit <= 0 {
		limit = operator.PageDefault
	}
	return listUpTo[T](ctx, c, path, min(limit, operator.PageMax), after, filters...)
}

// listUpTo reads pages until it has limit rows, or the last one.
func listUpTo[T any](ctx context.Context, c conn, path string, limit int, after any, filters ...any) ([]T, error) {
	cursor := cursorBehind(after)
	var found []T
	for {
		parameters := slices.Concat(filters, []any{"limit", min(limit-len(found), pageMax), "cursor", cursor})
		next, err := get[listed[T]](ctx, c, path+query(parameters...))
		if err != nil {
			return nil, err
		}
		found, cursor = append(found, next.Items...), next.Next
		if cursor == "" || len(found) >= limit {
			return found, nil
		}
	}
}

// everything reads a whole list, page by page.
func everything[T any](ctx context.Context, c conn, path string, filters ...any) ([]T, error) {
	return listUpTo[T](ctx, c, path, math.MaxInt, "", filters...)
}

// allOf is everything of a route for a command whose arguments do not matter.
func allOf[T any](path string) func(context.Context, conn, []string) ([]T, error) {
	return func(ctx context.Context, api conn, _ []string) ([]T, error) { return everything[T](ctx, api, path) }
}

// How many rows the API returns of lists without pages.
const (
	causesMax  = 200
	samplesMax = 3000 // the newest
)

// unpaged reads a list that the API returns in one answer, and cuts it to limit rows.
func unpaged[T any](ctx context.Context, c conn, path string, limit int) ([]T, error) {
	found, err := get[listed[T]](ctx, c, path)
	if limit <= 0 {
		limit = operator.PageDefault
	}
	return found.Items[:min(limit, len(found.Items))], err
}

// cursorBehind is the cursor of a page that begins behind a key, in the API's encoding; empty for a zero key.
func cursorBehind(key any) string {
	if reflect.ValueOf(key).IsZero() {
		return ""
	}
	text, _ := json.Marshal(key) // numbers and texts
	return base64.RawURLEncoding.EncodeToString(text)
}

// query encodes pairs of name and value, without those of a zero value.
func query(pairs ...any) string {
	values := url.Values{}
	for i := 0; i+1 < len(pairs); i += 2 {
		if v := pairs[i+1]; !reflect.ValueOf(v).IsZero() {
			values.Set(fmt.Sprint(pairs[i]), fmt.Sprint(v))
		}
	}
	if len(values) == 0 {
		return ""
	}
	return "?" + values.Encode()
}

// at fills names and ids into a path, escaped.
func at(format string, segments ...any) string {
	escaped := make([]any, len(segments))
	for i, s := range segments {
		escaped[i] = segment(fmt.Sprint(s))
	}
	return fmt.Sprintf(format, escaped...)
}

// segment escapes a name for a segment of a path. Of a name of one or two dots the dots are escaped as well: servers
// would resolve such a segment (RFC 3986, 5.2.4).
func segment(name string) string {
	if name == "." || name == ".." {
		return strings.ReplaceAll(name, ".", "%2E")
	}
	return url.PathEscape(name)
}

// body is a request body with the reason and pairs of name and value, without nil values and zero moments.
func body(by invalidation.By, pairs ...any) map[string]any {
	fields := map[string]any{"reason": by.Reason}
	for i := 0; i+1 < len(pairs); i += 2 {
		v := reflect.ValueOf(pairs[i+1])
		switch v.Kind() {
		case reflect.Pointer, reflect.Map, reflect.Slice, reflect.Struct: // structs are moments
			if v.IsZero() {
				continue
			}
		}
		fields[fmt.Sprint(pairs[i])] = pairs[i+1]
	}
	return fields
}
