package worker

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"strings"
	"testing"
)

func TestNoWorkerIsAtALinkLocalAddress(t *testing.T) {
	for address, ok := range map[string]bool{
		"127.0.0.1": true, "10.1.2.3": true, "192.168.1.5": true, "8.8.8.8": true, "::1": true, "fd12::7": true,
		"169.254.169.254": false, "169.254.1.1": false, "fe80::1": false, "fe80::1%eth0": false,
		"::ffff:169.254.169.254": false, "64:ff9b::a9fe:a9fe": false, "fd00:ec2::254": false, "168.63.129.16": false,
	} {
		err := CheckAddress(netip.MustParseAddr(address))
		if (err == nil) != ok || err != nil && !errors.Is(err, ErrForbiddenAddress) {
			t.Errorf("%s: %v", address, err)
		}
		if host := net.JoinHostPort(strings.ReplaceAll(address, "%", "%25"), "80"); (CheckEndpoint("http://"+host+"/run") == nil) != ok {
			t.Errorf("an instance may be registered at %s: %v", host, !ok)
		}
	}
}

// A name may resolve to such an address: neither calls nor probes connect to it.
func TestNoConnectionToALinkLocalAddress(t *testing.T) {
	w := newWire(Model{Timeouts: Timeouts{Connect: Seconds(1e9)}}.WithDefaults(), nil, Config{}.withDefaults())
	a := w.do(context.Background(), request{method: "GET", url: "http://[::ffff:169.254.169.254]:80/latest/meta-data"})
	if !errors.Is(a.err, ErrForbiddenAddress) || a.sent {
		t.Errorf("sent %v, error %v", a.sent, a.err)
	}
}
