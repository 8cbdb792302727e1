package webhook

import (
	"errors"
	"strings"
	"testing"

	"github.com/penstock/penstock/pkg/invalidation"
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

// Tenants share a path and differ in the query. The one that wants no more is disabled alone. Long addresses, whose marks
// do not fit a row as they are, differ in their last byte.
func TestGoneHoldsForItsQueryUntilItOrItsPathIsRegistered(t *testing.T) {
	d := newFixture(t, atHome)
	long := "https://acme.example/" + strings.Repeat("p", urlBytesMax-len("https://acme.example/?tenant=1"))
	goneHoldsForItsQuery(d, "https://acme.example")
	goneHoldsForItsQuery(d, "https://acme.example/in")
	goneHoldsForItsQuery(d, long[:len(long)-1])
	d.must(markGone(d.ctx, d.pool, long[:len(long)-1]+"q?tenant=1"))
	goneHoldsForItsQuery(d, long)
	if e, err := FindEndpoint(d.ctx, d.pool, home, long[:len(long)-1]+"q?tenant=1"); err != nil || !e.Disabled {
		t.Errorf("the registration of another long address enabled this one (%v)", err)
	}
}

func goneHoldsForItsQuery(d *fixture, bare string) {
	d.Helper()
	register := func(address string) {
		_, err := Register(d.ctx, d.pool, home, AddressPolicy{}, address, invalidation.By{Actor: "test", Reason: "a test"})
		d.must(err)
	}
	gone := func(want ...bool) {
		d.Helper()
		for i, query := range []string{"", "?tenant=1", "?tenant=2", "?tenant=3"} {
			if e, err := FindEndpoint(d.ctx, d.pool, home, bare+query); err != nil || e.Disabled != want[i] {
				d.Errorf("%d bytes and %q: disabled is %t (%v)", len(bare), query, e.Disabled, err)
			}
		}
	}
	register(bare)
	register(bare + "?tenant=3")
	for _, query := range []string{"?tenant=1", "?tenant=2", "?tenant=3"} {
		d.must(markGone(d.ctx, d.pool, bare+query))
	}
	gone(false, true, true, true)
	register(bare + "?tenant=1")
	gone(false, false, true, true)
	register(bare)
	gone(false, false, false, true) // which has a row of its own
	d.must(markGone(d.ctx, d.pool, bare))
	gone(true, true, true, true)
}

// Databases have such marks.
func TestTheMarkOfAGoneAddressIsNeverAnotherOne(t *testing.T) {
	for address, want := range map[string]string{
		"https://acme.example/in":                                      "https://acme.example/in",
		"https://acme.example/in?tenant=1":                             "https://acme.example/in#query-70fcdb809679f538a89d5715bc51a350",
		"https://a.example/" + strings.Repeat("p", 1991) + "?tenant=1": "https://a.example/" + strings.Repeat("p", 1991) + "#query-70fcdb809679f538a89d5715bc51a350",
		"https://a.example/" + strings.Repeat("p", 1992) + "?tenant=1": "https://a.example/" + strings.Repeat("p", 1882) + "#path-769657f4db41012023a2717cf672f1b5#query-70fcdb809679f538a89d5715bc51a350",
	} {
		if got := goneMark(mustParse(t, address)); got != want {
			t.Errorf("the mark of %s is %s, want %s", address, got, want)
		}
	}
}
