package webhook

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
)

// Endpoint is an address that callbacks go to, as registered.
type Endpoint struct {
	Secrets  []Secret // its own, or those of the installation; two while one replaces the other
	Disabled bool
	Reason   string // why it is disabled
}

// ErrNoEndpoint says that no endpoint is registered under the address.
var ErrNoEndpoint = errors.New("webhook endpoint is not registered")

// common is the address under which the secrets stand for all endpoints that have none of their own.
const common = ""

const findEndpointSQL = `
SELECT coalesce(own.secret, common.secret), own.secret IS NOT NULL,
       CASE WHEN own.secret IS NULL THEN common.old_secret ELSE own.old_secret END,
       coalesce(CASE WHEN own.secret IS NULL THEN common.old_until ELSE own.old_until END > clock_timestamp(), false),
       own.disabled_at IS NOT NULL, coalesce(own.disabled_reason, '')
  FROM (SELECT) one
  LEFT JOIN penstock.webhook_endpoint own ON own.url = $1
  LEFT JOIN penstock.webhook_endpoint common ON common.url = ''`

// FindEndpoint returns what is known about an address. One that nobody registered is signed for with the secret of the
// installation, which the first call of all makes.
func FindEndpoint(ctx context.Context, db postgres.DB, vault Vault, url string) (Endpoint, error) {
	for range 2 {
		var secret, old *string
		var own, both bool
		var e Endpoint
		if err := db.QueryRow(ctx, findEndpointSQL, url).Scan(&secret, &own, &old, &both, &e.Disabled, &e.Reason); err != nil {
			return Endpoint{}, fmt.Errorf("find webhook endpoint: %w", err)
		}
		if secret == nil {
			if err := ensureCommonSecret(ctx, db, vault); err != nil {
				return Endpoint{}, err
			}
			continue
		}
		if !own {
			url = common
		}
		if !both {
			old = nil
		}
		var err error
		e.Secrets, err = vault.openAll(url, secret, old)
		return e, err
	}
	return Endpoint{}, errors.New("find webhook endpoint: the secret of the installation was removed meanwhile")
}

func (v Vault) openAll(url string, texts ...*string) ([]Secret, error) {
	var secrets []Secret
	for _, text := range texts {
		if text == nil {
			continue
		}
		s, err := v.open(url, *text)
		if err != nil {
			return nil, fmt.Errorf("read secret of webhook endpoint: %w", err)
		}
		secrets = append(secrets, s)
	}
	return secrets, nil
}

func ensureCommonSecret(ctx context.Context, db postgres.DB, vault Vault) error {
	sealed, err := vault.seal(common, NewSecret())
	if err == nil {
		_, err = db.Exec(ctx, `INSERT INTO penstock.webhook_endpoint (url, secret) VALUES ('', $1)
		                       ON CONFLICT (url) DO UPDATE SET secret = coalesce(webhook_endpoint.secret, excluded.secret)`, sealed)
	}
	if err != nil {
		return fmt.Errorf("make secret of the installation: %w", err)
	}
	return nil
}

// registerSQL makes an endpoint known, or enables it again; its secret stays what it was.
const registerSQL = `
WITH kept AS (
    INSERT INTO penstock.webhook_endpoint AS e (url, secret) VALUES ($1, $2)
    ON CONFLICT (url) DO UPDATE SET secret = coalesce(e.secret, excluded.secret), disabled_at = NULL, disabled_reason = NULL
    RETURNING secret
), noted AS (
    INSERT INTO penstock.audit (actor, verb, object) SELECT coalesce(nullif($3, ''), current_user), 'register_webhook', $1 FROM kept
)
SELECT secret FROM kept`

// Register makes an address known with a secret of its own, or enables it again, and returns the secret to be shown to
// its owner. The error wraps ErrForbiddenAddress where policy does not allow the address.
func Register(ctx context.Context, db postgres.DB, vault Vault, policy Policy, url, actor string) (Secret, error) {
	_, err := policy.CheckURL(url)
	var text string
	if err == nil {
		text, err = vault.seal(url, NewSecret())
	}
	if err == nil {
		err = db.QueryRow(ctx, registerSQL, url, text, actor).Scan(&text)
	}
	if err != nil {
		return Secret{}, fmt.Errorf("register webhook endpoint: %w", err)
	}
	return vault.open(url, text)
}

const rotateSQL = `
WITH turned AS (
    UPDATE penstock.webhook_endpoint
       SET old_secret = secret, old_until = clock_timestamp() + $3::interval, secret = $2
     WHERE url = $1 AND secret IS NOT NULL
    RETURNING url
)
INSERT INTO penstock.audit (actor, verb, object)
SELECT coalesce(nullif($4, ''), current_user), 'rotate_webhook_secret', url FROM turned
RETURNING object`

// Rotate gives an address a new secret and returns it; the old one signs too for as long as overlap says. The address ""
// stands for all that have no secret of their own.
func Rotate(ctx context.Context, db postgres.DB, vault Vault, url string, overlap time.Duration, actor string) (Secret, error) {
	if url == common {
		if err := ensureCommonSecret(ctx, db, vault); err != nil {
			return Secret{}, err
		}
	}
	secret := NewSecret()
	sealed, err := vault.seal(url, secret)
	if err != nil {
		return Secret{}, fmt.Errorf("rotate secret of webhook endpoint: %w", err)
	}
	var object string
	err = db.QueryRow(ctx, rotateSQL, url, sealed, overlap, actor).Scan(&object)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return Secret{}, fmt.Errorf("rotate secret of webhook endpoint: %w", ErrNoEndpoint)
	case err != nil:
		return Secret{}, fmt.Errorf("rotate secret of webhook endpoint: %w", err)
	}
	return secret, nil
}

const disableSQL = `
WITH off AS (
    INSERT INTO penstock.webhook_endpoint AS e (url, disabled_at, disabled_reason) VALUES ($1, clock_timestamp(), $2)
    ON CONFLICT (url) DO UPDATE SET disabled_at = coalesce(e.disabled_at, excluded.disabled_at), disabled_reason = excluded.disabled_reason
)
INSERT INTO penstock.audit (actor, verb, object, reason) VALUES (coalesce(nullif($3, ''), current_user), 'disable_webhook', $1, $2)`

// DisableEndpoint sends an address nothing more until it is registered again.
func DisableEndpoint(ctx context.Context, db postgres.DB, url, actor, reason string) error {
	if _, err := db.Exec(ctx, disableSQL, url, reason, actor); err != nil {
		return fmt.Errorf("disable webhook endpoint: %w", err)
	}
	return nil
}
