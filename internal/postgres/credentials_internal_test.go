package postgres

import (
	"os"
	"path/filepath"
	"testing"
)

// TLS settings belong to a server. A service file may name another second server than at the start.
func TestTLSSettingsAreNotThoseOfAnotherServer(t *testing.T) {
	service := filepath.Join(t.TempDir(), "service")
	write := func(hosts, ports, mode string) {
		text := "[s]\nhost=" + hosts + "\nport=" + ports + "\nsslmode=" + mode + "\n"
		if err := os.WriteFile(service, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for _, now := range []struct {
		hosts, ports string
		read         bool
	}{
		{"one,two", "1,2", true}, {"one,three", "1,2", false}, {"one,two", "1,3", false}, {"one", "1", false},
	} {
		write("one,two", "1,2", "disable")
		cc, err := ConnConfig(Config{DSN: "user=u dbname=d service=s servicefile=" + service})
		if err != nil {
			t.Fatal(err)
		}
		write(now.hosts, now.ports, "require")
		if err := reread(t.Context(), cc); err != nil {
			t.Fatal(err)
		}
		if first, second := cc.TLSConfig != nil, cc.Fallbacks[0].TLSConfig != nil; first != now.read || second != now.read {
			t.Errorf("%s, ports %s: TLS of the servers is %t and %t, want %t", now.hosts, now.ports, first, second, now.read)
		}
	}
}
