package webhook

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/pbkdf2"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"strings"
	"sync"
)

// Vault seals and opens the secrets of receivers, so that read access to the database does not suffice to sign as the
// installation. Secrets may also be references, which it reads.
type Vault struct {
	// Key of the installation, the same in all its processes: 16 random bytes or more, such as
	// the output of `openssl rand -base64 32`. Without one no new secret can be made.
	Key string
	// Read returns the secret that env:NAME or file:/path refers to; nil: references are errors.
	Read func(ref string) (string, error)

	stretched func() ([]byte, error) // nil: stretched anew for each secret
}

// NewVault returns a vault that stretches its key once, at first use.
func NewVault(key string, read func(ref string) (string, error)) Vault {
	return Vault{Key: key, Read: read, stretched: sync.OnceValues(func() ([]byte, error) { return stretch(key) })}
}

// OpenVault returns the vault of a program. Own reads the key to which an option of it refers, stored the secrets to
// which the database refers. Without a reference to a key (empty) the vault reads references alone. Errors name the
// option.
func OpenVault(option, ref string, own, stored func(ref string) (string, error)) (Vault, error) {
	if ref == "" {
		return Vault{Read: stored}, nil
	}
	key, err := own(ref)
	v := NewVault(key, stored)
	if err == nil {
		err = v.Check()
	}
	if err != nil {
		return Vault{}, fmt.Errorf("%s: %w", option, err)
	}
	return v, nil
}

// ErrNoKey says that the key of the installation is missing, or too short.
var ErrNoKey = errors.New("webhook secrets need a key of 16 bytes or more: set tasknode.webhook.key to env:NAME or " +
	"file:/path")

const (
	sealedPrefix = "sealed:"
	keyBytesLow  = 16
	// stretchRounds of PBKDF2-HMAC-SHA256, as OWASP's password storage cheat sheet recommends: where the key is a
	// passphrase, each guess costs a tenth of a second or more.
	stretchRounds = 600_000
)

func stretch(key string) ([]byte, error) {
	long, err := pbkdf2.Key(sha256.New, key, []byte("penstock webhook secrets"), stretchRounds, 32)
	if err != nil {
		return nil, fmt.Errorf("stretch the key of webhook secrets: %w", err)
	}
	return long, nil
}

// Check returns ErrNoKey if no secret can be sealed.
func (v Vault) Check() error {
	if len(v.Key) < keyBytesLow {
		return ErrNoKey
	}
	return nil
}

func (v Vault) aead() (cipher.AEAD, error) {
	if err := v.Check(); err != nil {
		return nil, err
	}
	stretched := v.stretched
	if stretched == nil {
		stretched = func() ([]byte, error) { return stretch(v.Key) }
	}
	key, err := stretched()
	if err != nil {
		return nil, err
	}
	block, err := aes.NewCipher(key)
	if err != nil {
		return nil, err
	}
	return cipher.NewGCMWithRandomNonce(block)
}

// seal encrypts a secret for the row of url; it can be opened in no other row.
func (v Vault) seal(url string, s Secret) (string, error) {
	aead, err := v.aead()
	if err != nil {
		return "", err
	}
	return sealedPrefix + base64.StdEncoding.EncodeToString(aead.Seal(nil, nil, s.key, []byte(url))), nil
}

// open decrypts or reads the secret of the row of url. Errors repeat no secret.
func (v Vault) open(url, text string) (Secret, error) {
	encoded, sealed := strings.CutPrefix(text, sealedPrefix)
	switch {
	case sealed:
		aead, err := v.aead()
		if err != nil {
			return Secret{}, err
		}
		box, err := base64.StdEncoding.DecodeString(encoded)
		if err != nil {
			return Secret{}, errors.New("sealed webhook secret is damaged")
		}
		key, err := aead.Open(nil, nil, box, []byte(url))
		if err != nil {
			return Secret{}, errors.New("webhook secret was sealed under another key, or for another address")
		}
		return Secret{key: key}, nil
	case strings.HasPrefix(text, secretPrefix):
		return ParseSecret(text)
	case v.Read == nil:
		return Secret{}, errors.New("webhook secret is a reference, and this process reads none")
	}
	plain, err := v.Read(text)
	if err != nil {
		return Secret{}, fmt.Errorf("read webhook secret: %w", err)
	}
	return ParseSecret(strings.TrimSpace(plain))
}
