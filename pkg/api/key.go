package api

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// errKeyInUse says that a request with the same Idempotency-Key is still under way.
var errKeyInUse = errors.New("a request with this Idempotency-Key is under way; try again")

// keyBytesMax leaves room for the number of an entry behind the key of a request.
const keyBytesMax = 480

// idempotencyKey reads the header, empty if there is none: a string in quotes, as its draft standard has it
// (draft-ietf-httpapi-idempotency-key-header, RFC 9651 section 3.3.3), or the same without quotes.
func idempotencyKey(h http.Header) (string, error) {
	values := h.Values("Idempotency-Key")
	if len(values) == 0 {
		return "", nil
	}
	key := strings.TrimSpace(values[0])
	if quoted := strings.HasPrefix(key, `"`); quoted {
		var err error
		if key, err = unquote(key); err != nil {
			return "", err
		}
	}
	switch {
	case len(values) > 1:
		return "", fmt.Errorf("%w: there is more than one Idempotency-Key", errMalformed)
	case key == "" || len(key) > keyBytesMax:
		return "", fmt.Errorf("%w: Idempotency-Key is empty or longer than %d bytes", errMalformed, keyBytesMax)
	case strings.ContainsFunc(key, func(r rune) bool { return r < ' ' || r > '~' }):
		return "", fmt.Errorf("%w: Idempotency-Key has something else than printable ASCII in it", errMalformed)
	}
	return key, nil
}

// unquote takes the quotes and escapes from a structured string.
func unquote(s string) (string, error) {
	var b strings.Builder
	for i := 1; i < len(s); i++ {
		switch {
		case s[i] == '"' && i == len(s)-1:
			return b.String(), nil
		case s[i] == '\\' && i+2 < len(s) && (s[i+1] == '"' || s[i+1] == '\\'):
			i++
		case s[i] == '"' || s[i] == '\\':
			return "", fmt.Errorf("%w: Idempotency-Key is not a string in quotes", errMalformed)
		}
		b.WriteByte(s[i])
	}
	return "", fmt.Errorf("%w: Idempotency-Key lacks its closing quote", errMalformed)
}

// keyPatience is how long a request waits for another one with its key. Most are over by then, and it can replay.
const keyPatience = time.Second

// Pool completes the settings of a pool on which an API is to run. A push that waits for another one with its
// key, at another leader, ends after a while: that one is under way, and this one may replay it later. So
// does any other wait for a lock.
func Pool(cfg postgres.Config) postgres.Config {
	cfg.LockTimeout = 2 * keyPatience
	return cfg
}

// inUse says what pushes waited for in vain: another request with their Idempotency-Key, if they have one,
// else a transaction with their unique key.
func inUse(err error, pushes ...invalidation.Push) error {
	switch keyed := func(p invalidation.Push) bool { return p.IdempotencyKey != "" }; {
	case postgres.Code(err) != postgres.LockNotAvailable:
		return err
	case slices.ContainsFunc(pushes, keyed):
		return fmt.Errorf("%w: %w", errKeyInUse, err)
	default:
		return fmt.Errorf("%w: %w", errTimeout, err)
	}
}

// flight is an Idempotency-Key where it counts: keys of two flows have nothing to do with each other.
type flight struct{ queue, flow, key string }

// flights are the requests with an Idempotency-Key that are under way in this process. It is the database that accepts
// an entry of a key once; this spares two streams of one key from being pushed side by side.
type flights struct {
	mu    sync.Mutex
	under map[flight]chan struct{} // closed when the request has been answered
}

// enter registers a request under its keys, which must be in order. Where another request has one of them, it waits
// until that has been answered, after which this one will be a replay; for keyPatience at most: errKeyInUse then.
func (f *flights) enter(ctx context.Context, keys ...flight) (leave func(), err error) {
	ctx, cancel := context.WithTimeoutCause(ctx, keyPatience, errKeyInUse)
	defer cancel()
	landed := make(chan struct{})
	var ours []flight
	leave = func() {
		f.mu.Lock()
		for _, key := range ours {
			delete(f.under, key)
		}
		f.mu.Unlock()
		close(landed)
	}
	for _, key := range keys {
		other := f.register(key, landed)
		if other == nil {
			ours = append(ours, key)
			continue
		}
		select {
		case <-other:
		case <-ctx.Done():
			leave()
			return nil, context.Cause(ctx)
		}
	}
	return leave, nil
}

// register returns what another request with the key closes when it has been answered; nil: there is none, and the key
// is registered.
func (f *flights) register(key flight, landed chan struct{}) (other chan struct{}) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if other, taken := f.under[key]; taken {
		return other
	}
	if f.under == nil {
		f.under = map[flight]chan struct{}{}
	}
	f.under[key] = landed
	return nil
}
