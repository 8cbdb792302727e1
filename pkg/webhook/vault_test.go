package webhook

import (
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/penstock/penstock/pkg/invalidation"
)

func TestUnracedSealedSecretOpensOnlyWithItsKeyAndForItsAddress(t *testing.T) {
	secret := NewSecret()
	sealed, err := home.seal("https://a.example/hook", secret)
	if err != nil || strings.Contains(sealed, strings.TrimPrefix(secret.Reveal(), "whsec_")) {
		t.Fatalf("sealed as %s, %v", sealed, err)
	}
	if again, _ := home.seal("https://a.example/hook", secret); again == sealed {
		t.Error("the same secret is sealed twice alike")
	}
	if opened, err := home.open("https://a.example/hook", sealed); err != nil || opened.Reveal() != secret.Reveal() {
		t.Errorf("opened to another secret, %v", err)
	}
	for name, open := range map[string]func() (Secret, error){
		"another address": func() (Secret, error) { return home.open("https://b.example/hook", sealed) },
		"another key": func() (Secret, error) {
			return Vault{Key: "another key for tests"}.open("https://a.example/hook", sealed)
		},
		"a damaged one": func() (Secret, error) { return home.open("https://a.example/hook", sealed[:len(sealed)-8]) },
		"no key":        func() (Secret, error) { return Vault{}.open("https://a.example/hook", sealed) },
	} {
		if s, err := open(); err == nil || strings.Contains(err.Error(), s.Reveal()) && len(s.key) > 0 {
			t.Errorf("%s opened it", name)
		}
	}
	if _, err := (Vault{Key: "short"}).seal("x", secret); !errors.Is(err, ErrNoKey) {
		t.Errorf("a short key: %v", err)
	}
}

func TestReferenceIsReadWhereTheSecretIsKept(t *testing.T) {
	secret := NewSecret()
	v := Vault{Read: func(ref string) (string, error) {
		if ref == "env:HOOK" {
			return secret.Reveal() + "\n", nil
		}
		return "", errors.New("not set")
	}}
	if s, err := v.open("https://a.example", "env:HOOK"); err != nil || s.Reveal() != secret.Reveal() {
		t.Errorf("got %v, %v", s, err)
	}
	if _, err := v.open("https://a.example", "env:OTHER"); err == nil {
		t.Error("a reference to nothing was opened")
	}
}

// Whatever is done with endpoints, no secret stands in the table as it is.
func TestNoSecretStandsInTheTableAsItIs(t *testing.T) {
	d := newFixture(t, atHome)
	for _, url := range []string{d.receiver.URL + "/own", d.receiver.URL + "/common"} {
		if strings.HasSuffix(url, "/own") {
			_, err := Register(d.ctx, d.pool, home, atHome, url, invalidation.By{Actor: "test", Reason: "a test"})
			d.must(err)
			_, err = Rotate(d.ctx, d.pool, home, url, time.Hour, invalidation.By{Actor: "test", Reason: "a test"})
			d.must(err)
		}
		_, err := FindEndpoint(d.ctx, d.pool, home, url)
		d.must(err)
	}
	if n := d.count(`SELECT count(*) FROM penstock.webhook_endpoint WHERE secret LIKE 'sealed:%' AND coalesce(old_secret, 'sealed:') LIKE 'sealed:%'`); n != 2 {
		t.Errorf("%d of 2 rows are sealed", n)
	}
	if n := d.count(`SELECT count(*) FROM penstock.webhook_endpoint e WHERE e::text ~ 'whsec_'`); n != 0 {
		t.Errorf("%d rows hold a plain secret", n)
	}
	if n := d.count(`SELECT count(*) FROM penstock.audit a WHERE a::text ~ 'whsec_|sealed:'`); n != 0 {
		t.Errorf("%d lines of audit hold a secret", n)
	}
}
