package webhook

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"net/url"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// Destination is how to deliver to an address.
type Destination struct {
	Secrets  []Secret     // its own, or those derived for its origin; two while one replaces the other
	Keys     []signingKey // of the installation, likewise
	Disabled bool
	Reason   string    // why it is disabled
	At       time.Time // when this was read, by the database's clock
}

// root is the address of the row with the root secret of the installation.
const root = ""

// canonical is an address as its row has it: one for all ways to write it, with its query.
func canonical(u *url.URL) string {
	if u.RawQuery == "" {
		return withoutQuery(u)
	}
	return withoutQuery(u) + "?" + u.RawQuery
}

// goneMark is the address of the row that keeps that an address has answered 410, where it has none of its own: the
// query, which may hold a capability, is in it as a hash. No address has a fragment.
func goneMark(u *url.URL) string {
	if u.RawQuery == "" {
		return withoutQuery(u)
	}
	return markRoot(withoutQuery(u)) + queryMark + shortHash(u.RawQuery)
}

const (
	urlBytesMax = 2048 // of a row, as its table has it
	queryMark   = "#query-"
)

// markRoot is what the marks of an address begin with, whatever its query: the address itself or, where they would not
// fit, its beginning and a hash of it. An address that is too long for a row of its own has no marks that fit: with no
// row to register, nothing could enable it again.
func markRoot(bare string) string {
	const pathMark, begins = "#path-", 1900
	if len(bare) > urlBytesMax || len(bare)+len(queryMark)+len(shortHash("")) <= urlBytesMax {
		return bare
	}
	return strings.ToValidUTF8(bare[:begins], "") + pathMark + shortHash(bare)
}

func shortHash(text string) string {
	sum := sha256.Sum256([]byte(text))
	return hex.EncodeToString(sum[:16])
}

// findEndpointSQL reads the row of address $1 or, without one, of $2, which is $1 without its query; and the root. It
// is disabled by either row, or by that of its mark $3.
const findEndpointSQL = `
SELECT own.url, own.secret, CASE WHEN own.old_until > clock_timestamp() THEN own.old_secret END,
       root.secret, CASE WHEN root.old_until > clock_timestamp() THEN root.old_secret END,
       off.url IS NOT NULL, coalesce(off.disabled_reason, ''), clock_timestamp()
  FROM (SELECT) one
  LEFT JOIN LATERAL (SELECT * FROM penstock.webhook_endpoint e
                      WHERE e.url IN ($1, $2) AND e.url <> '' AND e.secret IS NOT NULL
                      ORDER BY e.url = $1 DESC LIMIT 1) own ON true
  LEFT JOIN LATERAL (SELECT * FROM penstock.webhook_endpoint e
                      WHERE e.url IN ($1, $2, $3) AND e.disabled_at IS NOT NULL
                      ORDER BY e.url IN ($1, $2) DESC LIMIT 1) off ON true
  LEFT JOIN penstock.webhook_endpoint root ON root.url = ''`

// FindEndpoint returns how to deliver to an address. Messages to an unregistered address are signed with a secret
// derived for its origin from the root secret of the installation, which the first call of all makes.
func FindEndpoint(ctx context.Context, db postgres.DB, vault Vault, address string) (Destination, error) {
	own, bare, mark := address, address, address
	if u, err := url.Parse(address); err == nil && address != root {
		own, bare, mark = canonical(u), withoutQuery(u), goneMark(u)
	}
	for range 2 {
		var at, secret, old, rootSecret, rootOld *string
		var e Destination
		err := db.QueryRow(ctx, findEndpointSQL, own, bare, mark).Scan(&at, &secret, &old, &rootSecret, &rootOld,
			&e.Disabled, &e.Reason, &e.At)
		if err != nil {
			return Destination{}, fmt.Errorf("find webhook endpoint: %w", err)
		}
		if rootSecret == nil {
			if err := ensureRoot(ctx, db, vault); err != nil {
				return Destination{}, err
			}
			continue
		}
		roots, err := vault.openAll(root, rootSecret, rootOld)
		if err != nil {
			return Destination{}, err
		}
		for _, r := range roots {
			e.Keys = append(e.Keys, r.signingKey())
		}
		if at != nil {
			e.Secrets, err = vault.openAll(*at, secret, old)
			return e, err
		}
		for _, r := range roots {
			derived, err := r.receiverSecret(address)
			if err != nil {
				return Destination{}, err
			}
			e.Secrets = append(e.Secrets, derived)
		}
		return e, nil
	}
	return Destination{}, errors.New("find webhook endpoint: the root secret of the installation was removed meanwhile")
}

// errSecret says that a secret in the database cannot be read with the key and the references of this process. Other
// errors are those of the database.
var errSecret = errors.New("read secret of webhook endpoint")

func (v Vault) openAll(address string, texts ...*string) ([]Secret, error) {
	var secrets []Secret
	for _, text := range texts {
		if text == nil {
			continue
		}
		s, err := v.open(address, *text)
		if err != nil {
			return nil, fmt.Errorf("%w: %w", errSecret, err)
		}
		secrets = append(secrets, s)
	}
	return secrets, nil
}

// ensureRoot makes the root secret unless there is one. It changes no row: a task node may insert secrets of receivers,
// and not replace them.
func ensureRoot(ctx context.Context, db postgres.DB, vault Vault) error {
	sealed, err := vault.seal(root, NewSecret())
	if err != nil {
		return fmt.Errorf("%w: %w", errSecret, err)
	}
	if _, err = db.Exec(ctx, `INSERT INTO penstock.webhook_endpoint (url, secret) VALUES ('', $1)
	                          ON CONFLICT (url) DO NOTHING`, sealed); err != nil {
		return fmt.Errorf("make root secret of webhooks: %w", err)
	}
	return nil
}

// registerSQL makes endpoint $1 known, or enables it again; its secret stays what it was. The row of $5, which is $1
// without its query, is enabled with it where its receiver answered 410, reason $6, and so is that of its mark $7;
// where $1 has no query, those of all marks that begin with $8. Where an operator disabled row $5, nothing is changed,
// and its reason is the second column.
const registerSQL = `
WITH refused AS MATERIALIZED (
    SELECT coalesce(disabled_reason, '') AS reason
      FROM penstock.webhook_endpoint
     WHERE url = $5 AND url <> $1 AND disabled_at IS NOT NULL AND disabled_reason IS DISTINCT FROM $6
), marks AS MATERIALIZED (
    SELECT url FROM penstock.webhook_endpoint WHERE url = $7 AND $1 <> $5 AND disabled_reason = $6
     UNION ALL
    SELECT url FROM penstock.webhook_endpoint
     WHERE $1 = $5 AND url > $8 || '#query-' AND url < $8 || '#query.' AND disabled_reason = $6
), disabled AS MATERIALIZED (
    SELECT url FROM penstock.webhook_endpoint WHERE url IN ($1, $5) AND disabled_at IS NOT NULL
     UNION ALL
    SELECT url FROM marks
), unmarked AS (
    DELETE FROM penstock.webhook_endpoint WHERE url IN (SELECT url FROM marks) AND NOT EXISTS (SELECT FROM refused)
), bare AS (
    UPDATE penstock.webhook_endpoint SET disabled_at = NULL, disabled_reason = NULL
     WHERE url = $5 AND url <> $1 AND disabled_reason = $6
), kept AS (
    INSERT INTO penstock.webhook_endpoint AS e (url, secret) SELECT $1, $2 WHERE NOT EXISTS (SELECT FROM refused)
    ON CONFLICT (url) DO UPDATE
       SET secret = coalesce(e.secret, excluded.secret), disabled_at = NULL, disabled_reason = NULL
    RETURNING url, secret
)
SELECT secret, NULL FROM kept CROSS JOIN LATERAL penstock.audit_log($3, 'register_webhook', kept.url, $4,
       (SELECT jsonb_build_object('enabled', jsonb_agg(d.url ORDER BY d.url)) FROM disabled d HAVING count(*) > 0))
 UNION ALL
SELECT NULL, reason FROM refused`

// Register makes an address known with a secret of its own, or enables it again, and returns the secret to be
// shown to its owner. It also holds for the address with other parameters in its query. The error wraps
// ErrForbiddenAddress where policy does not allow the address, and invalidation.ErrState where an operator has disabled
// the address without its query.
func Register(ctx context.Context, db postgres.DB, vault Vault, policy AddressPolicy, address string,
	by invalidation.By,
) (Secret, error) {
	u, err := policy.CheckURL(address)
	var own string
	var text, disabled *string
	if err == nil {
		own = canonical(u)
		var sealed string
		if sealed, err = vault.seal(own, NewSecret()); err == nil {
			err = db.QueryRow(ctx, registerSQL, own, sealed, by.Actor, by.Reason, withoutQuery(u), goneReason,
				goneMark(u), markRoot(withoutQuery(u))).Scan(&text, &disabled)
		}
	}
	if err == nil && disabled != nil {
		err = fmt.Errorf("%s is disabled (%s) whatever its query; register that address to enable it: %w",
			withoutQuery(u), *disabled, invalidation.ErrState)
	}
	if err != nil {
		return Secret{}, fmt.Errorf("register webhook endpoint: %w", err)
	}
	return vault.open(own, *text)
}

// rotateSQL also returns until when the secret before the present one signs, if that kept it from the rotation: of
// three secrets one would have to be dropped, with which a receiver may still verify.
const rotateSQL = `
WITH known AS (
    SELECT e.url, e.old_until
      FROM penstock.webhook_endpoint e
     WHERE e.url = $1 AND e.secret IS NOT NULL
       FOR UPDATE
), turned AS (
    UPDATE penstock.webhook_endpoint e
       SET old_secret = e.secret, old_until = clock_timestamp() + $3::interval, secret = $2
      FROM known
     WHERE e.url = known.url
       AND ($3::interval = interval '0' OR known.old_until IS NULL OR known.old_until <= clock_timestamp())
    RETURNING e.url
), noted AS (
    SELECT turned.url
      FROM turned
     CROSS JOIN LATERAL penstock.audit_log($4, 'rotate_webhook_secret',
           CASE turned.url WHEN '' THEN 'root secret' ELSE turned.url END, $5)
)
SELECT CASE WHEN noted.url IS NULL THEN known.old_until END FROM known LEFT JOIN noted ON true`

// Rotate gives an address a new secret and returns it; the old one signs too for as long as overlap says. The
// address "" means the root secret: all derived secrets and the signing key change with it, and no receiver
// needs the one that is returned. invalidation.ErrNotFound: the address has no secret of its own.
// invalidation.ErrState: the secret before the present one still signs, and overlap is not 0, which ends both.
func Rotate(ctx context.Context, db postgres.DB, vault Vault, address string, overlap time.Duration,
	by invalidation.By,
) (Secret, error) {
	if address == root {
		if err := ensureRoot(ctx, db, vault); err != nil {
			return Secret{}, err
		}
	} else if u, err := url.Parse(address); err == nil {
		address = canonical(u)
	}
	secret := NewSecret()
	sealed, err := vault.seal(address, secret)
	if err != nil {
		return Secret{}, fmt.Errorf("rotate secret of webhook endpoint: %w", err)
	}
	var old *time.Time
	err = db.QueryRow(ctx, rotateSQL, address, sealed, overlap, by.Actor, by.Reason).Scan(&old)
	switch {
	case err == nil && old != nil:
		return Secret{}, fmt.Errorf("rotate secret of webhook endpoint: it was rotated, and the secret before it "+
			"signs until %s: wait, or end both by an overlap of 0: %w", old.UTC().Format(time.RFC3339),
			invalidation.ErrState)
	case errors.Is(err, pgx.ErrNoRows):
		return Secret{}, fmt.Errorf("rotate secret of webhook endpoint: it has none of its own: %w",
			invalidation.ErrNotFound)
	case err != nil:
		return Secret{}, fmt.Errorf("rotate secret of webhook endpoint: %w", err)
	}
	return secret, nil
}

const disableSQL = `
WITH off AS (
    INSERT INTO penstock.webhook_endpoint AS e (url, disabled_at, disabled_reason) VALUES ($1, clock_timestamp(), $2)
    ON CONFLICT (url) DO UPDATE
       SET disabled_at = coalesce(e.disabled_at, excluded.disabled_at), disabled_reason = excluded.disabled_reason
)
SELECT penstock.audit_log($3, 'disable_webhook', $1, $2)`

// DisableEndpoint stops deliveries to an address until it is registered again; without a query, to the address with
// any. invalidation.ErrInvalid: it is not the address of a receiver.
func DisableEndpoint(ctx context.Context, db postgres.DB, address string, by invalidation.By) error {
	if address == root {
		return fmt.Errorf("disable webhook endpoint: it has no address: %w", invalidation.ErrInvalid)
	}
	u, _, err := parse(address)
	if err != nil {
		return fmt.Errorf("disable webhook endpoint: url: %w: %w", err, invalidation.ErrInvalid)
	}
	if _, err := db.Exec(ctx, disableSQL, canonical(u), by.Reason, by.Actor); err != nil {
		return fmt.Errorf("disable webhook endpoint: %w", err)
	}
	return nil
}

// goneMax is how many unregistered addresses are kept as gone. Every client that may push can name any number of them.
const goneMax = 10_000

// goneSQL disables address $1, which answered 410: its row, or that of its mark $4. The audit has no line of it:
// receivers do not operate the installation, and could fill a table of which nothing can be deleted.
const goneSQL = `
INSERT INTO penstock.webhook_endpoint AS e (url, disabled_at, disabled_reason)
SELECT coalesce(known.url, $4), clock_timestamp(), $2
  FROM (SELECT) one
  LEFT JOIN penstock.webhook_endpoint known ON known.url = $1
 WHERE known.url IS NOT NULL
    OR (SELECT count(*)
          FROM (SELECT FROM penstock.webhook_endpoint gone WHERE gone.disabled_reason = $2 LIMIT $3) few) < $3
ON CONFLICT (url) DO UPDATE SET disabled_at = clock_timestamp(), disabled_reason = excluded.disabled_reason
 WHERE e.disabled_at IS NULL`

// goneReason is why addresses are disabled that answered 410.
const goneReason = "receiver answered 410: it wants no more deliveries"

// markGone disables an address, with its query, at its receiver's wish.
func markGone(ctx context.Context, db postgres.DB, address string) error {
	u, err := url.Parse(address)
	if err == nil {
		_, err = db.Exec(ctx, goneSQL, canonical(u), goneReason, goneMax, goneMark(u))
	}
	if err != nil {
		return fmt.Errorf("disable webhook endpoint that is gone: %w", err)
	}
	return nil
}

// secretsOf returns the secrets that sign for an address, to be shown to its owner: its own, or those derived for its
// origin. invalidation.ErrInvalid: it is not the address of a receiver.
func secretsOf(ctx context.Context, db postgres.DB, vault Vault, address string) ([]Secret, error) {
	if _, _, err := parse(address); err != nil {
		return nil, fmt.Errorf("read secrets of webhook endpoint: url: %w: %w", err, invalidation.ErrInvalid)
	}
	e, err := FindEndpoint(ctx, db, vault, address)
	return e.Secrets, err
}

// rootSQL reads the root secret of the installation, and the one before it while that still signs.
const rootSQL = `
SELECT r.secret, CASE WHEN r.old_until > clock_timestamp() THEN r.old_secret END
  FROM penstock.webhook_endpoint r WHERE r.url = '' AND r.secret IS NOT NULL`

// ClientSecrets returns the secrets that sign all messages for a client, whatever address they go to; two while one
// replaces the other. They are derived from the root secret of the installation, which the first call of all makes.
func ClientSecrets(ctx context.Context, db postgres.DB, vault Vault, client string) ([]Secret, error) {
	var secret, old *string
	err := db.QueryRow(ctx, rootSQL).Scan(&secret, &old)
	if errors.Is(err, pgx.ErrNoRows) {
		if err := ensureRoot(ctx, db, vault); err != nil {
			return nil, err
		}
		err = db.QueryRow(ctx, rootSQL).Scan(&secret, &old)
	}
	if err != nil {
		return nil, fmt.Errorf("read root secret of webhooks: %w", err)
	}
	roots, err := vault.openAll(root, secret, old)
	if err != nil {
		return nil, err
	}
	secrets := make([]Secret, 0, len(roots))
	for _, r := range roots {
		secrets = append(secrets, Secret{key: r.derive("client " + client)})
	}
	return secrets, nil
}

// PublicKeys returns the keys with which all receivers can verify: one, or two while one replaces the other.
func PublicKeys(ctx context.Context, db postgres.DB, vault Vault) ([]PublicKey, error) {
	e, err := FindEndpoint(ctx, db, vault, root)
	var keys []PublicKey
	for _, k := range e.Keys {
		keys = append(keys, k.Public())
	}
	return keys, err
}
