package webhook

import (
	"errors"
	"testing"
)

func TestAnAddressIsKeptInOneFormWithAndWithoutItsQuery(t *testing.T) {
	for raw, want := range map[string][2]string{
		"https://acme.example/in":                {"https://acme.example/in", "https://acme.example/in"},
		"https://ACME.Example:443/In?Token=A%2F": {"https://acme.example/In?Token=A%2F", "https://acme.example/In"},
		"https://acme.example./in":               {"https://acme.example/in", "https://acme.example/in"},
		"https://acme.example.:8443/in":          {"https://acme.example:8443/in", "https://acme.example:8443/in"},
		"http://acme.example:80":                 {"http://acme.example", "http://acme.example"},
		"http://acme.example:443/":               {"http://acme.example:443/", "http://acme.example:443/"},
		"https://[2001:DB8::1]:443/a%20b":        {"https://[2001:db8::1]/a%20b", "https://[2001:db8::1]/a%20b"},
		"https://[2001:db8::1]:8443/":            {"https://[2001:db8::1]:8443/", "https://[2001:db8::1]:8443/"},
	} {
		u, _, err := parse(raw)
		if err != nil {
			t.Fatalf("%s: %v", raw, err)
		}
		if got := [2]string{canonical(u), withoutQuery(u)}; got != want {
			t.Errorf("%s is kept as %q, want %q", raw, got, want)
		}
		again, _, err := parse(canonical(u))
		if err != nil || canonical(again) != canonical(u) {
			t.Errorf("%s is not kept as it is: %v", canonical(u), err)
		}
	}
	for _, raw := range []string{"", "not a url", "acme.example/in", "ftp://acme.example/", "https:///in", "https://u:p@acme.example/", "https://acme.example/#x", "https://acme.example:0/"} {
		if u, _, err := parse(raw); !errors.Is(err, ErrForbiddenAddress) {
			t.Errorf("%q is read as %v (%v)", raw, u, err)
		}
	}
}
