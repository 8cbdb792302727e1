package webhook

import (
	"crypto/ed25519"
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/hex"
	"errors"
	"net/url"
	"strings"
)

// The installation has one root secret, which signs nothing itself and never leaves it. From it are derived a secret
// for each receiver that has none of its own, so that no receiver can sign for another one, and the Ed25519 key whose
// public half every receiver may know. A new root replaces all of them (Rotate).

// receiverSecret is the secret of all receivers at the origin (scheme, host and port) of an address.
func (s Secret) receiverSecret(address string) (Secret, error) {
	u, err := url.Parse(address)
	if err != nil {
		return Secret{}, errors.New("derive webhook secret: address is not a URL")
	}
	return Secret{key: s.derive("receiver " + origin(u))}, nil
}

func (s Secret) signingKey() signingKey {
	return signingKey{key: ed25519.NewKeyFromSeed(s.derive("ed25519"))}
}

// derive makes 32 bytes for a purpose, from which neither the root nor those of another purpose can be computed.
func (s Secret) derive(purpose string) []byte {
	mac := hmac.New(sha256.New, s.key)
	mac.Write([]byte("penstock webhook " + purpose))
	return mac.Sum(nil)
}

// signingKey is the private Ed25519 key of the installation. It prints as a placeholder.
type signingKey struct{ key ed25519.PrivateKey }

// String hides the key from logs.
func (signingKey) String() string { return "whsk_***" }

// GoString hides the key from %#v.
func (k signingKey) GoString() string { return k.String() }

// Public returns the half that receivers verify with.
func (k signingKey) Public() PublicKey {
	public, _ := k.key.Public().(ed25519.PublicKey) // always is one
	return PublicKey{key: public}
}

func (k signingKey) sign(id, timestamp string, body []byte) []byte {
	return ed25519.Sign(k.key, signedContent(id, timestamp, body))
}

const publicPrefix = "whpk_"

// PublicKey verifies signatures of an installation (VerifyKey). It is no secret.
type PublicKey struct{ key ed25519.PublicKey }

// ParsePublicKey reads whpk_ followed by 32 bytes in standard base64.
func ParsePublicKey(text string) (PublicKey, error) {
	encoded, found := strings.CutPrefix(text, publicPrefix)
	key, err := decodeKey(encoded)
	if !found || err != nil || len(key) != ed25519.PublicKeySize {
		return PublicKey{}, errors.New("webhook public key must be whpk_ and 32 bytes in standard base64")
	}
	return PublicKey{key: key}, nil
}

// String returns the key as receivers get it.
func (k PublicKey) String() string { return publicPrefix + base64.StdEncoding.EncodeToString(k.key) }

// Fingerprint is a short name of the key, and of the installation where it has no other name.
func (k PublicKey) Fingerprint() string {
	sum := sha256.Sum256(k.key)
	return "penstock:" + hex.EncodeToString(sum[:8])
}
