package api

import (
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"github.com/danielgtaylor/huma/v2"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
)

// scope is what a token must be good for. Operate includes read, and admin everything.
type scope string

const (
	push    scope = "push"    // put work in
	read    scope = "read"    // see everything
	operate scope = "operate" // pause, resume, retry, cancel, drain
	admin   scope = "admin"   // settings, and tokens themselves

	announce scope = "announce" // instances of models, for a time, by themselves
)

// included lists what each scope of a token is good for.
var included = map[string][]scope{
	"push": {push}, "read": {read}, "operate": {operate, read},
	"admin":    {admin, operate, read, push, announce},
	"announce": {announce},
}

// object is what an address is about, by which it is found whether it lies within the limits of a token: a kind of
// operator's, whose name or id is the parameter of the path that is given here, or one of the first two.
type object = operator.Object

const (
	ofNobody   object = ""         // every caller with the scope: about the caller, or filtered by allows
	ofPlatform object = "platform" // only tokens that are limited to nothing

	// A limited token must name these two, by {queue} and {model} or by the query parameters of those names.
	ofQueue = operator.ObjectQueue
	ofModel = operator.ObjectModel

	ofEntry     = operator.ObjectEntry     // {id}
	ofBatch     = operator.ObjectBatch     // {id}
	ofOperation = operator.ObjectOperation // {id}
	ofNode      = operator.ObjectNode      // {id}
	ofCron      = operator.ObjectCronJob   // {name}
)

var (
	errNoToken = errors.New("the request has no token, or one that is not known, has expired or was revoked; send " +
		"Authorization: Bearer and the token")
	errForbidden = errors.New("the token does not allow this")
	// One answer for what is beyond the limits of a token and for what does not exist: a difference would
	// tell what others have.
	errBeyondLimits = fmt.Errorf("%w: it is limited to some queues or applications, and nothing of that name or id "+
		"is within them", errForbidden)
)

// caller is the sender of a request.
type caller struct {
	operator.APIToken
	secret string // empty where no token is needed
}

type callerKey struct{}

// callerOf returns the caller of the request.
func callerOf(ctx context.Context) caller {
	c, _ := ctx.Value(callerKey{}).(caller) // the zero caller may nothing
	return c
}

func (c caller) may(s scope) bool {
	return slices.ContainsFunc(c.Scopes, func(has string) bool { return slices.Contains(included[has], s) })
}

// limited says whether the caller is let in to some queues or applications only.
func (c caller) limited() bool { return len(c.Queues)+len(c.Applications) > 0 }

// allows says whether the caller's limits include a queue. An empty queue means objects of the application.
func (c caller) allows(queue, application string) bool {
	return (len(c.Queues) == 0 || slices.Contains(c.Queues, queue)) &&
		(len(c.Applications) == 0 || slices.Contains(c.Applications, application))
}

// grants checks a push against the flows and the priority that the caller's token is limited to. An entry
// without a flow gets the token's flow where that has exactly one.
func (c caller) grants(p *invalidation.Push) error {
	if p.Flow == "" && len(c.Flows) == 1 {
		p.Flow = c.Flows[0]
	}
	if len(c.Flows) > 0 && !slices.Contains(c.Flows, p.Flow) {
		return fmt.Errorf("%w: flow: it may push for %s alone", errForbidden, strings.Join(c.Flows, ", "))
	}
	if c.PriorityMax != nil && p.Priority != nil && *p.Priority > *c.PriorityMax {
		return fmt.Errorf("%w: priority: it may ask for %d at most", errForbidden, *c.PriorityMax)
	}
	return nil
}

// admit finds the sender of a request and whether the request is allowed.
func (a *API) admit(ctx context.Context, request huma.Context, r route) (caller, error) {
	if r.scope == "" {
		return caller{}, nil
	}
	if a.cfg.Actor != "" {
		return caller{APIToken: operator.APIToken{Name: a.cfg.Actor, Scopes: []string{"admin"}}}, nil
	}
	if a.cfg.Open {
		return caller{APIToken: operator.APIToken{Name: "anybody", Scopes: []string{"admin"}}}, nil
	}
	kind, secret, _ := strings.Cut(request.Header("Authorization"), " ")
	if !strings.EqualFold(kind, "bearer") {
		return caller{}, errNoToken
	}
	secret = strings.TrimSpace(secret)
	token, err := a.tokens.authenticate(ctx, secret)
	if err != nil {
		return caller{}, err
	}
	c := caller{token, secret}
	may := c.may(r.scope)
	if !may && r.own && c.may(push) {
		if may, err = a.owns(ctx, request, c); err != nil {
			return caller{}, err
		}
	}
	if !may {
		return c, fmt.Errorf("%w: it needs scope %s and has %s", errForbidden, r.scope, strings.Join(c.Scopes, ", "))
	}
	return c, a.within(ctx, request, r.of, c)
}

// stillValid refuses a request that lasts beyond the life of its token. What goes on for long asks before each part.
func (a *API) stillValid(ctx context.Context) error {
	c := callerOf(ctx)
	if c.secret == "" {
		return nil
	}
	_, err := a.tokens.authenticate(ctx, c.secret)
	return err
}

// revoked says that the token of a request that goes on lets it in no more. A database that does not answer says
// nothing of the token.
func (a *API) revoked(ctx context.Context) bool {
	timed, cancel := context.WithTimeout(ctx, a.cfg.Timeout)
	defer cancel()
	return errors.Is(a.stillValid(timed), errNoToken)
}

// owns says whether the request is about an entry that the caller pushed, as the Idempotency-Key proves.
func (a *API) owns(ctx context.Context, request huma.Context, c caller) (bool, error) {
	given := request.Header("Idempotency-Key")
	id, err := strconv.ParseInt(request.Param("id"), 10, 64)
	if given == "" || err != nil {
		return false, nil //nolint:nilerr // a malformed id belongs to no application
	}
	key, err := idempotencyKey(http.Header{"Idempotency-Key": {given}})
	if err != nil {
		return false, err
	}
	flow := request.Query("flow")
	if flow == "" && len(c.Flows) == 1 {
		flow = c.Flows[0] // as the push did
	}
	if len(c.Flows) > 0 && !slices.Contains(c.Flows, flow) {
		return false, nil
	}
	return invalidation.PushedUnder(ctx, a.db, invalidation.EntryID(id), flow, key)
}

// within says whether what the request is about lies within the limits of the caller.
func (a *API) within(ctx context.Context, request huma.Context, of object, c caller) error {
	if !c.limited() || of == ofNobody {
		return nil
	}
	var key string
	switch of {
	case ofPlatform:
		return fmt.Errorf("%w: it is limited to some queues or applications, and this is about all of them",
			errForbidden)
	case ofQueue, ofModel:
		// Read as the handler reads it: a second way of reading could see another queue.
		if key = request.Param(string(of)); key == "" {
			key = request.Query(string(of))
		}
		if key == "" {
			return fmt.Errorf("%w: it is limited to some queues or applications; name one with ?%s=", errForbidden, of)
		}
	case ofCron:
		key = request.Param("name")
	default:
		key = request.Param("id")
		if _, err := strconv.ParseInt(key, 10, 64); err != nil {
			return fmt.Errorf("%w: %q is not an id", errInvalid, key)
		}
	}
	return a.allowed(ctx, of, key, c)
}

// allowed says whether an object lies within the limits of the caller.
func (a *API) allowed(ctx context.Context, of object, key string, c caller) error {
	queue, application, err := a.operator.Owner(ctx, of, key)
	missing := errors.Is(err, invalidation.ErrNotFound)
	switch {
	case err != nil && !missing:
		return err
	case missing && of == ofQueue && slices.Contains(c.Queues, key):
		return fmt.Errorf("%s %s: %w", of, key, invalidation.ErrQueueNotFound)
	case missing || !c.allows(queue, application):
		return errBeyondLimits
	}
	return nil
}

// FindToken returns the living token of a secret, as a request of the API would be admitted with it. It
// returns an error that wraps invalidation.ErrNotFound if there is none.
func (a *API) FindToken(ctx context.Context, secret string) (operator.APIToken, error) {
	token, err := a.tokens.authenticate(ctx, secret)
	if errors.Is(err, errNoToken) {
		err = fmt.Errorf("%w: %w", invalidation.ErrNotFound, err)
	}
	return token, err
}

const (
	tokenKept  = 5 * time.Second // so long a revoked token may still be let in
	tokensMax  = 10_000
	lookupsMax = 4 // lookups at once of secrets not seen before
)

// errLookups is not that of a context: it says nothing about the database.
var errLookups = errors.New("as many tokens as may be at once are being looked up")

// tokens remembers what was found for a few seconds, so that a request costs no round trip for it.
type tokens struct {
	find func(ctx context.Context, secret string) (operator.APIToken, error)
	// lookups keeps invented secrets from taking every connection to the database.
	lookups chan struct{}

	mu   sync.Mutex
	seen map[[sha256.Size]byte]seenToken
}

type seenToken struct {
	operator.APIToken
	until time.Time
}

// authenticate returns a living token, or errNoToken.
func (t *tokens) authenticate(ctx context.Context, secret string) (operator.APIToken, error) {
	if !operator.WellFormed(secret) {
		return operator.APIToken{}, errNoToken
	}
	key, now := sha256.Sum256([]byte(secret)), time.Now()
	t.mu.Lock()
	known, found := t.seen[key]
	t.mu.Unlock()
	if found && now.Before(known.until) {
		return known.APIToken, nil
	}
	if !found {
		select {
		case t.lookups <- struct{}{}:
			defer func() { <-t.lookups }()
		case <-ctx.Done():
			if errors.Is(ctx.Err(), context.Canceled) {
				return operator.APIToken{}, ctx.Err()
			}
			return operator.APIToken{}, errLookups
		}
	}
	token, err := t.find(ctx, secret)
	t.mu.Lock()
	defer t.mu.Unlock()
	switch {
	case errors.Is(err, invalidation.ErrNotFound), err == nil && !token.Live:
		delete(t.seen, key)
		return operator.APIToken{}, errNoToken
	case err != nil:
		return operator.APIToken{}, err
	case t.seen == nil || len(t.seen) >= tokensMax:
		t.seen = map[[sha256.Size]byte]seenToken{}
	}
	t.seen[key] = seenToken{token, now.Add(tokenKept)}
	return token, nil
}
