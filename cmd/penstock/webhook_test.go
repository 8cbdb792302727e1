package main

import (
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/penstock/penstock/pkg/webhook"
)

func TestUnracedReceiversAreRegisteredRotatedAndDisabledByCommands(t *testing.T) {
	s := newSession(t)
	key := filepath.Join(t.TempDir(), "key")
	if err := os.WriteFile(key, []byte("a key that nobody can guess\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	secret := regexp.MustCompile(`whsec_\S+`)
	const hook = "https://hooks.acme.example/in"
	registered := secret.FindString(s.penstock("webhook register " + hook + " --reason contract --key file:" + key))
	if _, err := webhook.ParseSecret(registered); err != nil {
		t.Fatalf("registering prints %q: %v", registered, err)
	}
	if again := s.penstock("webhook register " + hook + " --reason again --key file:" + key); !strings.Contains(again, registered) {
		t.Errorf("registering again prints another secret: %s", again)
	}
	rotated := secret.FindString(s.penstock("webhook rotate " + hook + " --overlap 1h --reason leaked --key file:" + key))
	vault := webhook.Vault{Key: "a key that nobody can guess"}
	e, err := webhook.FindEndpoint(t.Context(), s.pool, vault, hook)
	if err != nil || len(e.Secrets) != 2 || e.Secrets[0].Reveal() != rotated || e.Secrets[1].Reveal() != registered {
		t.Errorf("signed with %d secrets (%v), want the new one and the old one", len(e.Secrets), err)
	}
	before := secret.FindString(s.penstock("webhook secret https://other.example/in --key file:" + key))
	public := strings.TrimSpace(s.penstock("webhook rotate --yes --reason yearly --key file:" + key))
	if printed := s.penstock("webhook key --key file:" + key); !strings.Contains(printed, regexp.MustCompile(`whpk_\S+`).FindString(public)) {
		t.Errorf("the key is\n%s, rotating printed %s", printed, public)
	}
	e, err = webhook.FindEndpoint(t.Context(), s.pool, vault, "https://other.example/")
	if err != nil || len(e.Secrets) != 2 || e.Secrets[1].Reveal() != before || e.Secrets[0].Reveal() == before {
		t.Errorf("others are not signed for with a new secret and the one before it (%v)", err)
	}
	s.penstock("webhook disable " + hook + " --yes --reason 'no contract any more'")
	list := s.penstock("webhook list")
	for _, want := range []string{"(all others)", hook + "  disabled  own", "no contract any more"} {
		if !strings.Contains(list, want) {
			t.Errorf("the list does not say %q:\n%s", want, list)
		}
	}
	if strings.Contains(list, "whsec_") {
		t.Error("the list has secrets")
	}
	for line, want := range map[string]string{
		"webhook register http://10.0.0.7/in --reason r --key file:" + key:            "not allowed",
		"webhook register http://10.0.0.7/in --internal --reason r --key file:" + key: "whsec_",
		"webhook register " + hook + " --reason r":                                    "give --key",
		"webhook register " + hook + " --reason r --key env:NOBODY_SET_THIS":          "NOBODY_SET_THIS",
		"webhook rotate https://nobody.example/ --reason r --key file:" + key:         "has none of its own",
		"audit list --verb rotate_webhook_secret":                                     "leaked",
	} {
		if got := s.penstock(line); !strings.Contains(got, want) {
			t.Errorf("%s says %s, not %q", line, got, want)
		}
	}
	s.serve()
	for _, c := range []struct{ line, want string }{
		{"webhook list", hook},
		{"webhook secret " + hook, "whsec_"},
		{"webhook key", "whpk_"},
		{"webhook key --key x", "--key goes with --database-url"},
		{"webhook register " + hook + " --internal --reason r", "--internal goes with --database-url"},
		{"webhook register https://new.example/in --reason r", "whsec_"},
		{"webhook rotate https://new.example/in --reason leaked", "whsec_"},
		{"webhook rotate --reason yearly", "not confirmed"},
		{"webhook rotate --yes --reason yearly --overlap 0s", "whpk_"},
		{"webhook disable https://new.example/in --yes --reason r", "done"},
	} {
		if got := s.penstock(c.line); !strings.Contains(got, c.want) {
			t.Errorf("through the API %s says %s, not %q", c.line, got, c.want)
		}
	}
}
