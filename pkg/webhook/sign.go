package webhook

import (
	"crypto/ed25519"
	"crypto/hmac"
	"crypto/rand"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"time"
)

// Headers of Standard Webhooks 1.0.0.
const (
	HeaderID        = "Webhook-Id"
	HeaderTimestamp = "Webhook-Timestamp"
	HeaderSignature = "Webhook-Signature"
)

// Sizes that the specification sets, in bytes, and how old a timestamp may be.
const (
	secretPrefix    = "whsec_"
	secretBytesLow  = 24
	secretBytesHigh = 64
	timestampSkew   = 5 * time.Minute
)

// Secret is a symmetric signing key. It prints as a placeholder.
type Secret struct{ key []byte }

// ParseSecret reads whsec_ followed by 24 to 64 bytes in standard base64. The
// error does not repeat the secret.
func ParseSecret(text string) (Secret, error) {
	encoded, found := strings.CutPrefix(text, secretPrefix)
	if !found {
		return Secret{}, errors.New("webhook secret must begin with whsec_")
	}
	key, err := decodeKey(encoded)
	if err != nil {
		return Secret{}, errors.New("webhook secret must be standard base64 after whsec_")
	}
	if len(key) < secretBytesLow || len(key) > secretBytesHigh {
		return Secret{}, fmt.Errorf("webhook secret must hold %d to %d bytes, not %d", secretBytesLow, secretBytesHigh,
			len(key))
	}
	return Secret{key: key}, nil
}

// decodeKey decodes standard base64 that is written in one way only: without line breaks, which the decoder of the
// standard library passes over, and with no bits set behind the last byte.
func decodeKey(encoded string) ([]byte, error) {
	if strings.ContainsAny(encoded, "\r\n") {
		return nil, errors.New("base64 of a key has no line breaks")
	}
	return base64.StdEncoding.Strict().DecodeString(encoded)
}

// NewSecret returns a random secret of 32 bytes.
func NewSecret() Secret {
	key := make([]byte, 32)
	_, _ = rand.Read(key) // never fails: it ends the process instead
	return Secret{key: key}
}

// Reveal returns the secret as a receiver needs it.
func (s Secret) Reveal() string { return secretPrefix + base64.StdEncoding.EncodeToString(s.key) }

// String hides the secret from logs.
func (s Secret) String() string { return secretPrefix + "***" }

// GoString hides the secret from %#v.
func (s Secret) GoString() string { return s.String() }

// Sign returns the three headers of one attempt. id is the same in every
// attempt and has no dot; at is the time of this attempt. While a secret is
// being replaced both sign, the newer first, and a receiver with either accepts.
func Sign(id string, at time.Time, body []byte, secrets ...Secret) (http.Header, error) {
	return sign(id, at, body, secrets, nil)
}

func sign(id string, at time.Time, body []byte, secrets []Secret, keys []signingKey) (http.Header, error) {
	if id == "" || strings.ContainsAny(id, ".\r\n") {
		return nil, fmt.Errorf("sign webhook: id %q must be one line without a dot", id)
	}
	if len(secrets) == 0 || len(secrets) > 2 || len(keys) > 2 {
		return nil, fmt.Errorf("sign webhook %s: want one or two secrets, have %d", id, len(secrets))
	}
	timestamp := strconv.FormatInt(at.Unix(), 10)
	signatures := make([]string, 0, len(secrets)+len(keys))
	for _, s := range secrets {
		if len(s.key) < secretBytesLow {
			return nil, fmt.Errorf("sign webhook %s: secret is empty", id)
		}
		signatures = append(signatures, symmetric+base64.StdEncoding.EncodeToString(s.sum(id, timestamp, body)))
	}
	for _, k := range keys {
		signatures = append(signatures, asymmetric+base64.StdEncoding.EncodeToString(k.sign(id, timestamp, body)))
	}
	return http.Header{
		HeaderID:        {id},
		HeaderTimestamp: {timestamp},
		HeaderSignature: {strings.Join(signatures, " ")},
	}, nil
}

// ErrSignature is the error of Verify for every message that it does not trust.
var ErrSignature = errors.New("webhook signature does not verify")

// Verify checks a received message against any of the secrets, as receivers do. The error wraps ErrSignature.
func Verify(header http.Header, now time.Time, body []byte, secrets ...Secret) error {
	return verify(header, now, symmetric, func(id, timestamp string, signature []byte) bool {
		return slices.ContainsFunc(secrets, func(s Secret) bool {
			return hmac.Equal(signature,
				s.sum(id, timestamp, body))
		})
	})
}

// VerifyKey checks a received message against any of the installation's public keys. The error wraps ErrSignature.
func VerifyKey(header http.Header, now time.Time, body []byte, keys ...PublicKey) error {
	return verify(header, now, asymmetric, func(id, timestamp string, signature []byte) bool {
		signed := signedContent(id, timestamp, body)
		return slices.ContainsFunc(keys, func(k PublicKey) bool {
			return len(k.key) == ed25519.PublicKeySize && ed25519.Verify(k.key, signed, signature)
		})
	})
}

// verify looks for a signature of a version that good accepts.
func verify(header http.Header, now time.Time, version string,
	good func(id, timestamp string, signature []byte) bool,
) error {
	id, timestamp := header.Get(HeaderID), header.Get(HeaderTimestamp)
	seconds, err := strconv.ParseInt(timestamp, 10, 64)
	if id == "" || err != nil {
		return fmt.Errorf("%w: headers are missing or malformed", ErrSignature)
	}
	if age := now.Sub(time.Unix(seconds, 0)); age > timestampSkew || age < -timestampSkew {
		return fmt.Errorf("%w: timestamp is %s off", ErrSignature, age.Round(time.Second))
	}
	for text := range strings.FieldsSeq(header.Get(HeaderSignature)) {
		encoded, found := strings.CutPrefix(text, version)
		signature, err := base64.StdEncoding.DecodeString(encoded)
		if found && err == nil && good(id, timestamp, signature) {
			return nil
		}
	}
	return ErrSignature
}

// Versions of signatures, in front of each: HMAC-SHA256 and Ed25519.
const symmetric, asymmetric = "v1,", "v1a,"

func signedContent(id, timestamp string, body []byte) []byte {
	return append([]byte(id+"."+timestamp+"."), body...)
}

func (s Secret) sum(id, timestamp string, body []byte) []byte {
	mac := hmac.New(sha256.New, s.key)
	mac.Write(signedContent(id, timestamp, body))
	return mac.Sum(nil)
}
