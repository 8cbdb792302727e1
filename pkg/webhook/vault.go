package webhook

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/sha256"
	"encoding/base64"
	"errors"
	"fmt"
	"strings"
)

// Vault seals and opens the secrets of receivers, so that whoever can read the database cannot sign in our name. It also
// reads those that only a reference stands for.
type Vault struct {
	// Key of the installation, the same in all its processes: 16 bytes or more that nobody can guess. Without one no new
	// secret can be made.
	Key string
	// Read returns the secret that env:NAME or file:/path refers to; nil: references are errors.
	Read func(ref string) (string, error)
}

// ErrNoKey says that the key of the installation is missing, or too short.
var ErrNoKey = errors.New("webhook secrets need a key of 16 bytes or more: set tasknode.webhook.key to env:NAME or file:/path")

const sealedPrefix = "sealed:"

// Check says whether new secrets can be made; the error is ErrNoKey.
func (v Vault) Check() error {
	_, err := v.aead()
	return err
}

func (v Vault) aead() (cipher.AEAD, error) {
	if len(v.Key) < 16 {
		return nil, ErrNoKey
	}
	key := sha256.Sum256([]byte("penstock webhook secrets\x00" + v.Key))
	block, err := aes.NewCipher(key[:])
	if err != nil {
		return nil, err
	}
	return cipher.NewGCMWithRandomNonce(block)
}

// seal writes a secret so that it can stand in the row of url, and in no other.
func (v Vault) seal(url string, s Secret) (string, error) {
	aead, err := v.aead()
	if err != nil {
		return "", err
	}
	return sealedPrefix + base64.StdEncoding.EncodeToString(aead.Seal(nil, nil, s.key, []byte(url))), nil
}

// open reads what stands in the row of url. Errors repeat no secret.
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
		return Secret{}, errors.New("webhook secret is a reference, which nobody here reads")
	}
	plain, err := v.Read(text)
	if err != nil {
		return Secret{}, fmt.Errorf("read webhook secret: %w", err)
	}
	return ParseSecret(strings.TrimSpace(plain))
}
