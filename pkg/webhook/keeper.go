package webhook

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/penstock/penstock/internal/postgres"
	"github.com/penstock/penstock/pkg/invalidation"
)

// Keeper changes the receivers of callbacks, and reads their secrets, for operators: the API's routes and the commands
// are made of it. Secrets are returned as texts, to be shown to their receivers. Package operator lists receivers.
type Keeper struct {
	DB     postgres.DB
	Policy AddressPolicy // which addresses may be registered
	Vault  Vault         // without a key receivers can be disabled, and nothing else
}

// vault returns the vault, or an error that wraps invalidation.ErrState where it has no key.
func (k Keeper) vault() (Vault, error) {
	if k.Vault.Key == "" {
		return Vault{}, fmt.Errorf("this leader has no key for secrets of receivers: set leader.webhook.key, or use "+
			"penstock webhook with --database-url and --key: %w", invalidation.ErrState)
	}
	return k.Vault, nil
}

// Register makes a receiver known, or enables it again, and returns its secret. The error wraps
// invalidation.ErrInvalid for an address that callbacks may not go to.
func (k Keeper) Register(ctx context.Context, url string, by invalidation.By) (string, error) {
	vault, err := k.vault()
	if err != nil {
		return "", err
	}
	secret, err := Register(ctx, k.DB, vault, k.Policy, url, by)
	if errors.Is(err, ErrForbiddenAddress) {
		err = fmt.Errorf("url: %w: %w", err, invalidation.ErrInvalid)
	}
	if err != nil {
		return "", err
	}
	return secret.Reveal(), nil
}

// Rotate gives a receiver a new secret and returns it; the old one signs as well during overlap. Without url it renews
// the root secret and returns the public key that comes from it.
func (k Keeper) Rotate(ctx context.Context, url string, overlap time.Duration, by invalidation.By) (string, error) {
	vault, err := k.vault()
	if err != nil {
		return "", err
	}
	secret, err := Rotate(ctx, k.DB, vault, url, overlap, by)
	switch {
	case err != nil:
		return "", err
	case url != root:
		return secret.Reveal(), nil
	}
	keys, err := k.Keys(ctx)
	if err != nil {
		return "", err
	}
	return keys[0], nil
}

// Disable ends deliveries to a receiver until it is registered again.
func (k Keeper) Disable(ctx context.Context, url string, by invalidation.By) error {
	return DisableEndpoint(ctx, k.DB, url, by)
}

// Secrets returns the secrets that sign for a receiver, its own or those derived for its scheme, host and port; the
// newest first.
func (k Keeper) Secrets(ctx context.Context, url string) ([]string, error) {
	vault, err := k.vault()
	if err != nil {
		return nil, err
	}
	secrets, err := secretsOf(ctx, k.DB, vault, url)
	texts := make([]string, len(secrets))
	for i, s := range secrets {
		texts[i] = s.Reveal()
	}
	return texts, err
}

// Keys returns the public keys with which every receiver can verify, the newest first.
func (k Keeper) Keys(ctx context.Context) ([]string, error) {
	vault, err := k.vault()
	if err != nil {
		return nil, err
	}
	keys, err := PublicKeys(ctx, k.DB, vault)
	texts := make([]string, len(keys))
	for i, key := range keys {
		texts[i] = key.String()
	}
	return texts, err
}
