package main

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"reflect"
	"slices"
	"strings"
	"time"

	"github.com/penstock/penstock/pkg/client"
	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
)

// remote is the backend that goes through the HTTP API: each method is an address of pkg/api. Who acts is the token,
// so of a By only the reason is sent. The methods stand in remote_read.go, remote_entry.go and remote_change.go.
type remote struct{ api *client.Client }

var _ backend = remote{}

// remote reads what the flags say about the API. The token is never printed.
func (a *app) remote() (remote, error) {
	at, err := url.Parse(a.server)
	if err != nil || (at.Scheme != "http" && at.Scheme != "https") || at.Host == "" || at.User != nil {
		return remote{}, usagef("--server (PENSTOCK_SERVER) wants http://host:port or https://host:port")
	}
	if a.token != "" && a.tokenFile != "" {
		return remote{}, usagef("give --token or --token-file, not both")
	}
	token := a.token
	switch {
	case a.tokenFile != "":
		text, err := os.ReadFile(a.tokenFile)
		if err != nil {
			return remote{}, fmt.Errorf("read token: %w", err)
		}
		token = string(text)
	case token == "":
		token = a.env("PENSTOCK_TOKEN")
	}
	if token = strings.TrimSpace(token); strings.ContainsFunc(token, func(c rune) bool { return c <= ' ' || c > '~' }) {
		return remote{}, usagef("the token has characters that no token has; it begins with pst_")
	}
	transport, err := a.transport()
	if err != nil {
		return remote{}, err
	}
	return remote{client.New(client.Config{
		URL: a.server, Token: token,
		// A change that was sent elsewhere would arrive there as a GET, and look as if it were done.
		HTTP: &http.Client{Transport: transport, Timeout: a.timeout, CheckRedirect: func(*http.Request, []*http.Request) error { return http.ErrUseLastResponse }},
		// A person waits: what does not pass within seconds is said.
		Tries: 3, WaitMax: 2 * time.Second,
	})}, nil
}

// transport trusts and shows the certificates that the flags name, else the environment.
func (a *app) transport() (*http.Transport, error) {
	transport := http.DefaultTransport.(*http.Transport).Clone() //nolint:errcheck,forcetypeassert // it is one
	transport.TLSClientConfig = &tls.Config{MinVersion: tls.VersionTLS12}
	if file := cmp.Or(a.caFile, a.env("PENSTOCK_CA_FILE")); file != "" {
		text, err := os.ReadFile(file)
		if err != nil {
			return nil, usagef("--ca-file: %w", err)
		}
		roots := x509.NewCertPool()
		if !roots.AppendCertsFromPEM(text) {
			return nil, usagef("--ca-file: %s has no certificate (PEM)", file)
		}
		transport.TLSClientConfig.RootCAs = roots
	}
	cert, key := cmp.Or(a.certFile, a.env("PENSTOCK_CERT_FILE")), cmp.Or(a.keyFile, a.env("PENSTOCK_KEY_FILE"))
	switch {
	case cert == "" && key == "":
		return transport, nil
	case cert == "" || key == "":
		return nil, usagef("--cert-file and --key-file go together")
	}
	pair, err := tls.LoadX509KeyPair(cert, key)
	if err != nil {
		return nil, usagef("--cert-file and --key-file: %w", err)
	}
	transport.TLSClientConfig.Certificates = []tls.Certificate{pair}
	return transport, nil
}

// refused is a problem that the API answered. It stands for the error of the queue that the database would have given,
// and says it in the same words.
type refused struct{ answer *client.Error }

func (r refused) Error() string { return r.answer.Detail }

func (r refused) Unwrap() []error {
	if is := standsFor[r.answer.Code]; is != nil {
		return []error{is, r.answer}
	}
	return []error{r.answer}
}

var standsFor = map[client.Code]error{
	client.QueueNotFound: invalidation.ErrQueueNotFound, client.EntryNotFound: invalidation.ErrEntryNotFound, "not_found": invalidation.ErrNotFound,
	client.QueueFull: invalidation.ErrQueueFull, client.PayloadTooLarge: invalidation.ErrPayloadTooLarge, "too_many_entries": invalidation.ErrPayloadTooLarge,
	client.Invalid: invalidation.ErrInvalid, "malformed": invalidation.ErrInvalid, "not_json": invalidation.ErrInvalid,
	client.IdempotencyConflict: invalidation.ErrIdempotencyConflict, "idempotency_key_in_use": invalidation.ErrState,
	client.StateConflict: invalidation.ErrState, "precondition_failed": invalidation.ErrState,
}

// problem says whether the API answered one of these codes.
func problem(codes ...client.Code) func(error) bool {
	return func(err error) bool {
		var answer *client.Error
		return errors.As(err, &answer) && slices.Contains(codes, answer.Code)
	}
}

// do makes a call. What did not come from Penstock keeps its status and address.
func (r remote) do(ctx context.Context, c client.Call, into any) error {
	err := r.api.Do(ctx, c, into)
	var answer *client.Error
	if errors.As(err, &answer) && answer.Code != "unknown" {
		return refused{answer}
	}
	return err
}

// read gets the answer of an address.
func read[T any](ctx context.Context, r remote, path string) (T, error) {
	var answer T
	err := r.do(ctx, client.Call{Method: "GET", Path: path}, &answer)
	return answer, err
}

func (r remote) post(ctx context.Context, path string, in, into any) error {
	return r.do(ctx, client.Call{Method: "POST", Path: path, In: in}, into)
}

// change changes what is there whoever changed it before, as the database does: hence the star.
func (r remote) change(ctx context.Context, method, path string, in any) error {
	return r.do(ctx, client.Call{Method: method, Path: path, In: in, IfMatch: "*"}, nil)
}

// put makes something, or changes it if it is there already.
func (r remote) put(ctx context.Context, path string, in, into any) error {
	c := client.Call{Method: "PUT", Path: path, In: in}
	err := r.do(ctx, c, into)
	if problem("precondition_required")(err) {
		c.IfMatch = "*"
		err = r.do(ctx, c, into)
	}
	return err
}

// listed is a page of a list.
type listed[T any] struct {
	Items []T    `json:"items"`
	Next  string `json:"next_cursor"`
}

// pageMax is how many rows the API gives at once.
const pageMax = 1000

// list follows the cursor until it has limit rows, counted as operator does. Conditions are pairs as in query.
func list[T any](ctx context.Context, r remote, path string, limit int, cursor string, conditions ...any) ([]T, error) {
	if limit <= 0 {
		limit = operator.PageDefault
	}
	limit = min(limit, operator.PageMax)
	var found []T
	for {
		where := query(slices.Concat(conditions, []any{"limit", min(limit-len(found), pageMax), "cursor", cursor})...)
		next, err := read[listed[T]](ctx, r, path+where)
		if err != nil {
			return nil, err
		}
		found, cursor = append(found, next.Items...), next.Next
		if cursor == "" || len(found) >= limit {
			return found, nil
		}
	}
}

// some is a list that the API gives whole.
func some[T any](ctx context.Context, r remote, path string, limit int) ([]T, error) {
	found, err := read[listed[T]](ctx, r, path)
	if limit <= 0 {
		limit = operator.PageDefault
	}
	return found.Items[:min(limit, len(found.Items))], err
}

// behind is the cursor of a page that begins behind a key, as pkg/api writes cursors; none for a zero key.
func behind(key any) string {
	if reflect.ValueOf(key).IsZero() {
		return ""
	}
	text, _ := json.Marshal(key) // numbers and texts
	return base64.RawURLEncoding.EncodeToString(text)
}

// query writes pairs of name and value; those of a zero value are left out.
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

// address fills in names and numbers as segments of a path.
func address(format string, segments ...any) string {
	escaped := make([]any, len(segments))
	for i, s := range segments {
		escaped[i] = url.PathEscape(fmt.Sprint(s))
	}
	return fmt.Sprintf(format, escaped...)
}

// because is a body with the reason and pairs of name and value; nil and zero times are left out.
func because(by invalidation.By, pairs ...any) map[string]any {
	body := map[string]any{"reason": by.Reason}
	for i := 0; i+1 < len(pairs); i += 2 {
		v := reflect.ValueOf(pairs[i+1])
		switch v.Kind() {
		case reflect.Pointer, reflect.Map, reflect.Slice, reflect.Struct: // structs are times
			if v.IsZero() {
				continue
			}
		}
		body[fmt.Sprint(pairs[i])] = pairs[i+1]
	}
	return body
}
