package webhook

import (
	"errors"
	"fmt"
	"net/netip"
	"net/url"
	"slices"
	"strconv"
	"strings"
)

// AddressPolicy says where callbacks may go. The zero value allows https to port 443
// of public addresses.
type AddressPolicy struct {
	AllowHTTP bool // plain http to public addresses, on port 80 as well
	HTTPSOnly bool // https alone, to the hosts and networks below too

	// Ports of public addresses beside 443. Hosts and networks below have every port.
	Ports []uint16

	// AllowHosts and AllowNetworks admit internal receivers: a host by its name
	// or literal address, exactly, wherever it resolves to; a network for
	// whatever resolves into it.
	AllowHosts    []string
	AllowNetworks []netip.Prefix
}

// AddressConfig is an AddressPolicy as configuration has it.
type AddressConfig struct {
	HTTPSOnly, AllowHTTP bool
	Ports                []string
	AllowHosts           []string
	AllowNetworks        []string // as in 10.1.0.0/16
}

// NewPolicy makes a policy of the section of a program's configuration. Its errors name the option.
func NewPolicy(section string, c AddressConfig) (AddressPolicy, error) {
	p := AddressPolicy{HTTPSOnly: c.HTTPSOnly, AllowHTTP: c.AllowHTTP, AllowHosts: c.AllowHosts}
	for _, host := range c.AllowHosts {
		if _, err := netip.ParseAddr(host); err != nil && strings.ContainsAny(host, ":/[] ") {
			return p, fmt.Errorf("%s.allow_hosts: %q is not a host: want its name or address, without scheme and port",
				section, host)
		}
	}
	for _, text := range c.AllowNetworks {
		network, err := netip.ParsePrefix(text)
		if err != nil {
			return p, fmt.Errorf("%s.allow_networks: %q is not a network such as 10.1.0.0/16: %w", section, text, err)
		}
		p.AllowNetworks = append(p.AllowNetworks, network)
	}
	for _, text := range c.Ports {
		port, err := strconv.ParseUint(text, 10, 16)
		if err != nil || port == 0 {
			return p, fmt.Errorf("%s.ports: %q is not a port", section, text)
		}
		p.Ports = append(p.Ports, uint16(port))
	}
	return p, nil
}

// ErrForbiddenAddress is wrapped by every refusal.
var ErrForbiddenAddress = errors.New("callback address is not allowed")

func forbid(format string, args ...any) error {
	return fmt.Errorf("%w: %s", ErrForbiddenAddress, fmt.Sprintf(format, args...))
}

// Check is CheckURL for callers that need no URL.
func (p AddressPolicy) Check(raw string) error {
	_, err := p.CheckURL(raw)
	return err
}

// CheckURL checks an address when it is registered, without DNS: a name may
// resolve to another address later. Dialer checks the resolved address.
func (p AddressPolicy) CheckURL(raw string) (*url.URL, error) {
	u, port, err := parse(raw)
	if err != nil {
		return nil, err
	}
	if p.HTTPSOnly && u.Scheme != "https" {
		return nil, forbid("it must begin with https://")
	}
	if err := p.checkHost(u.Hostname()); err != nil {
		return nil, err
	}
	if p.mayBeInternal(u.Hostname()) {
		return u, nil
	}
	return u, p.checkPublic(u.Scheme, port)
}

// parse reads the address of a receiver, wherever it leads.
func parse(raw string) (*url.URL, uint16, error) {
	if len(raw) > 2048 {
		return nil, 0, forbid("it is longer than 2048 bytes")
	}
	u, err := url.Parse(raw)
	if err != nil {
		return nil, 0, forbid("it is not a URL")
	}
	switch {
	case u.Scheme != "https" && u.Scheme != "http":
		return nil, 0, forbid("it must begin with https:// or http://")
	case u.Hostname() == "":
		return nil, 0, forbid("it names no host")
	case u.User != nil:
		return nil, 0, forbid("it must not carry a user or password")
	case u.Fragment != "":
		return nil, 0, forbid("it must not carry a fragment")
	}
	port, err := portOf(u)
	return u, port, err
}

// portOf returns the port that a client of the URL connects to.
func portOf(u *url.URL) (uint16, error) {
	text := u.Port()
	switch {
	case text == "" && strings.HasSuffix(u.Host, ":"):
		return 0, forbid("its port is empty")
	case text == "" && u.Scheme == "http":
		return portHTTP, nil
	case text == "":
		return portHTTPS, nil
	}
	n, err := strconv.ParseUint(text, 10, 16)
	if err != nil || n == 0 {
		return 0, forbid("its port is not a port")
	}
	return uint16(n), nil
}

const portHTTP, portHTTPS = 80, 443

// mayBeInternal reports whether the operator has admitted the host, or may have:
// a name is known to be within an admitted network only once it is resolved.
func (p AddressPolicy) mayBeInternal(host string) bool {
	if p.allowsHost(host) {
		return true
	}
	addr, err := netip.ParseAddr(host)
	if err != nil {
		return len(p.AllowNetworks) > 0
	}
	return p.allowsAddr(addr.Unmap())
}

// checkPublic checks scheme and port of a receiver at a public address. An empty
// scheme is not known, and passes.
func (p AddressPolicy) checkPublic(scheme string, port uint16) error {
	if scheme == "http" && !p.AllowHTTP {
		return forbid("it must begin with https://; plain http goes only to hosts and networks that are allowed " +
			"by name")
	}
	if port == portHTTPS || port == portHTTP && p.AllowHTTP || slices.Contains(p.Ports, port) {
		return nil
	}
	return forbid("port %d of public addresses is not allowed", port)
}

// checkHost checks the host as written.
func (p AddressPolicy) checkHost(host string) error {
	if p.allowsHost(host) {
		return nil
	}
	if addr, err := netip.ParseAddr(host); err == nil {
		return p.checkAddr(addr)
	}
	name := strings.ToLower(strings.TrimSuffix(host, "."))
	if err := checkName(name); err != nil {
		return err
	}
	for _, internal := range []string{"localhost", "local", "internal", "intranet", "lan", "home.arpa", "localdomain"} {
		if name == internal || strings.HasSuffix(name, "."+internal) {
			return forbid("%s is an internal name", name)
		}
	}
	return nil
}

// checkName admits plain host names only. Everything else that a resolver or
// another program might read as an address (2130706433, 0x7f.1, 127.1, full-width
// digits) is refused instead of understood.
func checkName(name string) error {
	if name == "" || len(name) > 253 {
		return forbid("it names no host")
	}
	for i := range len(name) {
		if c := name[i]; !isLetterOrDigit(c) && c != '-' && c != '.' && c != '_' {
			return forbid("its host must be plain ASCII; write international names in punycode")
		}
	}
	labels := strings.Split(name, ".")
	if slices.ContainsFunc(labels, func(l string) bool { return l == "" || len(l) > 63 }) {
		return forbid("its host is malformed")
	}
	// The rule by which browsers tell addresses from names (WHATWG URL, "ends
	// in a number"); no top-level domain is one.
	last := labels[len(labels)-1]
	if _, err := strconv.ParseUint(last, 0, 64); err == nil || isAllDigits(last) || strings.HasPrefix(last, "0x") {
		return forbid("its host looks like a number; write IPv4 addresses as four decimal parts")
	}
	return nil
}

func isLetterOrDigit(c byte) bool { return c >= 'a' && c <= 'z' || c >= '0' && c <= '9' }

func isAllDigits(text string) bool {
	return strings.Trim(text, "0123456789") == ""
}

func (p AddressPolicy) allowsHost(host string) bool {
	host = strings.TrimSuffix(host, ".")
	return slices.ContainsFunc(p.AllowHosts, func(h string) bool {
		return strings.EqualFold(strings.TrimSuffix(h, "."),
			host)
	})
}

func (p AddressPolicy) allowsAddr(addr netip.Addr) bool {
	return slices.ContainsFunc(p.AllowNetworks, func(n netip.Prefix) bool { return n.Contains(addr) })
}

// checkAddr checks an address that is about to be connected to.
func (p AddressPolicy) checkAddr(addr netip.Addr) error {
	if addr.Zone() != "" {
		return forbid("%s belongs to one network interface", addr)
	}
	addr = addr.Unmap() // ::ffff:127.0.0.1 is 127.0.0.1
	if p.allowsAddr(addr) {
		return nil
	}
	if nat64.Contains(addr) {
		// On a network with IPv6 only, this is how public IPv4 is reached, and
		// private IPv4 as well.
		b := addr.As16()
		return p.checkAddr(netip.AddrFrom4([4]byte(b[12:])))
	}
	if addr.Is6() && !globalIPv6.Contains(addr) {
		return forbid("%s is not a public address", addr)
	}
	for _, r := range reserved {
		if r.Contains(addr) {
			return forbid("%s is not a public address (%s)", addr, r)
		}
	}
	return nil
}

var (
	nat64      = netip.MustParsePrefix("64:ff9b::/96") // RFC 6052
	globalIPv6 = netip.MustParsePrefix("2000::/3")     // everything else is special (RFC 4291)

	// reserved are the blocks of the IANA special-purpose registries (RFC 6890
	// and its successors) that lie within what would else pass as public, and
	// one public address that only ever answers inside a cloud.
	reserved = []netip.Prefix{
		netip.MustParsePrefix("0.0.0.0/8"),
		netip.MustParsePrefix("10.0.0.0/8"),
		netip.MustParsePrefix("100.64.0.0/10"), // shared by carriers; 100.100.100.200 is a metadata service
		netip.MustParsePrefix("127.0.0.0/8"),
		netip.MustParsePrefix("168.63.129.16/32"), // Azure's host agent
		netip.MustParsePrefix("169.254.0.0/16"),   // link-local; 169.254.169.254 is the metadata service
		netip.MustParsePrefix("172.16.0.0/12"),
		netip.MustParsePrefix("192.0.0.0/24"),
		netip.MustParsePrefix("192.0.2.0/24"),
		netip.MustParsePrefix("192.31.196.0/24"),
		netip.MustParsePrefix("192.52.193.0/24"),
		netip.MustParsePrefix("192.88.99.0/24"), // 6to4 relays
		netip.MustParsePrefix("192.168.0.0/16"),
		netip.MustParsePrefix("192.175.48.0/24"),
		netip.MustParsePrefix("198.18.0.0/15"),
		netip.MustParsePrefix("198.51.100.0/24"),
		netip.MustParsePrefix("203.0.113.0/24"),
		netip.MustParsePrefix("224.0.0.0/4"),
		netip.MustParsePrefix("240.0.0.0/4"),

		netip.MustParsePrefix("2001::/23"), // Teredo, ORCHID and other protocols; Teredo embeds IPv4
		netip.MustParsePrefix("2001:db8::/32"),
		netip.MustParsePrefix("2002::/16"), // 6to4 embeds IPv4
		netip.MustParsePrefix("2620:4f:8000::/48"),
		netip.MustParsePrefix("3fff::/20"),
	}
)
