package webhook

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"strings"
	"sync/atomic"
	"syscall"
)

// DialFunc opens a connection to host:port.
type DialFunc func(ctx context.Context, network, address string) (net.Conn, error)

// schemeKey is the context key under which Deliver tells the dialer the scheme of the URL.
type schemeKey struct{}

// Dialer returns a dial function that checks every address right before it
// connects, after the name was resolved. A Control of base's own runs only for
// addresses that passed. The error wraps ErrForbiddenAddress where no address of the name is allowed.
func (p AddressPolicy) Dialer(base net.Dialer) DialFunc {
	inner, innerContext := base.Control, base.ControlContext
	return func(ctx context.Context, network, address string) (net.Conn, error) {
		host, _, err := net.SplitHostPort(address)
		if err != nil {
			return nil, forbid("%q is not host:port", address)
		}
		if err := p.checkHost(host); err != nil {
			return nil, err
		}
		allowed := p.allowsHost(host)
		var passed atomic.Bool // an address that the policy allows
		dialer := base
		dialer.Control = nil
		dialer.ControlContext = func(ctx context.Context, network, resolved string, conn syscall.RawConn) error {
			if !allowed {
				if err := p.checkResolved(ctx, network, resolved); err != nil {
					return err
				}
			}
			passed.Store(true)
			switch {
			case innerContext != nil:
				return innerContext(ctx, network, resolved, conn)
			case inner != nil:
				return inner(network, resolved, conn)
			}
			return nil
		}
		conn, err := dialer.DialContext(ctx, network, address)
		if errors.Is(err, ErrForbiddenAddress) && passed.Load() {
			// Of several addresses the error is that of the first. One that may be connected to did not answer.
			err = errors.New(err.Error() + "; another address of it did not answer")
		}
		return conn, err
	}
}

func (p AddressPolicy) checkResolved(ctx context.Context, network, resolved string) error {
	if !strings.HasPrefix(network, "tcp") {
		return forbid("%s is not TCP", network)
	}
	to, err := netip.ParseAddrPort(resolved)
	if err != nil {
		return forbid("%q is not an address", resolved)
	}
	if err := p.checkAddr(to.Addr()); err != nil {
		return err
	}
	if p.allowsAddr(to.Addr().Unmap()) {
		return nil
	}
	scheme, _ := ctx.Value(schemeKey{}).(string)
	return p.checkPublic(scheme, to.Port())
}
