package api

import (
	"context"
	"errors"
	"net/http"
	"time"

	"github.com/penstock/penstock/pkg/operator"
)

func (a *API) tokenRoutes() {
	const one = "/v1/tokens/{name}"
	add(a, route{
		method: "GET", path: "/v1/tokens", id: "list-tokens", summary: "API tokens by name, without their secrets",
		scope: admin, of: ofPlatform,
	}, func(ctx context.Context, in *Paging) (*answer[list[operator.APIToken]], error) {
		return paged(*in, func(after operator.TokenKey, limit int) ([]operator.APIToken, error) {
			return a.operator.Tokens(ctx, after, limit)
		}, func(t operator.APIToken) operator.TokenKey { return operator.TokenKey{Name: t.Name, ID: t.ID} })
	})
	add(a, route{
		method: "POST", path: "/v1/tokens", id: "create-token",
		summary: "Make a token; the answer alone has its secret",
		scope:   admin, of: ofPlatform, status: http.StatusCreated,
	}, a.createToken)
	add(a, route{
		method: "POST", path: one + "/rotate", id: "rotate-token",
		summary: "Make a new secret; the old ones end after the overlap",
		scope:   admin, of: ofPlatform, status: http.StatusCreated,
	}, a.rotateToken)
	change(a, route{
		path: one + "/revoke", id: "revoke-token", summary: "End all tokens of a name, within seconds",
		scope: admin, of: ofPlatform,
	}, func(ctx context.Context, in *nameVerb) error {
		return a.operator.RevokeToken(ctx, in.Name, in.by(ctx))
	})
}

type tokenCreation struct {
	Body struct {
		ReasonBody
		Name         string   `json:"name" minLength:"1" maxLength:"63"`
		Scopes       []string `json:"scopes" minItems:"1" nullable:"false" enum:"push,read,operate,admin,call,announce"`
		Applications []string `json:"applications,omitempty" nullable:"false" doc:"To limit it to these."`
		Queues       []string `json:"queues,omitempty" nullable:"false" doc:"To limit it to these."`
		Flows        []string `json:"flows,omitempty" nullable:"false" doc:"To limit its pushes to these flows. A push without a flow gets the only one. Not with scopes operate and admin."`
		PriorityMax  *int16   `json:"priority_max,omitempty" minimum:"0" maximum:"9" doc:"The highest priority that its pushes may ask for. Not with scopes operate and admin."`
		Rate         *float64 `json:"rate,omitempty" exclusiveMinimum:"0" maximum:"1e9" doc:"Entries a second, at each leader and gateway. Not with scopes operate and admin."`
		Burst        *int32   `json:"burst,omitempty" minimum:"1" doc:"Entries at once, with rate; absent: those of a second."`
		GPUMS        *int64   `json:"gpu_ms,omitempty" minimum:"1" doc:"GPU milliseconds of its flows in a period."`
		GPUPeriod    *string  `json:"gpu_period,omitempty" enum:"hour,day" doc:"Of gpu_ms, by UTC."`
		ExpiresAt    Moment   `json:"expires_at,omitzero" doc:"A time, or a duration from now such as 2160h. Absent: after the server's default lifetime of tokens, a year unless it is configured."`
		NeverExpires bool     `json:"never_expires,omitempty" doc:"In place of expires_at."`
	}
}

type secret struct {
	Secret string `json:"secret" doc:"Send it as Authorization: Bearer. It cannot be read again."`
}

func (a *API) createToken(ctx context.Context, in *tokenCreation) (*answer[secret], error) {
	b := in.Body
	g := operator.Grant{
		Name: b.Name, Scopes: b.Scopes, Applications: b.Applications, Queues: b.Queues,
		Flows: b.Flows, PriorityMax: b.PriorityMax, Rate: b.Rate, Burst: b.Burst, GPUMS: b.GPUMS,
		GPUPeriod: b.GPUPeriod,
	}
	var err error
	if g.ExpiresAt, err = a.operator.At(ctx, b.ExpiresAt.Moment); err != nil {
		return nil, err
	}
	switch {
	case b.NeverExpires && !b.ExpiresAt.IsZero():
		return nil, flaw("never_expires", errors.New("expires_at is given as well; give one of them"))
	case !b.NeverExpires && b.ExpiresAt.IsZero() && a.cfg.TokenLifetime > 0:
		g.Lifetime = a.cfg.TokenLifetime
	}
	text, err := a.operator.CreateToken(ctx, g, b.by(ctx))
	return answered(secret{text}, err)
}

type tokenRotation struct {
	InName
	Body struct {
		ReasonBody
		OverlapSeconds float64 `json:"overlap_seconds" minimum:"0" maximum:"31536000" doc:"How long the old secrets stay good."`
		ExpiresAt      Moment  `json:"expires_at,omitzero" doc:"Of the new one: a time, or a duration from now such as 2160h; absent: it lasts as long as the one before was to."`
	}
}

func (a *API) rotateToken(ctx context.Context, in *tokenRotation) (*answer[secret], error) {
	overlap := time.Duration(in.Body.OverlapSeconds * float64(time.Second))
	expires, err := a.operator.At(ctx, in.Body.ExpiresAt.Moment)
	if err != nil {
		return nil, err
	}
	text, err := a.operator.RotateToken(ctx, in.Name, overlap, expires, in.Body.by(ctx))
	return answered(secret{text}, err)
}
