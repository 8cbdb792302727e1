package config

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
)

// TLS is the section for the certificates of a listener.
type TLS struct {
	Cert     string `koanf:"cert" help:"file with the server's certificate; without it connections are not encrypted"`
	Key      string `koanf:"key" help:"file with its key; both are read again when they change"`
	ClientCA string `koanf:"client_ca" help:"file with certificates of authorities: clients need a certificate of one of them, and their token as well"`
}

// Validate checks that the section names a complete set of files; its keys begin with prefix.
func (t TLS) Validate(prefix string) error {
	var errs []error
	if (t.Cert == "") != (t.Key == "") {
		errs = append(errs, fmt.Errorf("%s.cert is %q: want it together with %s.key", prefix, t.Cert, prefix))
	}
	if t.ClientCA != "" && t.Cert == "" {
		errs = append(errs, fmt.Errorf("%s.client_ca is %s: want it only together with %s.cert", prefix, t.ClientCA,
			prefix))
	}
	return errors.Join(errs...)
}

// Loopback reports whether only this machine can reach an address to listen on, host:port.
func Loopback(address string) bool {
	host, _, err := net.SplitHostPort(address)
	if err != nil {
		return false
	}
	ip, err := netip.ParseAddr(host)
	return host == "localhost" || err == nil && ip.IsLoopback()
}

// CheckListen is an error where an address to listen on does not name a port.
func CheckListen(key, address string) error {
	if _, port, err := net.SplitHostPort(address); err != nil || port == "" {
		return fmt.Errorf("%s is %q: want host:port, such as 127.0.0.1:8422", key, address)
	}
	return nil
}

// CheckPlain refuses an address beyond loopback without TLS, unless insecure_listen declares that
// the connections are secured otherwise. The keys of the options begin with program: listen, tls
// and insecure_listen.
func CheckPlain(program, listen string, t TLS, insecure bool) error {
	if t.Cert != "" || insecure || Loopback(listen) {
		return nil
	}
	return fmt.Errorf("%[1]s.listen is %[2]s: want %[1]s.tls.cert and %[1]s.tls.key as well, since tokens and "+
		"payloads would cross the "+
		"network in plain text; set %[1]s.insecure_listen where a proxy or a mesh in front encrypts", program, listen)
}
