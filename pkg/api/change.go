package api

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net/http"
	"strings"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
)

// The types that others embed are exported because huma sees no others.

// change registers a POST that needs a reason and answers with nothing.
func change[I any](a *API, r route, do func(ctx context.Context, in *I) error) {
	r.method = cmp.Or(r.method, "POST")
	r.status = cmp.Or(r.status, http.StatusNoContent)
	add(a, r, func(ctx context.Context, in *I) (*struct{}, error) { return nil, do(ctx, in) })
}

// paused is the answer of a pause: with nothing, or with the pause that was in force before.
type paused struct {
	Status int
	Body   *pauseReplaced
}

type pauseReplaced struct {
	Replaced *operator.Replaced `json:"replaced" doc:"The pause that was in force, and is no more."`
}

// pausing registers a POST that pauses, and so needs a reason.
func pausing[I any](a *API, r route, do func(ctx context.Context, in *I) (*operator.Replaced, error)) {
	r.method, r.mayBeNil = "POST", true
	add(a, r, func(ctx context.Context, in *I) (*paused, error) {
		replaced, err := do(ctx, in)
		if err != nil || replaced == nil {
			return &paused{Status: http.StatusNoContent}, err
		}
		return &paused{http.StatusOK, &pauseReplaced{replaced}}, nil
	})
}

// ReasonBody is the part of the body of a change that gives the reason.
type ReasonBody struct {
	Reason string `json:"reason" minLength:"1" maxLength:"1000" doc:"Why; it goes into the audit."`
}

// by returns the actor and the reason of a change, for the audit.
func (r ReasonBody) by(ctx context.Context) invalidation.By {
	return invalidation.By{Actor: callerOf(ctx).Name, Reason: r.Reason}
}

// ReasonQuery is the same in the address, for DELETE.
type ReasonQuery struct {
	Reason string `query:"reason" required:"true" minLength:"1" maxLength:"1000" doc:"Why; it goes into the audit."`
}

func (q ReasonQuery) by(ctx context.Context) invalidation.By { return ReasonBody(q).by(ctx) }

// Reasoned is the body of a request that needs nothing but a reason.
type Reasoned struct{ Body ReasonBody }

func (r Reasoned) by(ctx context.Context) invalidation.By { return r.Body.by(ctx) }

// Pausing is the body of a pause.
type Pausing struct{ Body UntilBody }

func (p Pausing) by(ctx context.Context) invalidation.By { return p.Body.by(ctx) }
func (p Pausing) until() operator.Moment                 { return p.Body.Until.Moment }

// UntilBody is the body of a pause.
type UntilBody struct {
	ReasonBody
	Until Moment `json:"until,omitzero" doc:"When it ends by itself: a time, or a duration from now such as 30m. Absent: when it is ended."`
}

// What verbs take: the name or id of a thing, a reason, and perhaps a time.
type (
	queueVerb struct {
		InQueue
		Reasoned
	}
	queuePause struct {
		InQueue
		Pausing
	}
	idVerb struct {
		InID
		Reasoned
	}
	idPause struct {
		InID
		Pausing
	}
	nameVerb struct {
		InName
		Reasoned
	}
	namePause struct {
		InName
		Pausing
	}
	nameRemoval struct {
		InName
		ReasonQuery
	}
	modelRemoval struct {
		InModel
		ReasonQuery
	}
)

func (in InQueue) thing() any { return in.Queue }
func (in InID) thing() any    { return in.ID }
func (in InName) thing() any  { return in.Name }
func (in InModel) thing() any { return in.Model }

// verb registers an address where one of operator's verbs is done.
func verb[I interface {
	thing() any
	by(context.Context) invalidation.By
}](a *API, v operator.Verb, r route) {
	change(a, r, func(ctx context.Context, in *I) error {
		_, err := a.operator.Do(ctx, v, (*in).thing(), (*in).by(ctx), time.Time{})
		return err
	})
}

// pauseVerb is verb for those that pause.
func pauseVerb[I interface {
	thing() any
	by(context.Context) invalidation.By
	until() operator.Moment
}](a *API, v operator.Verb, r route) {
	pausing(a, r, func(ctx context.Context, in *I) (*operator.Replaced, error) {
		until, err := a.operator.At(ctx, (*in).until())
		if err != nil {
			return nil, err
		}
		return a.operator.Do(ctx, v, (*in).thing(), (*in).by(ctx), until)
	})
}

// settingsBody is the body of a change of settings.
type settingsBody struct {
	ReasonBody
	Settings map[string]any `json:"settings" doc:"Those to change; null takes one away."`
}

var (
	errUnconditional = errors.New("send If-Match with the ETag that was read, so that no change is lost")
	errChanged       = errors.New("it has changed since; read it again")
)

// Conditional has the headers of changes of configuration.
type Conditional struct {
	IfMatch string `header:"If-Match" doc:"The ETag that was read. What exists cannot be changed without."`
}

// tagged is configuration and the ETag that a change of it must name.
type tagged[T any] struct {
	ETag string `header:"ETag"`
	Body T
}

// etag is that of configuration, which is JSON as the database writes it: always in the same way.
func etag(configuration ...[]byte) string {
	hash := sha256.New()
	for _, part := range configuration {
		fmt.Fprintf(hash, "%d:%s", len(part), part)
	}
	return `"` + hex.EncodeToString(hash.Sum(nil)[:12]) + `"`
}

// check compares with the ETag of what is there. A weak tag counts: proxies that compress an answer make one of ours,
// which is the hash of the configuration itself.
func (c Conditional) check(current string) error {
	if c.IfMatch == "" {
		return errUnconditional
	}
	for tag := range strings.SplitSeq(c.IfMatch, ",") {
		if tag = strings.TrimPrefix(strings.TrimSpace(tag), "W/"); tag == "*" || tag == current {
			return nil
		}
	}
	return errChanged
}

// alter makes a change of configuration that depends on the present one, whose ETag current returns. Other changes of
// the same wait. Where there is no such object yet, nothing has to match.
func (a *API) alter(ctx context.Context, c Conditional, of object, key string,
	current func(*operator.Database) (string, error), do func(*operator.Database) error,
) error {
	return a.operator.Locked(ctx, of, key, func(d *operator.Database, exists bool) error {
		if exists {
			now, err := current(d)
			if err != nil {
				return err
			}
			if err := c.check(now); err != nil {
				return err
			}
		} else if c.IfMatch != "" {
			return fmt.Errorf("there is no %s; to make it, send no If-Match: %w", key, invalidation.ErrNotFound)
		}
		return do(d)
	})
}
