package worker

import (
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"syscall"
)

// ErrForbiddenAddress is wrapped where the address of an instance is one at which no worker can be.
var ErrForbiddenAddress = errors.New("no worker can have this address")

// forbidden are the addresses under which a machine or its cloud answers questions about itself: whoever may announce
// an instance would be sent requests there, and read the answers as results. Loopback and private networks are where
// workers are.
var forbidden = []netip.Prefix{
	netip.MustParsePrefix("169.254.0.0/16"),     // link-local; 169.254.169.254 is the metadata service
	netip.MustParsePrefix("fe80::/10"),          // link-local
	netip.MustParsePrefix("fd00:ec2::/32"),      // metadata of AWS
	netip.MustParsePrefix("168.63.129.16/32"),   // Azure's host agent
	netip.MustParsePrefix("100.100.100.200/32"), // metadata of Alibaba Cloud
}

var nat64 = netip.MustParsePrefix("64:ff9b::/96") // RFC 6052: the last four bytes are an IPv4 address

// CheckAddress refuses the addresses of link-local networks and of the metadata services of clouds.
func CheckAddress(addr netip.Addr) error {
	addr = addr.Unmap().WithZone("") // ::ffff:169.254.169.254 is 169.254.169.254
	if nat64.Contains(addr) {
		b := addr.As16()
		addr = netip.AddrFrom4([4]byte(b[12:]))
	}
	if slices.ContainsFunc(forbidden, func(p netip.Prefix) bool { return p.Contains(addr) }) {
		return fmt.Errorf("%w: %s is link-local, or the metadata service of a cloud", ErrForbiddenAddress, addr)
	}
	return nil
}

// CheckDial is CheckAddress as the Control of a net.Dialer: it gets the address that a name was resolved to.
func CheckDial(_, address string, _ syscall.RawConn) error {
	host, err := netip.ParseAddrPort(address)
	if err != nil {
		return nil //nolint:nilerr // not an address of the internet: a dialer of tests
	}
	return CheckAddress(host.Addr())
}

// checkHost is CheckAddress where a host is written as an address.
func checkHost(host string) error {
	if addr, err := netip.ParseAddr(host); err == nil {
		return CheckAddress(addr)
	}
	return nil
}
