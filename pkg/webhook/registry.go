package webhook

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// Endpoint is an address that callbacks go to, as registered.
type Endpoint struct {
	Secrets  []Secret // its own, or those of the installation; two while one replaces the other
	Disabled bool
	Reason   string // why it is disabled
}

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
    INSERT INTO penstock.audit (actor, verb, object, reason) SELECT coalesce(nullif($3, ''), current_user), 'register_webhook', $1, $4 FROM kept
)
SELECT secret FROM kept`

// Register makes an address known with a secret of its own, or enables it again, and returns the secret to be shown to
// its owner. The error wraps ErrForbiddenAddress where policy does not allow the address.
func Register(ctx context.Context, db postgres.DB, vault Vault, policy Policy, url string, by invalidation.By) (Secret, error) {
	_, err := policy.CheckURL(url)
	var text string
	if err == nil {
		text, err = vault.seal(url, NewSecret())
	}
	if err == nil {
		err = db.QueryRow(ctx, registerSQL, url, text, by.Actor, by.Reason).Scan(&text)
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
INSERT INTO penstock.audit (actor, verb, object, reason)
SELECT coalesce(nullif($4, ''), current_user), 'rotate_webhook_secret', url, $5 FROM turned
RETURNING object`

// Rotate gives an address a new secret and returns it; the old one signs too for as long as overlap says. The address ""
// stands for all that have no secret of their own. invalidation.ErrNotFound: the address has none.
func Rotate(ctx context.Context, db postgres.DB, vault Vault, url string, overlap time.Duration, by invalidation.By) (Secret, error) {
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
	err = db.QueryRow(ctx, rotateSQL, url, sealed, overlap, by.Actor, by.Reason).Scan(&object)
	switch {
	case errors.Is(err, pgx.ErrNoRows):
		return Secret{}, fmt.Errorf("rotate secret of webhook endpoint: it has none of its own: %w", invalidation.ErrNotFound)
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
func DisableEndpoint(ctx context.Context, db postgres.DB, url string, by invalidation.By) error {
	if _, err := db.Exec(ctx, disableSQL, url, by.Reason, by.Actor); err != nil {
		return fmt.Errorf("disable webhook endpoint: %w", err)
	}
	return nil
}

// Registered is a row of penstock.webhook_endpoint without its secrets.
type Registered struct {
	URL       string     `json:"url"` // empty: the secret of all that have none of their own
	Own       bool       `json:"own_secret"`
	OldUntil  *time.Time `json:"old_secret_until,omitempty"` // how long the secret before signs, too
	CreatedAt time.Time  `json:"created_at"`
	Disabled  *time.Time `json:"disabled_at,omitempty"`
	Reason    string     `json:"disabled_reason,omitempty"`
}

const listSQL = `
SELECT url, secret IS NOT NULL, CASE WHEN old_until > clock_timestamp() THEN old_until END, created_at, disabled_at, coalesce(disabled_reason, '')
  FROM penstock.webhook_endpoint
 WHERE $1 = '' OR url > $1 ORDER BY url LIMIT $2`

// List returns what is registered, in the order of addresses, behind one of them.
func List(ctx context.Context, db postgres.DB, after string, limit int) ([]Registered, error) {
	found, err := pgx.CollectRows(postgres.Query(ctx, db, listSQL, after, limit), pgx.RowToStructByPos[Registered])
	if err != nil {
		return nil, fmt.Errorf("list webhook endpoints: %w", err)
	}
	return found, nil
}
