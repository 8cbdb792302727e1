package webhook

import (
	"crypto/ed25519"
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
)

// A receiver knows its own secret. With it, it can sign nothing that another receiver accepts.
func TestUnracedReceiverCannotSignForAnotherOne(t *testing.T) {
	d := newFixture(t, atHome)
	secretFor := func(address string) Secret {
		t.Helper()
		e, err := FindEndpoint(d.ctx, d.pool, home, address)
		d.must(err)
		return e.Secrets[0]
	}
	one, other := secretFor("https://one.example/in"), secretFor("https://other.example/in")
	forged, err := Sign("msg_1", time.Now(), []byte(`{}`), one)
	d.must(err)
	if err := Verify(forged, time.Now(), []byte(`{}`), other); !errors.Is(err, ErrSignature) {
		t.Errorf("the other receiver accepts what the first one signed: %v", err)
	}
	for _, same := range []string{"https://one.example/elsewhere?job=7", "https://ONE.example:443/in"} {
		if got := secretFor(same); got.Reveal() != one.Reveal() {
			t.Errorf("%s has another secret than its origin", same)
		}
	}
	for _, strange := range []string{"http://one.example/in", "https://one.example:8443/in", "https://one.example.org/in"} {
		if got := secretFor(strange); got.Reveal() == one.Reveal() {
			t.Errorf("%s has the secret of https://one.example", strange)
		}
	}
}

// All receivers have the public key; issuer and audience tell them whether a message is for them.
func TestEveryReceiverVerifiesWithThePublicKey(t *testing.T) {
	d := newFixture(t, atHome)
	d.finishWork(d.receiver.URL + "/done?token=x")
	d.must(d.deliver())
	keys, err := PublicKeys(d.ctx, d.pool, home)
	d.must(err)
	d.must(VerifyKey(d.header, time.Now(), d.body, keys...))
	if err := VerifyKey(d.header, time.Now(), append(d.body, ' '), keys...); !errors.Is(err, ErrSignature) {
		t.Errorf("a changed body verifies: %v", err)
	}
	if err := VerifyKey(d.header, time.Now(), d.body, NewSecret().signingKey().Public()); !errors.Is(err, ErrSignature) {
		t.Errorf("another installation's key verifies it: %v", err)
	}
	var body struct {
		Issuer, Audience string
		Data             struct{ Queue string }
	}
	d.must(json.Unmarshal(d.body, &body))
	if body.Issuer != keys[0].Fingerprint() || body.Audience != d.receiver.URL+"/done?token=x" || body.Data.Queue != "work" {
		t.Errorf("under the signature: issuer %q, audience %q, queue %q", body.Issuer, body.Audience, body.Data.Queue)
	}
	again, err := ParsePublicKey(keys[0].String())
	if err != nil || !again.key.Equal(keys[0].key) {
		t.Errorf("public key %s is read as another one: %v", keys[0], err)
	}
}

func TestNewRootReplacesDerivedSecretsAndTheKey(t *testing.T) {
	d := newFixture(t, atHome)
	by := invalidation.By{Actor: "test", Reason: "a test"}
	before, err := FindEndpoint(d.ctx, d.pool, home, d.receiver.URL)
	d.must(err)
	_, err = Rotate(d.ctx, d.pool, home, "", time.Hour, by)
	d.must(err)
	d.finishWork(d.receiver.URL)
	d.must(d.deliver())
	after, err := FindEndpoint(d.ctx, d.pool, home, d.receiver.URL)
	d.must(err)
	if len(after.Secrets) != 2 || len(after.Keys) != 2 || after.Secrets[0].Reveal() == before.Secrets[0].Reveal() {
		t.Fatalf("%d secrets and %d keys sign, want the new and the old", len(after.Secrets), len(after.Keys))
	}
	d.must(Verify(d.header, time.Now(), d.body, before.Secrets...))
	d.must(Verify(d.header, time.Now(), d.body, after.Secrets[0]))
	d.must(VerifyKey(d.header, time.Now(), d.body, before.Keys[0].Public()))
	d.must(VerifyKey(d.header, time.Now(), d.body, after.Keys[0].Public()))
}

func TestSigningKeyDoesNotPrint(t *testing.T) {
	k := NewSecret().signingKey()
	seed := fmt.Sprintf("%x", ed25519.PrivateKey(k.key).Seed())
	for _, format := range []string{"%v", "%+v", "%#v", "%s", "%x"} {
		text := fmt.Sprintf(format, k)
		if strings.Contains(text, seed) {
			t.Errorf("%s shows the key", format)
		}
	}
}

func TestPublicKeysThatAreRefused(t *testing.T) {
	for _, text := range []string{"", "whpk_", "whpk_AAAA", "whsec_" + strings.Repeat("A", 43) + "=", strings.Repeat("A", 43) + "="} {
		if _, err := ParsePublicKey(text); err == nil {
			t.Errorf("%q was accepted", text)
		}
	}
	// A key that was never set verifies nothing.
	h, err := sign("msg_1", time.Now(), nil, []Secret{NewSecret()}, []signingKey{NewSecret().signingKey()})
	if err != nil {
		t.Fatal(err)
	}
	if err := VerifyKey(h, time.Now(), nil, PublicKey{}); !errors.Is(err, ErrSignature) {
		t.Errorf("an empty key verifies: %v", err)
	}
}
