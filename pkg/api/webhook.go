package api

import (
	"context"
	"fmt"
	"net/http"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
	"github.com/penstock/penstock/pkg/operator"
)

// Webhooks changes the receivers of callbacks, and reads their secrets. Methods that seal or open secrets return an
// error that wraps invalidation.ErrState where the program has no key for it, and invalidation.ErrInvalid for an
// address that callbacks may not go to.
type Webhooks interface {
	// Register makes a receiver known, or enables it again, and returns its secret.
	Register(ctx context.Context, url string, by invalidation.By) (secret string, err error)
	// Rotate gives a receiver a new secret and returns it; the old one signs as well during overlap. Without url it
	// renews the root secret and returns the public key that comes from it.
	Rotate(ctx context.Context, url string, overlap time.Duration, by invalidation.By) (secret string, err error)
	// Disable ends deliveries to a receiver until it is registered again.
	Disable(ctx context.Context, url string, by invalidation.By) error
	// Secrets returns the secrets that sign for a receiver, the newest first.
	Secrets(ctx context.Context, url string) ([]string, error)
	// Keys returns the public keys with which every receiver can verify, the newest first.
	Keys(ctx context.Context) ([]string, error)
}

type webhookChange struct {
	Body struct {
		ReasonBody
		URL string `json:"url" minLength:"1" maxLength:"2048"`
	}
}

type webhookRotation struct {
	Body struct {
		ReasonBody
		URL            *string  `json:"url,omitempty" minLength:"1" maxLength:"2048" doc:"Absent: the root secret."`
		OverlapSeconds *float64 `json:"overlap_seconds,omitempty" minimum:"0" maximum:"31536000" doc:"How long the old secret signs as well; a day if absent."`
	}
}

type webhookSecrets struct {
	Secrets []string `json:"secrets" nullable:"false" doc:"whsec_ and base64; the newest first."`
}

type webhookKeys struct {
	Keys []string `json:"keys" nullable:"false" doc:"whpk_ and base64, as Standard Webhooks has them; the newest first."`
}

func (a *API) webhookRoutes() {
	const all = "/v1/webhooks"
	add(a, route{
		method: "GET", path: all, id: "list-webhooks", scope: read, of: ofPlatform,
		summary: "Receivers of callbacks that were registered or disabled, without their secrets",
	}, func(ctx context.Context, in *Paging) (*answer[list[operator.Receiver]], error) {
		return paged(*in, func(after string, limit int) ([]operator.Receiver, error) {
			return a.operator.Receivers(ctx, after, limit)
		}, func(r operator.Receiver) string { return r.URL })
	})
	add(a, route{
		method: "GET", path: all + "/keys", id: "list-webhook-keys", scope: read, of: ofPlatform,
		summary: "Public keys with which every receiver can verify signatures of version v1a",
	}, func(ctx context.Context, _ *struct{}) (*answer[webhookKeys], error) {
		keeper, err := a.webhooks()
		if err != nil {
			return nil, err
		}
		keys, err := keeper.Keys(ctx)
		return answered(webhookKeys{keys}, err)
	})
	add(a, route{
		method: "GET", path: all + "/secrets", id: "list-webhook-secrets", scope: admin, of: ofPlatform,
		summary: "Secrets that sign for a receiver: its own, or those derived for its scheme, host and port",
	}, func(ctx context.Context, in *struct {
		URL string `query:"url" required:"true" minLength:"1" maxLength:"2048"`
	},
	) (*answer[webhookSecrets], error) {
		keeper, err := a.webhooks()
		if err != nil {
			return nil, err
		}
		secrets, err := keeper.Secrets(ctx, in.URL)
		return answered(webhookSecrets{secrets}, err)
	})
	add(a, route{
		method: "POST", path: all, id: "register-webhook", scope: admin, of: ofPlatform, status: http.StatusCreated,
		summary: "Give a receiver a secret of its own, or enable it again; the answer has its secret",
	}, func(ctx context.Context, in *webhookChange) (*answer[webhookSecret], error) {
		keeper, err := a.webhooks()
		if err != nil {
			return nil, err
		}
		secret, err := keeper.Register(ctx, in.Body.URL, in.Body.by(ctx))
		return answered(webhookSecret{Secret: secret}, err)
	})
	add(a, route{
		method: "POST", path: all + "/rotate", id: "rotate-webhook", scope: admin, of: ofPlatform,
		status:  http.StatusCreated,
		summary: "Give a receiver a new secret; the old one signs as well during the overlap",
	}, a.rotateWebhook)
	change(a, route{
		path: all + "/disable", id: "disable-webhook", scope: admin, of: ofPlatform,
		summary: "Disable a receiver until it is registered again",
	}, func(ctx context.Context, in *webhookChange) error {
		keeper, err := a.webhooks()
		if err != nil {
			return err
		}
		return keeper.Disable(ctx, in.Body.URL, in.Body.by(ctx))
	})
}

type webhookSecret struct {
	Secret string `json:"secret,omitempty" doc:"whsec_ and base64, for the receiver alone."`
	Key    string `json:"key,omitempty" doc:"Of the root secret: the public key, whpk_ and base64."`
}

func (a *API) rotateWebhook(ctx context.Context, in *webhookRotation) (*answer[webhookSecret], error) {
	overlap := 24 * time.Hour
	if given := in.Body.OverlapSeconds; given != nil {
		overlap = time.Duration(*given * float64(time.Second))
	}
	keeper, err := a.webhooks()
	if err != nil {
		return nil, err
	}
	if in.Body.URL == nil {
		text, err := keeper.Rotate(ctx, "", overlap, in.Body.by(ctx))
		return answered(webhookSecret{Key: text}, err)
	}
	text, err := keeper.Rotate(ctx, *in.Body.URL, overlap, in.Body.by(ctx))
	return answered(webhookSecret{Secret: text}, err)
}

func (a *API) webhooks() (Webhooks, error) {
	if a.cfg.Webhooks == nil {
		return nil, fmt.Errorf("this server keeps no receivers of callbacks: %w", invalidation.ErrState)
	}
	return a.cfg.Webhooks, nil
}
