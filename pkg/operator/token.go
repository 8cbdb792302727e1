package operator

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"hash/crc32"
	"slices"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgconn"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// APIToken is the name and the rights of a client of the HTTP API. Its secret is not stored.
type APIToken struct {
	ID           int64      `json:"id"`
	Name         string     `json:"name"`                   // the actor in the audit
	Scopes       []string   `json:"scopes"`                 // of push, read, operate, admin, call, announce
	Applications []string   `json:"applications"`           // to which it is limited; empty: to none
	Queues       []string   `json:"queues"`                 // to which it is limited; empty: to none
	Flows        []string   `json:"flows"`                  // of the entries that it may push; empty: any
	PriorityMax  *int16     `json:"priority_max,omitempty"` // that a push may ask for; absent: any
	Rate         *float64   `json:"rate,omitempty"`         // entries a second that it may push, at each leader
	Burst        *int32     `json:"burst,omitempty"`        // entries at once; absent: those of a second
	GPUMS        *int64     `json:"gpu_ms,omitempty"`       // milliseconds that calls of its flows may take in a period
	GPUPeriod    *string    `json:"gpu_period,omitempty" doc:"hour or day, of UTC."`
	CreatedAt    time.Time  `json:"created_at"`
	CreatedBy    string     `json:"created_by"`
	ExpiresAt    *time.Time `json:"expires_at,omitempty"`
	RevokedAt    *time.Time `json:"revoked_at,omitempty"`
	UsedAt       *time.Time `json:"used_at,omitempty"` // within a minute
	Live         bool       `json:"live"`              // neither expired nor revoked, by the database's clock
}

// Grant is the name, rights and end of a new token.
type Grant struct {
	Name                         string
	Scopes, Applications, Queues []string
	// of the entries that it may push; empty: any; only with scopes push and read
	Flows       []string
	PriorityMax *int16 // that a push may ask for, 0 to 9; nil: any; only with scopes push and read
	// Rate is how many entries a second it may push through each leader, nil for any; Burst how many at once, nil for
	// those of a second, at least one. Only with scopes push and read.
	Rate  *float64
	Burst *int32
	// GPUMS is how many milliseconds of GPU the calls of Flows, which must not be empty then, may take in a GPUPeriod,
	// hour or day; nil: any.
	GPUMS     *int64
	GPUPeriod *string
	// ExpiresAt is when it ends; Lifetime, in place of that, how long it lasts from now by the database's clock. Zero:
	// it does not end.
	ExpiresAt time.Time
	Lifetime  time.Duration
}

const (
	secretPrefix = "pst_"
	secretBytes  = 32
)

// NewSecret makes a secret. Its last eight digits are a checksum, so that mistyped or invented
// secrets are refused without a query, and a scanner can recognise a leaked one.
func NewSecret() string {
	text := make([]byte, secretBytes)
	_, _ = rand.Read(text) // never fails
	body := secretPrefix + hex.EncodeToString(text)
	return body + checksum(body)
}

func checksum(body string) string { return fmt.Sprintf("%08x", crc32.ChecksumIEEE([]byte(body))) }

// WellFormed reports whether a text has the form and checksum of a secret.
func WellFormed(secret string) bool {
	const length = len(secretPrefix) + 2*secretBytes + 8
	return len(secret) == length && strings.HasPrefix(secret, secretPrefix) &&
		checksum(secret[:length-8]) == secret[length-8:]
}

const tokenColumns = `
SELECT id, name, scopes, applications, queues, flows, priority_max, rate, burst, gpu_ms, gpu_period,
       created_at, created_by, penstock.json_time(expires_at) AS expires_at, revoked_at, used_at,
       revoked_at IS NULL AND coalesce(expires_at > clock_timestamp(), true) AS live
  FROM penstock.api_token`

// FindToken returns the token of a secret, live or not, and records its use. It returns
// invalidation.ErrNotFound if there is none.
func (d *Database) FindToken(ctx context.Context, secret string) (APIToken, error) {
	hash := sha256.Sum256([]byte(secret))
	found, err := list[APIToken](ctx, d.db, "tokens", tokenColumns+` WHERE hash = $1`, hash[:])
	if err != nil {
		return APIToken{}, err
	}
	if len(found) == 0 {
		return APIToken{}, fmt.Errorf("find token: %w", invalidation.ErrNotFound)
	}
	t := found[0]
	if t.Live {
		const usedSQL = `
UPDATE penstock.api_token SET used_at = clock_timestamp()
 WHERE id = $1 AND coalesce(used_at < clock_timestamp() - interval '1 minute', true)`
		// a standby can still be read
		if _, err := d.db.Exec(ctx, usedSQL, t.ID); err != nil && !postgres.Unavailable(err) {
			return APIToken{}, fmt.Errorf("record use of token %q: %w", t.Name, err)
		}
	}
	return t, nil
}

// TokenKey is the position of an APIToken in the list.
type TokenKey struct {
	Name string
	ID   int64
}

// Tokens returns the tokens by name, those of one name oldest first, from the first behind the given key.
func (d *Database) Tokens(ctx context.Context, after TokenKey, limit int) ([]APIToken, error) {
	const sql = tokenColumns + ` WHERE (name, id) > ($1, $2) ORDER BY name, id LIMIT $3`
	return list[APIToken](ctx, d.db, "tokens", sql, after.Name, after.ID, page(limit))
}

// GPUSpent returns the GPU milliseconds that calls of flows, and of flows below them, have taken in the present period,
// hour or day of UTC, and the time until the next one. Nodes and gateways record a call within seconds of its end.
func (d *Database) GPUSpent(
	ctx context.Context, flows []string, period string,
) (ms int64, endsIn time.Duration, err error) {
	const spentSQL = `SELECT ms, ends_in FROM penstock.gpu_spent($1, $2)`
	var seconds float64
	if err := d.db.QueryRow(ctx, spentSQL, flows, period).Scan(&ms, &seconds); err != nil {
		return 0, 0, fmt.Errorf("read the GPU time of flows: %w", err)
	}
	return ms, time.Duration(seconds * float64(time.Second)), nil
}

// reservedNames are the actors of what Penstock does by itself. A drain by one of them ends by itself, and the
// name of a token is the actor of what it does.
var reservedNames = []string{"autoscaler", "cron", "expired", "recycle"}

// CreateToken makes a token of a new name and returns its secret, which cannot be read again.
func (d *Database) CreateToken(ctx context.Context, g Grant, by invalidation.By) (secret string, err error) {
	if slices.Contains(reservedNames, g.Name) {
		return "", fmt.Errorf("create token %q: Penstock itself acts under this name; choose another one: %w", g.Name,
			invalidation.ErrInvalid)
	}
	err = postgres.InTx(ctx, d.db, func(tx pgx.Tx) error {
		living, err := livingTokens(ctx, tx, g.Name)
		if err != nil {
			return err
		}
		if len(living) > 0 {
			return fmt.Errorf("create token %q: the name is taken; rotate or revoke that token: %w", g.Name,
				invalidation.ErrState)
		}
		var expires *time.Time
		if secret, expires, err = insertToken(ctx, tx, g, by); err != nil {
			return err
		}
		return record(ctx, tx, by, "create_token", "token "+g.Name,
			map[string]any{
				"scopes": g.Scopes, "applications": g.Applications, "queues": g.Queues,
				"flows": g.Flows, "priority_max": g.PriorityMax, "rate": g.Rate, "burst": g.Burst,
				"gpu_ms": g.GPUMS, "gpu_period": g.GPUPeriod, "expires_at": expires,
			})
	})
	return secret, err
}

// livingTokens locks a name, so that of two concurrent creators one sees the other's token.
func livingTokens(ctx context.Context, tx pgx.Tx, name string) ([]APIToken, error) {
	if _, err := tx.Exec(ctx, `SELECT pg_advisory_xact_lock(hashtext('penstock.api_token'), hashtext($1))`,
		name); err != nil {
		return nil, fmt.Errorf("lock token %q: %w", name, err)
	}
	found, err := list[APIToken](ctx, tx, "tokens", tokenColumns+` WHERE name = $1 ORDER BY id DESC`, name)
	return slices.DeleteFunc(found, func(t APIToken) bool { return !t.Live }), err
}

// insertToken returns the secret, and when the token ends; nil: it does not.
func insertToken(ctx context.Context, tx pgx.Tx, g Grant, by invalidation.By) (
	secret string, expires *time.Time, err error,
) {
	secret = NewSecret()
	hash := sha256.Sum256([]byte(secret))
	const sql = `
INSERT INTO penstock.api_token (name, hash, scopes, applications, queues, expires_at, created_by, flows,
                                priority_max, rate, burst, gpu_ms, gpu_period)
SELECT $1::text, $2::bytea, $3::text[], coalesce($4::text[], '{}'), coalesce($5::text[], '{}'), e.at,
       coalesce($7, current_user), coalesce($8::text[], '{}'), $9::smallint, $10::float8, $11::integer,
       $12::bigint, $13::text
  FROM (SELECT coalesce($6::timestamptz, clock_timestamp() + $14::interval) AS at OFFSET 0) e
 WHERE coalesce(e.at > clock_timestamp() AND e.at < '9999-12-31 UTC', true)
RETURNING expires_at`
	err = tx.QueryRow(ctx, sql, g.Name, hash[:], g.Scopes, g.Applications, g.Queues, given(g.ExpiresAt),
		given(by.Actor), g.Flows, g.PriorityMax, g.Rate, g.Burst, g.GPUMS, g.GPUPeriod,
		given(g.Lifetime)).Scan(&expires)
	if errors.Is(err, pgx.ErrNoRows) {
		return "", nil, fmt.Errorf("create token %q: expires_at is not a time to come before 9999-12-31: %w", g.Name,
			invalidation.ErrInvalid)
	}
	var violated *pgconn.PgError
	if errors.As(err, &violated) && violated.ConstraintName == "api_token_push_limits" {
		return "", nil, fmt.Errorf("create token %q: flows, priority_max and rate limit pushes alone, and go "+
			"with no scope but push, read, call and announce: %w",
			g.Name, invalidation.ErrInvalid)
	}
	if violated != nil && violated.ConstraintName == "api_token_budget" {
		return "", nil, fmt.Errorf("create token %q: gpu_ms goes with gpu_period, hour or day, and with flows, whose "+
			"use it bounds: %w", g.Name, invalidation.ErrInvalid)
	}
	if code := postgres.Code(err); code == "23514" || code == "23502" {
		err = fmt.Errorf("a name has letters, digits and . _ @ -, and scopes are of push, read, operate, admin, "+
			"call and announce, at least one, priority_max is 0 to 9, rate and gpu_ms are above 0, gpu_period is hour "+
			"or day, and burst, at least 1, goes with rate: %w", invalidation.ErrInvalid)
	}
	if err != nil {
		return "", nil, fmt.Errorf("create token %q: %w", g.Name, err)
	}
	return secret, expires, nil
}

// RotateToken makes another secret for a token and lets the older ones of its name end after the overlap. The new one
// ends at expires; zero means that it lasts as long as the one before was to last.
func (d *Database) RotateToken(ctx context.Context, name string, overlap time.Duration, expires time.Time,
	by invalidation.By,
) (secret string, err error) {
	if overlap < 0 {
		return "", fmt.Errorf("rotate token %q: overlap is negative: %w", name, invalidation.ErrInvalid)
	}
	err = postgres.InTx(ctx, d.db, func(tx pgx.Tx) error {
		living, err := livingTokens(ctx, tx, name)
		if err != nil {
			return err
		}
		if len(living) == 0 {
			return fmt.Errorf("rotate token %q: no living token has this name: %w", name, invalidation.ErrNotFound)
		}
		const endSQL = `
UPDATE penstock.api_token SET expires_at = least(expires_at, clock_timestamp() + $2::interval)
 WHERE name = $1 AND revoked_at IS NULL`
		if _, err := tx.Exec(ctx, endSQL, name, overlap); err != nil {
			return fmt.Errorf("rotate token %q: %w", name, err)
		}
		was := living[0]
		lifetime := time.Duration(0)
		if expires.IsZero() && was.ExpiresAt != nil {
			lifetime = was.ExpiresAt.Sub(was.CreatedAt)
		}
		var ends *time.Time
		secret, ends, err = insertToken(ctx, tx, Grant{
			Name: name, Scopes: was.Scopes, Applications: was.Applications, Queues: was.Queues,
			Flows: was.Flows, PriorityMax: was.PriorityMax, Rate: was.Rate, Burst: was.Burst, GPUMS: was.GPUMS,
			GPUPeriod: was.GPUPeriod, ExpiresAt: expires, Lifetime: lifetime,
		}, by)
		if err != nil {
			return err
		}
		return record(ctx, tx, by, "rotate_token", "token "+name,
			map[string]any{"overlap_seconds": overlap.Seconds(), "expires_at": ends})
	})
	return secret, err
}

// RevokeToken ends every token of a name. Leaders that have it in their cache accept it for a few
// seconds more.
func (d *Database) RevokeToken(ctx context.Context, name string, by invalidation.By) error {
	return postgres.InTx(ctx, d.db, func(tx pgx.Tx) error {
		const revokeSQL = `
UPDATE penstock.api_token SET revoked_at = clock_timestamp() WHERE name = $1 AND revoked_at IS NULL`
		tag, err := tx.Exec(ctx, revokeSQL, name)
		if err != nil {
			return fmt.Errorf("revoke token %q: %w", name, err)
		}
		if tag.RowsAffected() == 0 {
			return fmt.Errorf("revoke token %q: %w", name, invalidation.ErrNotFound)
		}
		return record(ctx, tx, by, "revoke_token", "token "+name, nil)
	})
}
