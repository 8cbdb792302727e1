package config_test

import (
	"strings"
	"testing"

	"github.com/penstock/penstock/internal/config"
)

func TestOnlyLoopbackAddressesAreForThisMachineAlone(t *testing.T) {
	for address, want := range map[string]bool{
		"127.0.0.1:1": true, "127.8.8.8:1": true, "[::1]:1": true, "localhost:1": true,
		":1": false, "0.0.0.0:1": false, "[::]:1": false, "10.0.0.1:1": false, "localhost.example:1": false, "nonsense": false,
	} {
		if got := config.Loopback(address); got != want {
			t.Errorf("%s: %v, want %v", address, got, want)
		}
	}
}

func TestPlainTextIsServedBeyondThisMachineOnlyWhereTheOperatorSaysSo(t *testing.T) {
	secured := config.TLS{Cert: "cert.pem", Key: "key.pem"}
	for _, c := range []struct {
		listen   string
		tls      config.TLS
		insecure bool
		allowed  bool
	}{
		{"127.0.0.1:8420", config.TLS{}, false, true},
		{"[::1]:8420", config.TLS{}, false, true},
		{"127.0.0.1:8420", secured, false, true},
		{"0.0.0.0:8420", config.TLS{}, false, false},
		{":8420", config.TLS{}, false, false},
		{"10.0.0.1:8420", config.TLS{}, false, false},
		{"[::]:8420", config.TLS{}, false, false},
		{"0.0.0.0:8420", config.TLS{}, true, true},
		{"0.0.0.0:8420", secured, false, true},
	} {
		err := config.CheckPlain("leader", c.listen, c.tls, c.insecure)
		if (err == nil) != c.allowed {
			t.Errorf("%s, TLS %v, insecure %v: %v", c.listen, c.tls.Cert != "", c.insecure, err)
		}
		if err != nil && (!strings.Contains(err.Error(), "leader.tls.cert") || !strings.Contains(err.Error(), "leader.insecure_listen")) {
			t.Errorf("the error does not name the options: %v", err)
		}
	}
}

func TestFilesOfTLSGoTogether(t *testing.T) {
	for flaw, section := range map[string]config.TLS{
		"x.cert":      {Cert: "cert.pem"},
		"x.key":       {Key: "key.pem"},
		"x.client_ca": {ClientCA: "ca.pem"},
	} {
		if err := section.Validate("x"); err == nil || !strings.Contains(err.Error(), flaw) {
			t.Errorf("%+v: %v", section, err)
		}
	}
	if err := (config.TLS{Cert: "c", Key: "k", ClientCA: "a"}).Validate("x"); err != nil {
		t.Error(err)
	}
}

func TestAnAddressToListenOnNamesItsPort(t *testing.T) {
	for address, ok := range map[string]bool{
		"127.0.0.1:8422": true, ":8422": true, "[::1]:0": true, "": false, "127.0.0.1": false, "127.0.0.1:": false,
	} {
		if err := config.CheckListen("leader.debug_listen", address); (err == nil) != ok {
			t.Errorf("%q: %v", address, err)
		}
	}
}
